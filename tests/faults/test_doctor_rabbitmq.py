"""What `deadsure doctor` finds in a real RabbitMQ: each broken configuration is made and recognised by its code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from amqp import Message
from kombu import Connection, Queue
from psycopg2.extensions import connection as PgConnection

from app import settings as app_settings
from app.checks.finding import Finding, Severity
from app.outbox import take
from app.settings import Settings, read
from app.stack import Postgres, RabbitMQ
from db.session import connect, rows
from tasks.publisher import Publisher
from tasks.topology import QUARANTINE_ARGUMENTS, WORK_ARGUMENTS
from tests.nodes import database as databases
from tests.nodes.servers import BrokerNode, delete_vhost, management, new_vhost
from tests.nodes.waiting import wait_for

E, W = Severity.ERROR, Severity.WARNING
CONFIRMED = {"confirm_publish": True}


@dataclass(frozen=True)
class Ward:
    """A broker with the topology of this release, and the doctor's look at it."""

    broker: BrokerNode
    server: RabbitMQ
    settings: Settings
    database: PgConnection

    @property
    def vhost(self) -> str:
        return urlsplit(self.broker.url).path[1:]

    def look(self, **changed: Any) -> dict[str, Finding]:
        """What is news, by code."""
        from app.job_types import REGISTRY  # noqa: PLC0415  filled when the job files are imported
        from tasks.checks.broker import check_broker  # noqa: PLC0415  reads the environment

        types = {key: known for key, known in REGISTRY.items() if not key[0].startswith("tests.")}
        found = check_broker(replace(self.settings, **changed), types, self.database, CONFIRMED)
        assert all(one.next_step for one in found if one.severity is not Severity.OK)
        return {one.code: one for one in found if one.severity is not Severity.OK}

    def news(self, **changed: Any) -> dict[str, Severity]:
        return {code: one.severity for code, one in self.look(**changed).items() if one.severity is not Severity.INFO}

    def declare(self) -> None:
        publisher = Publisher(self.broker.url, ["jobs"], 5)
        publisher.open()
        publisher.close()

    def clear(self) -> None:
        """Nothing of ours is left in the virtual host, nor in the database."""
        with self.channel() as channel:
            for queue in ("jobs", "quarantine"):
                channel.queue_delete(queue)
            for exchange in ("jobs", "jobs.dlx"):
                channel.exchange_delete(exchange)
        for kind in ("policies", "operator-policies"):
            for known in self.api(kind):
                management(self.server, "DELETE", f"{kind}/{self.vhost}/{known['name']}")
        rows(self.database, "DELETE FROM workers; DELETE FROM outbox; DELETE FROM jobs")

    @contextmanager
    def channel(self) -> Iterator[Any]:
        with Connection(self.broker.url) as connection:
            yield connection.default_channel

    def again(self, name: str, **arguments: Any) -> None:
        """The queue, deleted and declared with other arguments; None leaves one out."""
        wanted = WORK_ARGUMENTS if name == "jobs" else QUARANTINE_ARGUMENTS
        given = {key: value for key, value in {**wanted, **arguments}.items() if value is not None}
        with self.channel() as channel:
            channel.queue_delete(name)
            Queue(name, durable=True, queue_arguments=given)(channel).queue_declare()
            channel.queue_bind(name, "jobs" if name == "jobs" else "jobs.dlx", name)

    def publish(self, exchange: str, routing_key: str) -> None:
        """One message that no job of the database sent."""
        with self.channel() as channel:
            channel.confirm_select()
            channel.basic_publish_confirm(Message(b"{}"), exchange=exchange, routing_key=routing_key)

    def policy(self, pattern: str, definition: dict[str, Any], kind: str = "policies") -> None:
        body = {"pattern": pattern, "definition": definition, "apply-to": "queues"}
        management(self.server, "PUT", f"{kind}/{self.vhost}/p", body)

    def api(self, kind: str) -> Any:
        """What the management API tells of the virtual host."""
        return self.server.api(f"{kind}/{self.vhost}")


@pytest.fixture(scope="module")
def shared(rabbitmq: RabbitMQ, shared_postgres: Postgres, template: str) -> Iterator[Ward]:
    """One virtual host and one database for all tests of this file: making them takes longer than a look."""
    broker = new_vhost(rabbitmq, "doctor")
    with databases.database(shared_postgres.url, "doctor", template) as url:
        environment = {"DATABASE_URL": url, **broker.environment()}
        with closing(connect(url, "deadsure test")) as database:
            yield Ward(broker, rabbitmq, read(environment), database)
    delete_vhost(rabbitmq, "doctor")


@pytest.fixture
def ward(shared: Ward, monkeypatch: pytest.MonkeyPatch) -> Ward:
    for name, value in (("tasks.checks.probe.PROBE_S", 1.5), ("tasks.intake.WAIT_S", 0.05)):
        monkeypatch.setattr(name, value)
    monkeypatch.setenv("DATABASE_URL", shared.settings.database_url)
    monkeypatch.setenv("BROKER_URL", shared.broker.url)
    app_settings.settings.cache_clear()
    shared.clear()
    shared.declare()
    return shared


