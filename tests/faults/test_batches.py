"""Batches in real workers: children that end in every way, a completer that is killed, one completion job."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, text

from app.submit import identify
from tests.faults.conftest import Court
from tests.faults.effects import Effects
from tests.faults.inject import Fault
from tests.faults.judge import cases
from tests.faults.points import QUICK, kill_child, let_go, park, wait_parked
from tests.nodes.marks import on_rabbitmq
from tests.nodes.waiting import wait_for

pytestmark = [on_rabbitmq, pytest.mark.usefixtures("settings")]
WITH_BATCHES = (*QUICK, "-I", "tests.faults.jobs_batch")
IN_EFFECT = "after:tests.faults.effects.record_now"


@pytest.fixture
def numbers(jobs: Any) -> Any:
    """The coordinator of `tests.faults.jobs_batch`."""
    assert jobs
    from tests.faults.jobs_batch import numbers  # noqa: PLC0415  reads the environment

    return numbers


def completion_of(engine: Engine, batch_id: UUID) -> UUID:
    with engine.connect() as connection:
        found = connection.scalar(
            text("SELECT completion_id FROM batches WHERE batch_id = :batch_id"), {"batch_id": batch_id}
        )
    assert isinstance(found, UUID)
    return found


@pytest.mark.environment(DEADSURE_SHUTDOWN_GRACE_S="0.3", DEADSURE_PREFETCH="1")
def test_c31_one_completion_though_children_are_killed_retried_requeued_and_cancelled(
    jobs: Any, numbers: Any, court: Court, effects: Effects, engine: Engine, start_worker: Any, tmp_path: Path
) -> None:
    crashing, failing, leaving, unwanted = (identify(jobs.leased_effect.job_type, "", f"n{n}") for n in range(1, 5))
    faults = [
        kill_child(IN_EFFECT, crashing, tmp_path),
        Fault(
            IN_EFFECT,
            "raise",
            match=str(failing),
            error="app.errors.TransientError",
            once_file=str(tmp_path / "failed"),
        ),
        park(IN_EFFECT, leaving, tmp_path),
        park(IN_EFFECT, unwanted, tmp_path),
    ]
    first = start_worker(concurrency=3, faults=faults, options=WITH_BATCHES)
    batch_id = UUID(numbers.delay(children=8, size=3).id)
    wait_parked(tmp_path, leaving, unwanted)
    jobs.leased_effect.AsyncResult(str(unwanted)).revoke()
    court.wait_case(crashing, lambda case: case.crashes == 1, "its child is killed")
    court.wait_case(failing, lambda case: case.failures == 1, "it fails once")
    assert first.terminate() == 0  # a deploy whose grace is too short for both
    assert completion_of(engine, batch_id) not in cases(engine)

    start_worker(options=WITH_BATCHES)
    completion_id = completion_of(engine, batch_id)
    wait_for(lambda: completion_id in cases(engine), 60, "the completion job is submitted")
    found = court.wait_succeeded([completion_id, batch_id, crashing, failing, leaving])
    let_go(tmp_path, leaving, unwanted)
    assert (found[leaving].releases, found[unwanted].state) == (1, "cancelled")
    children = [case for case in found.values() if case.type == "tests.leased_effect"]
    assert sorted(str(case.state) for case in children) == ["cancelled", *["succeeded"] * 7]
    assert [case.job_id for case in found.values() if case.type == "tests.batch_done"] == [completion_id]
    assert effects.count(completion_id) == 1


def test_worker_that_is_killed_while_it_completes_a_batch(
    numbers: Any, court: Court, engine: Engine, start_worker: Any, effects: Effects
) -> None:
    """The batch is marked as finished, the completion job is not inserted, nothing is committed."""
    kill = Fault("before:app.completion.submit_completion", "kill", who="main")
    first = start_worker(faults=[kill], options=WITH_BATCHES)
    batch_id = UUID(numbers.delay(children=2, size=2).id)
    assert first.wait(60) == 137
    completion_id = completion_of(engine, batch_id)
    assert completion_id not in cases(engine)
    start_worker(options=WITH_BATCHES)
    wait_for(lambda: completion_id in cases(engine), 60, "another completes it")
    court.wait_succeeded([completion_id])
    assert effects.count(completion_id) == 1
