"""A worker that leaves: what ends in the grace is finished, the rest is given back, and no budget is spent."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, text

from tests.faults.conftest import Court
from tests.faults.effects import Effects
from tests.faults.judge import Case
from tests.faults.points import QUICK, none_waits
from tests.nodes.marks import on_rabbitmq
from tests.nodes.servers import BrokerNode
from tests.nodes.waiting import wait_for

pytestmark = pytest.mark.usefixtures("settings")
APP = "tests.faults.jobs_leaving"
PREFETCHED = 5


def wait_running(court: Court, effects: Effects, job_ids: Iterable[str]) -> None:
    """Wait until the handlers of these jobs run (an atomic one is `queued` for everybody else)."""
    for job_id in job_ids:
        wait_for(lambda job_id=job_id: effects.starts(job_id), 60, f"{job_id} runs; {court.case(job_id).state}")  # type: ignore[misc]


def wait_prefetched(court: Court, broker: BrokerNode, job_ids: Iterable[str]) -> None:
    for job_id in job_ids:
        court.wait_case(job_id, lambda case: case.count("published"), "is published")
    wait_for(lambda: none_waits(broker), 30, "the worker holds what waits")


def blame(case: Case) -> tuple[int, int, int]:
    return case.failures, case.crashes, case.stalls


def leases_given_back(engine: Engine) -> bool:
    """Whether no worker is left that holds a lease."""
    with engine.connect() as connection:
        return not connection.scalar(text("SELECT count(*) FROM workers WHERE stopped_at IS NULL"))


@pytest.mark.environment(DEADSURE_SHUTDOWN_GRACE_S="3")
def test_c23_ends_in_the_grace_ends_later_and_never_started(
    broker: BrokerNode,
    jobs: Any,
    leaving: Any,
    court: Court,
    effects: Effects,
    engine: Engine,
    start_worker: Any,
    tmp_path: Path,
) -> None:
    soon, late = tmp_path / "soon", tmp_path / "late"
    first = start_worker(APP, concurrency=4, options=QUICK)
    ends = jobs.slow.delay(until=str(soon)).id
    stays = jobs.slow.delay(until=str(late)).id
    stays_atomic = leaving.slow_atomic.delay(until=str(late)).id
    stops = leaving.walk.delay(steps=1, road=str(tmp_path)).id
    wait_running(court, effects, [ends, stays, stays_atomic, stops])
    waiting = [task.delay(n=n).id for n in range(PREFETCHED) for task in (jobs.leased_effect, jobs.atomic)]
    wait_prefetched(court, broker, waiting)

    first.kill("SIGTERM")
    court.wait_case(stops, lambda case: case.count("release"), "stops at once when it is asked to")
    soon.touch()
    assert first.wait(30) == 0
    assert leases_given_back(engine)
    after = {name: court.case(job_id) for name, job_id in {"ends": ends, "stays": stays, "stops": stops}.items()}
    assert {name: (case.state, case.releases) for name, case in after.items()} == {
        "ends": ("succeeded", 0),
        "stays": ("queued", 1),
        "stops": ("queued", 1),
    }
    for name in ("stays", "stops"):
        assert after[name].has_debt
        assert (after[name].count("ack_sent"), after[name].count("reject_sent")) == (1, 0), name
    untouched = [court.case(job_id) for job_id in waiting]
    assert [(case.state, case.attempt, case.releases) for case in untouched] == [("queued", 0, 0)] * len(waiting)
    assert not any(case.count("claim") for case in untouched)

    late.touch()
    (tmp_path / "0").touch()
    second = start_worker(APP, concurrency=4, options=QUICK)
    found = court.wait_succeeded([ends, stays, stops, stays_atomic, *waiting])
    assert {blame(case) for case in found.values()} == {(0, 0, 0)}
    assert {found[UUID(job_id)].attempt for job_id in waiting} == {1}
    assert all(effects.count(str(job_id)) == 1 for job_id in found)
    assert second.terminate(60) == 0


@on_rabbitmq
@pytest.mark.environment(DEADSURE_SHUTDOWN_GRACE_S="5")
def test_c22_sigterm_to_the_whole_group(
    jobs: Any, leaving: Any, court: Court, effects: Effects, start_worker: Any, tmp_path: Path
) -> None:
    """As `docker stop` with a bad init: each child gets the signal too. What can end ends, nothing is counted."""
    soon, late = tmp_path / "soon", tmp_path / "late"
    first = start_worker(APP, concurrency=4, options=QUICK)
    ends = [jobs.slow.delay(until=str(soon)).id, leaving.slow_atomic.delay(until=str(soon)).id]
    stays = [jobs.slow.delay(until=str(late)).id, leaving.slow_atomic.delay(until=str(late)).id]
    wait_running(court, effects, [*ends, *stays])
    first.raw.kill_group("SIGTERM")
    soon.touch()
    assert first.wait(40) == 0
    assert [court.case(job_id).state for job_id in ends] == ["succeeded"] * 2
    late.touch()
    start_worker(APP, options=QUICK)
    found = court.wait_succeeded([*ends, *stays])
    assert {blame(case) for case in found.values()} == {(0, 0, 0)}
    assert [effects.starts(job_id) for job_id in ends] == [1, 1], "nothing that could end was cut"
    assert found[UUID(stays[0])].releases == 1


@on_rabbitmq
@pytest.mark.environment(DEADSURE_SHUTDOWN_GRACE_S="120")
@pytest.mark.parametrize("signals", ["SIGTERM SIGTERM", "SIGINT SIGINT", "SIGTERM SIGQUIT", "SIGQUIT"])
def test_c23_second_signal_is_faster_and_never_lossy(
    signals: str,
    broker: BrokerNode,
    jobs: Any,
    leaving: Any,
    court: Court,
    effects: Effects,
    start_worker: Any,
    tmp_path: Path,
) -> None:
    go = tmp_path / "go"
    worker = start_worker(APP, concurrency=2, options=QUICK)
    running = [jobs.slow.delay(until=str(go)).id, leaving.slow_atomic.delay(until=str(go)).id]
    wait_running(court, effects, running)
    waiting = [jobs.leased_effect.delay(n=n).id for n in range(PREFETCHED)]
    wait_prefetched(court, broker, waiting)
    signalled = time.monotonic()
    for name in signals.split():
        worker.kill(name)
        worker.wait_for_log("takes_back" if name == "SIGQUIT" else "Warm shutdown")
    worker.wait(60)
    assert time.monotonic() - signalled < 20, "it did not wait for its grace"
    go.touch()
    start_worker(APP, options=QUICK)
    found = court.wait_succeeded([*running, *waiting])
    assert {blame(case) for case in found.values()} == {(0, 0, 0)}
    assert {found[UUID(job_id)].attempt for job_id in waiting} == {1}
