"""The broker takes connections and channels away while jobs run: each finishes once."""

from __future__ import annotations

import urllib.error
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from app.stack import RabbitMQ
from tests.faults.conftest import Court
from tests.faults.effects import Effects
from tests.faults.points import QUICK
from tests.faults.test_shutdown import APP, blame, wait_running
from tests.nodes.marks import on_rabbitmq
from tests.nodes.servers import BrokerNode, management
from tests.nodes.waiting import wait_for

pytestmark = pytest.mark.usefixtures("settings")
ROUNDS = 10
SET = (
    "[application:set_env(rabbit, N, V)"
    " || {{N, V}} <- [{{consumer_timeout, {timeout}}}, {{channel_tick_interval, {tick}}}]]."
)


def close_all(server: RabbitMQ, vhost: str) -> int:
    """Close every connection of a virtual host through the management API; how many there were."""
    found: Any = server.api(f"vhosts/{vhost}/connections")
    for connection in found:
        with suppress(urllib.error.HTTPError):  # gone already
            management(server, "DELETE", f"connections/{quote(connection['name'], safe='')}")
    return len(found)


@on_rabbitmq
def test_c17_all_connections_closed_ten_times(
    broker: BrokerNode,
    rabbitmq: RabbitMQ,
    jobs: Any,
    leaving: Any,
    court: Court,
    effects: Effects,
    start_worker: Any,
    tmp_path: Path,
) -> None:
    """A late finisher's acknowledgement fails and changes nothing; the twin delivery neither loops nor is kept."""
    vhost, go = broker.url.rsplit("/", 1)[1], tmp_path / "go"
    worker = start_worker(APP, concurrency=3, options=QUICK)
    pid = worker.pid
    long = jobs.slow.delay(until=str(go)).id
    wait_running(court, effects, [long])
    made = []
    for _ in range(ROUNDS):
        made += [task.delay(s=0.2).id for _ in range(3) for task in (leaving.short_leased, leaving.short_atomic)]
        wait_for(lambda: any(effects.starts(job_id) for job_id in made[-6:]), 60, "some of them run")  # noqa: B023
        wait_for(lambda: close_all(rabbitmq, vhost), 30, "connections were closed")
    go.touch()
    found = court.wait_succeeded([long, *made])
    assert {blame(case) for case in found.values()} == {(0, 0, 0)}
    assert (effects.count(), effects.doubled()) == (len(made) + 1, {})
    assert effects.starts(long) == 1
    assert broker.depth("quarantine") == 0
    assert (worker.pid, worker.is_running()) == (pid, True)


@pytest.fixture
def impatient(rabbitmq: RabbitMQ) -> Iterator[None]:
    """The broker closes channels whose deliveries wait 2 s for an acknowledgement, and looks twice a second."""
    rabbitmq.ctl("eval", SET.format(timeout=2000, tick=500))
    yield
    rabbitmq.ctl("eval", SET.format(timeout=1_800_000, tick=60_000))


@on_rabbitmq
@pytest.mark.usefixtures("impatient")
def test_c13_job_longer_than_the_consumer_timeout(
    jobs: Any, court: Court, effects: Effects, start_worker: Any, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    worker = start_worker(APP, options=QUICK)
    pid = worker.pid
    long = jobs.slow.delay(until=str(go)).id
    wait_running(court, effects, [long])
    court.wait_case(long, lambda case: case.count("ack_sent"), "its channel was closed, its twin was let go")
    worker.wait_for_log("delivery acknowledgement on channel")
    go.touch()
    (case,) = court.wait_succeeded([long]).values()
    assert (blame(case), case.attempt, effects.starts(long), effects.count(long)) == ((0, 0, 0), 1, 1, 1)
    assert (worker.pid, worker.is_running()) == (pid, True)
    court.wait_succeeded([jobs.leased_effect.delay(n=1).id, jobs.atomic.delay(n=1).id])
