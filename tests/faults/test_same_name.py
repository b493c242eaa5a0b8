"""Two workers of one name, and one that comes back while its old connection is still open: nobody exits."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kombu import Connection
from sqlalchemy import Engine

from tests.faults.conftest import Court
from tests.faults.effects import Effects
from tests.faults.points import QUICK
from tests.faults.test_worker_killed import rows
from tests.nodes.marks import on_rabbitmq
from tests.nodes.node import WorkerNode
from tests.nodes.proxy import Proxy
from tests.nodes.servers import BrokerNode
from tests.nodes.waiting import stays_true, wait_for

pytestmark = pytest.mark.usefixtures("settings")


def served_by(effects: Effects, worker: WorkerNode) -> int:
    """Starts in the children of a worker."""
    children = set(worker.children())
    return sum(row.pid in children for row in effects.rows("start"))


@pytest.mark.environment(DEADSURE_PREFETCH="1")
def test_two_workers_of_one_name_share_the_work(
    jobs: Any, court: Court, effects: Effects, engine: Engine, start_worker: Any, tmp_path: Path
) -> None:
    twins = [start_worker(concurrency=1, name="twin", alone=False) for _ in range(2)]
    for shift in ("first", "second"):
        go = tmp_path / shift
        before = [served_by(effects, twin) for twin in twins]
        submitted = [jobs.slow.delay(until=str(go)) for _ in twins]
        wait_for(
            lambda before=before: [served_by(effects, twin) for twin in twins] == [n + 1 for n in before],  # type: ignore[misc]
            60,
            "each twin works",
        )
        go.touch()
        court.wait_succeeded(result.id for result in submitted)
    assert rows(engine, "SELECT count(DISTINCT name), count(*) FROM workers WHERE lost_at IS NULL") == [(1, 2)]
    stays_true(lambda: all(twin.is_running() for twin in twins), 1, "nobody exits")


@contextmanager
def cut_at_the_client_alone(proxy: Proxy) -> Iterator[int]:
    """Reset what clients have open, while the server goes on holding their connections; yields how many."""
    held: list[socket.socket] = [server.dup() for _, server in proxy._open]  # an open copy keeps the connection
    proxy.cut()
    try:
        yield len(held)
    finally:
        for end in held:
            end.close()


def consumers(broker: BrokerNode) -> int:
    """Consumers of the work queue that the broker knows."""
    with Connection(broker.url) as connection:
        return int(connection.default_channel.queue_declare("jobs", passive=True).consumer_count)


@on_rabbitmq
@pytest.mark.environment(DEADSURE_RESEND_FIRST_S="1", DEADSURE_RESEND_MAX_S="1", DEADSURE_PREFETCH="1")
def test_worker_comes_back_while_the_broker_holds_its_old_connection(
    broker: BrokerNode, jobs: Any, court: Court, start_worker: Any, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    with Proxy.before(broker.url) as proxy:
        worker = start_worker(environment={"BROKER_URL": proxy.url(broker.url)}, options=QUICK)
        pid = worker.pid
        running = jobs.slow.delay(until=str(go))
        court.wait_case(running.id, lambda case: case.state == "running", "runs")
        with cut_at_the_client_alone(proxy) as held:
            assert held >= 2, "consumer and relay"
            wait_for(lambda: consumers(broker) == 2, 60, "the worker is back beside its dead self")
            later = [jobs.leased_effect.delay(n=2).id, jobs.atomic.delay(n=3).id]
            court.wait_succeeded(later)  # what the dead connection swallows is sent again
            go.touch()
            court.wait_succeeded([running.id])
            assert consumers(broker) == 2
        court.wait_succeeded([jobs.atomic.delay(n=4).id])
        assert court.case(running.id).attempt == 1, "work that was under way went on"
        assert (worker.pid, worker.is_running()) == (pid, True)


@on_rabbitmq
def test_job_that_runs_on_is_not_started_again_when_its_message_comes_back(
    broker: BrokerNode, jobs: Any, court: Court, effects: Effects, start_worker: Any, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    with Proxy.before(broker.url) as proxy:
        worker = start_worker(environment={"BROKER_URL": proxy.url(broker.url)}, options=QUICK)
        running = jobs.slow.delay(until=str(go))
        court.wait_case(running.id, lambda case: case.state == "running", "runs")
        proxy.cut()
        case = court.wait_case(running.id, lambda case: case.count("ack_sent"), "its message came back and was let go")
        assert [event.reason for event in case.events("received")] == [None, "owned by a live worker"]
        assert case.events("received")[-1].redelivered
        go.touch()
        case = court.wait_succeeded([running.id])[case.job_id]
        assert (case.attempt, case.crashes, effects.starts(running.id)) == (1, 0, 1)
        court.wait_succeeded([jobs.leased_effect.delay(n=1).id])
        assert worker.is_running()