@pytest.fixture
def jobs(ward: Ward) -> Any:
    """`tests.faults.jobs`, imported when the environment is there."""
    assert isinstance(ward, Ward)
    import tests.faults.jobs  # noqa: PLC0415

    return tests.faults.jobs


def unbind(ward: Ward) -> None:
    with ward.channel() as channel:
        channel.queue_unbind("quarantine", "jobs.dlx", "quarantine")


def unbind_work(ward: Ward) -> None:
    with ward.channel() as channel:
        channel.queue_unbind("jobs", "jobs", "jobs")


def delete(*, queue: str = "", exchange: str = "") -> Callable[[Ward], None]:
    def run(ward: Ward) -> None:
        with ward.channel() as channel:
            if queue:
                channel.queue_delete(queue)
            else:
                channel.exchange_delete(exchange)

    return run


def dead_letter_left(ward: Ward) -> None:
    ward.publish("jobs.dlx", "quarantine")


def message_of_nobody(ward: Ward) -> None:
    ward.publish("jobs", "jobs")


BROKEN: dict[str, tuple[Callable[[Ward], object], dict[str, Severity]]] = {
    "classic": (
        lambda ward: ward.again(
            "jobs", **{"x-queue-type": "classic", "x-dead-letter-strategy": None, "x-delivery-limit": None}
        ),
        {"queue.type": E, "queue.dead_letter_strategy": E, "queue.delivery_limit": E},
    ),
    "no DLX": (
        lambda ward: ward.again(
            "jobs",
            **{"x-dead-letter-exchange": None, "x-dead-letter-routing-key": None, "x-dead-letter-strategy": None},
        ),
        {"queue.dead_letter_exchange": E, "queue.dead_letter_strategy": E},
    ),
    "at most once": (
        lambda ward: ward.again("jobs", **{"x-dead-letter-strategy": "at-most-once"}),
        {"queue.dead_letter_strategy": E},
    ),
    "drop-head": (
        lambda ward: ward.again("jobs", **{"x-overflow": "drop-head", "x-dead-letter-strategy": None}),
        {"queue.overflow": E, "queue.dead_letter_strategy": E},
    ),
    "delivery limit": (lambda ward: ward.again("jobs", **{"x-delivery-limit": 2}), {"queue.delivery_limit": E}),
    "classic quarantine": (
        lambda ward: ward.again("quarantine", **{"x-queue-type": "classic"}),
        {"queue.type": E},
    ),
    "work queue gone": (delete(queue="jobs"), {"queue.missing": W}),
    "work queue unbound": (unbind_work, {"queue.unbound": E}),
    "exchange gone": (delete(exchange="jobs"), {"exchange.missing": E}),
    "dlx gone": (delete(exchange="jobs.dlx"), {"dlx.missing": E}),
    "quarantine queue gone": (delete(queue="quarantine"), {"dlx.queue_missing": E}),
    "quarantine unbound": (unbind, {"dlx.unbound": E, "dlx.probe": E}),
    "intake dead": (dead_letter_left, {"quarantine.intake_dead": E}),
    "message of nobody": (message_of_nobody, {"messages.without_job": W}),
    "max-length": (lambda ward: ward.policy("^jobs$", {"max-length": 100}), {"policy.max_length": E}),
    "ttl": (lambda ward: ward.policy(".*", {"message-ttl": 60000}), {"policy.message_ttl": E}),
    "expires": (lambda ward: ward.policy("^jobs", {"expires": 60000}), {"policy.expires": W}),
    "operator policy": (
        lambda ward: ward.policy("jobs", {"max-length": 5000}, "operator-policies"),
        {"policy.max_length": W},
    ),
    "policy on the quarantine": (
        lambda ward: ward.policy("^quar", {"max-length": 100000}),
        {"policy.max_length": E},
    ),
    "delivery limit by policy": (
        lambda ward: ward.policy("^jobs$", {"delivery-limit": 2}),
        {"policy.delivery_limit": W},
    ),
    "mirrored": (lambda ward: ward.policy(".*", {"ha-mode": "all"}), {"policy.mirrored": W}),
    "harmless": (lambda ward: ward.policy(".*", {"delivery-limit": 50}), {}),
    "nothing": (lambda _ward: None, {}),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_broken_is_named_by_its_code(ward: Ward, case: str) -> None:
    break_it, news = BROKEN[case]
    break_it(ward)
    assert ward.news() == news


@pytest.mark.parametrize(
    ("case", "news"),
    [
        ("classic", {"queue.arguments": E}),
        ("quarantine unbound", {"dlx.probe": E}),
        ("quarantine queue gone", {"dlx.queue_missing": E}),
        ("dlx gone", {"dlx.missing": E}),
        ("nothing", {}),
    ],
)
def test_what_amqp_alone_can_tell(ward: Ward, case: str, news: dict[str, Severity]) -> None:
    BROKEN[case][0](ward)
    assert ward.news(management_url="") == news
    unseen = ward.look(management_url="")["management.unset"]
    assert (unseen.severity, unseen.checked) == (Severity.INFO, True)


def test_a_look_declares_nothing(ward: Ward) -> None:
    ward.clear()
    found = ward.look()
    assert found["broker.untouched"].severity is Severity.INFO
    assert found["broker.untouched"].next_step == "celery -A tasks worker"
    assert set(found) == {"broker.untouched"}
    assert ward.api("queues") == []
    rows(
        ward.database,
        "INSERT INTO workers (worker_id, name, hostname, pid, lock_key, lease_until)"
        " VALUES (gen_random_uuid(), 'w', 'h', 1, 1, clock_timestamp() + interval '30 s')",
    )
    assert ward.news() == {"broker.untouched": W}  # the worker's broker is another one, or has lost its disk


def test_a_management_api_that_is_away_leaves_the_rest(ward: Ward) -> None:
    found = ward.look(management_url="http://guest:guest@127.0.0.1:9")
    assert {one.checked for one in found.values()} == {False}
    assert {"unchecked.alarms", "unchecked.policies", "unchecked.consumer_timeout"} <= set(found)
    assert all("guest" not in one.what for one in found.values())


def test_a_broker_that_is_away(ward: Ward) -> None:
    found = ward.look(broker_url="amqp://guest:guest@127.0.0.1:9//")["broker.unreachable"]
    assert (found.severity, found.checked) == (E, False)


def test_plain_tasks_without_confirms(ward: Ward, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONFIRMED, "confirm_publish", False)
    assert ward.news() == {"worker.confirm_publish": W}


def test_more_held_than_the_host_has_memory(ward: Ward) -> None:
    assert ward.news(prefetch=1_000_000, window=1_000_000) == {"worker.prefetch_memory": W}


def test_c13_a_consumer_timeout_shorter_than_a_time_limit(ward: Ward) -> None:
    """Both numbers are named, and where the first one is from."""
    found = ward.look(consumer_timeout_s=600.0)["broker.consumer_timeout"]
    assert "600 s (as DEADSURE_CONSUMER_TIMEOUT_S says)" in found.what
    assert "900 s" in found.what
    conf = Path(ward.server.state.home) / "rabbitmq.conf"
    before = conf.read_text()
    conf.write_text(f"{before}consumer_timeout = 10000\n")
    try:
        found = ward.look()["broker.consumer_timeout"]
    finally:
        conf.write_text(before)
    assert "10 s (as rabbitmq.conf says)" in found.what


def test_jobs_whose_messages_the_broker_does_not_hold(ward: Ward, jobs: Any) -> None:
    """An empty queue is no evidence (H1) while a worker may hold its messages; a count that covers them is."""
    made = [jobs.atomic.delay(n=n).id for n in range(3)]
    publisher = Publisher(ward.broker.url, ["jobs"], 5)
    publisher.open()
    assert (
        len(publisher.publish("jobs", [[debt] for debt in take(ward.database, "jobs", ward.settings)]).confirmed) == 3
    )
    publisher.close()
    assert "messages.lost" not in ward.look()
    with Connection(ward.broker.url) as connection:
        holder = connection.channel()
        taken = holder.basic_get("jobs")
        rows(ward.database, "UPDATE outbox SET sends = 2, sent_at = clock_timestamp() - interval '1 min'")
        ward.broker.purge("jobs")
        numbers = {"messages": 1, "messages_unacknowledged": 1}
        wait_for(lambda: ward.api("queues")[0].items() >= numbers.items(), 20, "the broker's numbers")
        found = ward.look()["messages.lost"]
        assert found.what.startswith("3 jobs of queue jobs were sent and not claimed, the broker holds 1 messages")
        assert "at least 2 have none" in found.what
        assert any(job_id in found.next_step for job_id in made)
        holder.basic_ack(taken.delivery_tag)
    found = ward.look(management_url="")["messages.lost"]
    assert "at least 3 have none" in found.what  # nobody consumes and no worker lives: nobody holds any
    assert ward.look()["queue.no_consumer"].severity is W


def test_an_alarm_is_told_by_the_api_and_felt_by_the_probe(ward: Ward) -> None:
    ward.server.ctl("set_vm_memory_high_watermark", "absolute", "1")
    try:
        assert ward.news(management_url="") == {"broker.blocked": E}
        wait_for(lambda: ward.server.api("nodes")[0]["mem_alarm"], 20, "the API knows")  # type: ignore[index]
        assert ward.news() == {"broker.memory_alarm": E, "broker.blocked": E}
    finally:
        ward.server.ctl("set_vm_memory_high_watermark", "0.4")
