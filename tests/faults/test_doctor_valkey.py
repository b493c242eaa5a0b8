"""What `deadsure doctor` finds in a real Valkey, where every message can be seen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import redis
from psycopg2.extensions import connection as PgConnection

from app.checks.finding import Finding, Severity
from app.outbox import take
from app.settings import Settings
from db.session import connect, rows
from tasks.publisher import Publisher
from tests.nodes.marks import on_own_valkey, on_valkey
from tests.nodes.servers import BrokerNode

QUIET = {"visibility_timeout": 3600}


@pytest.fixture
def database(database_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[PgConnection]:
    monkeypatch.setattr("tasks.checks.redis_messages.LOOK_AGAIN_S", 0.02)
    with closing(connect(database_url, "deadsure test")) as made:
        yield made


def news(settings: Settings, database: PgConnection, **options: Any) -> dict[str, Finding]:
    """What is more than information, by code."""
    from app.job_types import REGISTRY  # noqa: PLC0415  filled when the job files are imported
    from tasks.checks.broker import check_broker  # noqa: PLC0415  reads the environment

    types = {key: known for key, known in REGISTRY.items() if not key[0].startswith("tests.")}
    found = check_broker(settings, types, database, {**QUIET, **options})
    return {one.code: one for one in found if one.severity not in (Severity.OK, Severity.INFO)}


@on_valkey
def test_messages_against_debts(broker: BrokerNode, jobs: Any, settings: Settings, database: PgConnection) -> None:
    made = [jobs.atomic.delay(n=n).id for n in range(3)]
    publisher = Publisher(broker.url, ["jobs"], 5)
    publisher.open()
    publisher.publish("jobs", [[debt] for debt in take(database, "jobs", settings)])
    publisher.close()
    rows(database, "UPDATE outbox SET sends = 2, sent_at = clock_timestamp() - interval '1 min'")
    assert news(settings, database) == {}
    with redis.Redis.from_url(broker.url) as client:
        (queue,) = [key for key in client.scan_iter() if b"jobs" in key and client.type(key) == b"list"]
        taken = client.rpop(queue)
        client.hset("unacked", "tag", b"[" + taken + b', "jobs", "jobs"]')
        assert news(settings, database) == {}  # a worker holds it
        client.delete("unacked")
        lost = news(settings, database)["messages.lost"]
        assert lost.what.startswith("1 jobs of queue jobs were sent and not claimed")
        assert any(job_id in lost.next_step for job_id in made)
        client.lpush(queue, b'{"no": "message"}', b"nor JSON", taken)
        assert news(settings, database) == {}
        rows(database, "DELETE FROM outbox; DELETE FROM jobs")
        assert news(settings, database)["messages.without_job"].what.startswith("3 messages")
        client.lpush("quarantine", b"{}")
        assert news(settings, database)["quarantine.intake_dead"].severity is Severity.ERROR


@on_own_valkey
def test_the_server_and_c20(broker: BrokerNode, settings: Settings, database: PgConnection) -> None:
    """C20: both numbers are named."""
    found = news(settings, database, visibility_timeout=5)["redis.visibility_timeout"]
    assert "5 s" in found.what
    assert "900 s" in found.what
    with redis.Redis.from_url(broker.url) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        assert news(settings, database)["redis.eviction"].severity is Severity.WARNING
        client.config_set("maxmemory", int(client.info("memory")["used_memory"]) + 100_000)
        found_now = news(settings, database)
        assert found_now["redis.eviction"].severity is Severity.ERROR
        assert found_now["redis.memory"].severity is Severity.WARNING
        client.config_set("maxmemory", 0)
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("appendonly", "no")
        client.config_set("save", "")
        assert news(settings, database) == {}
        client.replicaof("127.0.0.1", "9")
        assert "redis.replica" in news(settings, database)
        client.replicaof("NO", "ONE")
