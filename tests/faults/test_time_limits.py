"""Hard and soft time limits: bounded runs, one quarantine, and an end that is whole or not at all."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine, text

from tests.faults.conftest import Court
from tests.faults.effects import Effects
from tests.faults.inject import Fault
from tests.faults.points import QUICK, identities, park, wait_parked
from tests.faults.test_deaths import APP, MAX_CRASHES
from tests.faults.traces import wait_quarantined
from tests.nodes.marks import on_rabbitmq
from tests.nodes.waiting import wait_for

pytestmark = pytest.mark.usefixtures("settings")
SOFT_LIMIT = "billiard.exceptions.SoftTimeLimitExceeded"


def test_c01_hard_time_limit(
    deadly: Any, jobs: Any, court: Court, effects: Effects, start_worker: Any, tmp_path: Any
) -> None:
    """Asleep, blocked in C with the interpreter lock held, and swallowing whatever is raised into it."""
    go = tmp_path / "go"
    worker = start_worker(APP, concurrency=4, options=QUICK)
    pid = worker.pid
    healthy = jobs.slow.delay(until=str(go))
    court.wait_case(healthy.id, lambda case: case.state == "running", "runs")
    running = [deadly.overrun.delay(how=how) for how in deadly.OVERRUNS]
    running += [deadly.atomic_overrun.delay(how="sleep"), deadly.atomic_overrun.delay(how="in_c")]
    waiting = [jobs.leased_effect.delay(n=n).id for n in range(5)]

    starts_when_failed: dict[str, int] = {}

    def all_failed() -> bool:
        for result in running:
            if result.id not in starts_when_failed and result.state == "FAILURE":
                starts_when_failed[result.id] = effects.starts(result.id)
        return len(starts_when_failed) == len(running)

    wait_for(all_failed, 90, "all are shown as failed")
    found = wait_quarantined(court, starts_when_failed, "killed_worker")
    go.touch()
    beside = court.wait_succeeded([healthy.id, *waiting])
    for job_id, case in found.items():
        assert (case.crashes, case.stalls, case.failures, effects.count(job_id)) == (MAX_CRASHES, 0, 0, 0)
        assert effects.starts(job_id) == starts_when_failed[str(job_id)] <= MAX_CRASHES + 1
    assert {beside[case].crashes for case in beside if case not in found} == {0}
    assert (worker.pid, worker.is_running()) == (pid, True)


@on_rabbitmq
def test_c06_soft_time_limit(deadly: Any, jobs: Any, court: Court, effects: Effects, start_worker: Any) -> None:
    """Let through, it is a failure like any other; swallowed by `except Exception`, the hard limit ends it."""
    worker = start_worker(APP, options=QUICK)
    through, swallowed = deadly.softly.delay(how="sleep").id, deadly.softly.delay(how="broad").id
    (failed,) = wait_quarantined(court, [through], "attempts_spent").values()
    assert (failed.failures, failed.crashes, effects.starts(through), effects.count(through)) == (2, 0, 2, 0)
    (killed,) = wait_quarantined(court, [swallowed], "killed_worker").values()
    assert (killed.failures, killed.crashes, effects.count(swallowed)) == (0, MAX_CRASHES, 0)
    assert effects.starts(swallowed) == MAX_CRASHES
    assert worker.is_running()
    court.wait_succeeded([jobs.leased_effect.delay(n=9).id])


@on_rabbitmq
def test_c06_soft_time_limit_strikes_at_the_end(
    deadly: Any, court: Court, effects: Effects, engine: Engine, start_worker: Any, tmp_path: Any
) -> None:
    """While an arrow waits for its row, or is about to be written: the limit comes too late for the handler."""
    kinds = [(mode, how) for mode in ("leased", "atomic") for how in ("succeed", "fail")]
    struck = identities({f"{mode} {how}": None for mode, how in kinds})
    arrow = {"succeed": "app.finish.succeed", "fail": "app.finish.retry"}
    faults = [park(f"before:{arrow[how]}", struck[f"{mode} {how}"], tmp_path) for mode, how in kinds]
    worker = start_worker(APP, concurrency=len(kinds) + 1, faults=faults, options=QUICK)
    tasks = {"leased": deadly.softly_leased, "atomic": deadly.softly_atomic}
    for mode, how in kinds:
        tasks[mode].apply_async(kwargs={"how": how}, task_id=str(struck[f"{mode} {how}"]))
    wait_parked(tmp_path, *struck.values())
    go = tmp_path / "go"
    blocked = str(tasks["leased"].delay(how="succeed", once=str(go)).id)
    wait_for(lambda: effects.starts(blocked), 30, "it runs")
    with engine.begin() as holder:
        holder.execute(text("SELECT FROM jobs WHERE job_id = :id FOR NO KEY UPDATE"), {"id": blocked})
        go.touch()
        for name in (*map(str, struck.values()), blocked):
            wait_for(lambda name=name: name in soft_limits(worker), 30, "its soft limit strikes")  # type: ignore[misc]
    for parked in struck.values():
        (tmp_path / f"go-{parked}").touch()
    found = court.wait_succeeded([*struck.values(), blocked])
    assert [effects.count(name) for name in (*map(str, struck.values()), blocked)] == [1] * (len(kinds) + 1)
    assert {name: (found[job_id].failures, found[job_id].crashes) for name, job_id in struck.items()} == {
        f"{mode} {how}": (int(how == "fail"), 0) for mode, how in kinds
    }


@on_rabbitmq
def test_c06_soft_time_limit_strikes_in_the_ledger(
    deadly: Any, court: Court, effects: Effects, start_worker: Any, tmp_path: Any
) -> None:
    """Not between the answer of a call and its record, but right after that."""
    struck = identities({"started": None, "finished": None})
    writes = {"started": "after:app.effects.Caller.start", "finished": "before:app.effects.Caller.finish"}
    faults = [park(at, struck[name], tmp_path) for name, at in writes.items()]
    worker = start_worker(APP, concurrency=2, faults=faults, options=QUICK)
    for job_id in struck.values():
        deadly.softly_calling.apply_async(kwargs={"how": "once"}, task_id=str(job_id))
    wait_parked(tmp_path, *struck.values())
    for name in map(str, struck.values()):
        wait_for(lambda name=name: name in soft_limits(worker), 30, "its soft limit strikes")  # type: ignore[misc]
    for parked in struck.values():
        (tmp_path / f"go-{parked}").touch()
    found = court.wait_succeeded(struck.values())
    for job_id in struck.values():
        assert (found[job_id].failures, found[job_id].crashes, effects.count(job_id)) == (1, 0, 1)
        (failed,) = found[job_id].events("retry")
        assert "SoftTimeLimitExceeded" in str(failed.reason)


def soft_limits(worker: Any) -> str:
    """What the worker logged about soft limits."""
    return "\n".join(line for line in worker.logs().splitlines() if "Soft time limit" in line)


@on_rabbitmq
@pytest.mark.parametrize("moment", ["before", "after"])
def test_c06_an_error_in_the_middle_of_an_arrow(
    moment: str, deadly: Any, court: Court, effects: Effects, start_worker: Any, tmp_path: Any
) -> None:
    """Raised by whatever, just before an arrow is written or just after its commit: finished once."""
    names = identities({"succeed": None, "fail": None})
    arrow = {"succeed": "app.finish.succeed", "fail": "app.finish.retry"}
    faults = [
        Fault(
            f"{moment}:{arrow[name]}",
            "raise",
            error=SOFT_LIMIT,
            match=str(job_id),
            once_file=str(tmp_path / f"raised-{name}"),
        )
        for name, job_id in names.items()
    ]
    worker = start_worker(APP, faults=faults, options=QUICK)
    for how, job_id in names.items():
        deadly.softly_leased.apply_async(kwargs={"how": how}, task_id=str(job_id))
    found = court.wait_succeeded(names.values())
    assert len(list(tmp_path.glob("raised-*"))) == 2
    assert {effects.count(job_id) for job_id in names.values()} == {1}
    assert {case.crashes for case in found.values()} == {0}
    assert worker.is_running()
