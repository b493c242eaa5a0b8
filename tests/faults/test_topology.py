"""What a worker and a relay leave on a real RabbitMQ: queues, exchanges, arguments, and the way into `quarantine`."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import pytest
from kombu import Connection
from sqlalchemy import Engine

from tests.faults.outcomes import Outcomes
from tests.nodes.marks import on_rabbitmq
from tests.nodes.servers import BrokerNode
from tests.nodes.waiting import wait_for

pytestmark = [pytest.mark.usefixtures("settings"), on_rabbitmq]


@pytest.fixture
def outcomes(engine: Engine) -> Outcomes:
    return Outcomes(engine)


def listed(broker: BrokerNode, kind: str) -> dict[str, Any]:
    """Queues or exchanges of the test's virtual host, by name."""
    vhost = urlsplit(broker.url).path[1:]
    found: Any = broker.server.api(f"{kind}/{vhost}")  # type: ignore[attr-defined]  # marked on_rabbitmq
    return {entry["name"]: entry for entry in found}


def test_queues_and_exchanges_are_as_the_contract_says(
    broker: BrokerNode, jobs: Any, outcomes: Outcomes, start_worker: Any
) -> None:
    start_worker()
    jobs.leased_effect.apply_async(kwargs={"n": 1}, countdown=0.5)
    outcomes.wait_all_succeeded(1)
    queues = listed(broker, "queues")
    assert queues["jobs"]["durable"]
    promised = {
        "x-queue-type": "quorum",
        "x-dead-letter-exchange": "jobs.dlx",
        "x-dead-letter-routing-key": "quarantine",
        "x-dead-letter-strategy": "at-least-once",
        "x-overflow": "reject-publish",
    }
    assert queues["jobs"]["arguments"].items() >= promised.items()
    assert queues["quarantine"]["durable"]
    assert queues["quarantine"]["arguments"]["x-queue-type"] == "quorum"
    others = [name for name in queues if name not in ("jobs", "quarantine")]
    assert all(name.startswith("celeryev.") or name.endswith(".celery.pidbox") for name in others), others
    exchanges = listed(broker, "exchanges")
    for name in ("jobs", "jobs.dlx"):
        assert (exchanges[name]["type"], exchanges[name]["durable"]) == ("direct", True)
    assert [name for name in exchanges if "delayed" in name] == []
    bindings: Any = broker.server.api(f"bindings/{urlsplit(broker.url).path[1:]}")  # type: ignore[attr-defined]
    bound = {(entry["source"], entry["routing_key"], entry["destination"]) for entry in bindings if entry["source"]}
    assert bound >= {("jobs", "jobs", "jobs"), ("jobs.dlx", "quarantine", "quarantine")}


def test_a_rejected_message_arrives_in_quarantine(
    broker: BrokerNode, jobs: Any, outcomes: Outcomes, start_relay: Any
) -> None:
    relay = start_relay()
    job = jobs.atomic.delay(n=1)
    wait_for(lambda: outcomes.events("published", job.id), 30, "it was published")
    assert relay.terminate() == 0
    with Connection(broker.url) as connection:
        channel = connection.default_channel
        message = wait_for(lambda: channel.basic_get("jobs"), 10, "the message")
        assert message.headers["id"] == job.id
        assert message.properties["delivery_mode"] == 2
        assert message.body == '[[], {}, {"callbacks": null, "errbacks": null, "chain": null, "chord": null}]'
        channel.basic_reject(message.delivery_tag, requeue=False)
        dead = wait_for(lambda: channel.basic_get("quarantine"), 10, "its dead letter")
        assert dead.headers["id"] == job.id
        assert dead.headers["x-death"][0]["queue"] == "jobs"
        assert channel.basic_get("jobs") is None


def test_a_queue_that_nobody_declared_is_refused(start_producer: Any) -> None:
    sent = start_producer("from tests.faults.plain_jobs import plain; plain.apply_async(queue='jbos')")
    assert sent.wait(30) == 1
    assert "jbos" in sent.logs()
