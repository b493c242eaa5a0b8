"""A worker frozen past its lease and resumed: another has finished its jobs, and its late finish writes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine

from tests.faults.conftest import DONE_TIMEOUT_S, Court
from tests.faults.effects import Effects
from tests.faults.inject import Fault
from tests.faults.points import QUICK, identities, let_go, park, wait_parked
from tests.faults.test_worker_killed import assert_whole_files, plant, rows, submit
from tests.nodes.marks import on_rabbitmq
from tests.nodes.node import WorkerNode
from tests.nodes.waiting import wait_for

# A worker that works on all it may hold gets no further message: else the broker goes on feeding the frozen one.
pytestmark = [
    pytest.mark.usefixtures("settings"),
    on_rabbitmq,
    pytest.mark.environment(DEADSURE_PREFETCH="1", DEADSURE_RESEND_MAX_S="2"),
]
WITH_LEASE_JOBS = (*QUICK, "-I", "tests.faults.jobs_lease")
# Each handler is frozen somewhere else on its way: (kind, point).
HANDLERS = {
    "leased, effect to come": ("leased", "after:tests.faults.effects.record_now"),
    "leased, effect in its transaction": ("leased", "before:app.finish.succeed"),
    "export, file to come": ("export", "after:app.domain.atomic_file.create_temporary"),
    "export, file is there": ("export", "before:app.domain.reports.record_export"),
    "atomic, effect to come": ("atomic", "after:tests.faults.effects.record_now"),
    "atomic, effect in its transaction": ("atomic", "before:app.finish.succeed"),
}


def files(reports: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of each file: another one in its place would show."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in reports.iterdir()}


def wait_loser(worker: WorkerNode, job_id: UUID, name: str) -> None:
    """Wait until the resumed worker has let go of the job; on a slow machine its hard limit may come first."""

    def let_go_of() -> bool:
        log = worker.logs()
        return f"[{job_id}] ignored" in log or f'"job_id": "{job_id}", "pid"' in log or f"[{job_id}] succeeded" in log

    wait_for(let_go_of, DONE_TIMEOUT_S, f"{name}: the loser lets go of {job_id}")


def test_late_finish_of_a_frozen_worker_writes_nothing(
    jobs: Any, court: Court, effects: Effects, engine: Engine, start_worker: Any, tmp_path: Path
) -> None:
    from tests.faults.jobs_lease import call_when_lost  # noqa: PLC0415  reads the environment

    plant(engine)
    frozen = identities(HANDLERS)
    calls = identities({"calls": None})["calls"]
    go = tmp_path / "go"
    faults = [park(at, frozen[name], tmp_path) for name, (_, at) in HANDLERS.items()]
    first = start_worker(concurrency=len(HANDLERS) + 1, faults=faults, options=WITH_LEASE_JOBS)
    for name, (kind, _) in HANDLERS.items():
        submit(jobs, kind, frozen[name])  # type: ignore[arg-type]  # one of Kind
    call_when_lost.apply_async(kwargs={"until": str(go)}, task_id=str(calls))
    wait_parked(tmp_path, *frozen.values())
    wait_for(lambda: effects.starts(calls), 30, "the call is on its way")
    first.sigstop()
    go.touch()

    second = start_worker(options=WITH_LEASE_JOBS)
    found = court.wait_succeeded([*frozen.values(), calls])
    for name, job_id in {**frozen, "calls": calls}.items():
        stalled = 0 if name.startswith("atomic") else 1  # the claim of an atomic job was never committed
        seen = found[job_id]
        assert (seen.stalls, seen.crashes, seen.failures, seen.attempt) == (stalled, 0, 0, 1 + stalled), name
    lost = court.case(calls).events("claim")[0].worker_id
    sessions = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'deadsure job ' || :id"
    assert rows(engine, sessions, id=str(lost)) == [(0,)], "its sessions were ended, and with them its row locks"
    done, written = effects.rows(), files(tmp_path / "reports")

    let_go(tmp_path, *frozen.values())
    first.sigcont()
    for name, job_id in {**frozen, "calls": calls}.items():
        wait_loser(first, job_id, name)
    first.wait_for_log("lease.lost")
    log = first.logs()
    assert [name for name, job_id in frozen.items() if f"[{job_id}] succeeded" in log] == []
    assert effects.rows() == done
    assert {name: file for name, file in files(tmp_path / "reports").items() if name.endswith(".csv")} == {
        name: file for name, file in written.items() if name.endswith(".csv")
    }
    exports = {job_id for name, job_id in frozen.items() if name.startswith("export")}
    assert_whole_files(engine, tmp_path / "reports", exports)
    assert len(rows(engine, "SELECT FROM report_exports")) == len(exports)
    assert [(row.attempt, effects.count(calls, row.kind)) for row in effects.rows("lost", calls)] == [(1, 1)]
    assert effects.count(calls, "refused") == 1
    assert [row.attempt for row in effects.rows("call", calls)] == [2]

    assert second.terminate() == 0
    later = [jobs.leased_effect.delay(n=1).id, jobs.atomic.delay(n=2).id]
    court.wait_succeeded(later)
    assert lost not in {court.case(job_id).events("claim")[0].worker_id for job_id in later}, "under a new lease"
    assert rows(engine, "SELECT lost_cause FROM workers WHERE worker_id = :id", id=lost) == [("stalled",)]


def test_row_of_a_frozen_atomic_job_is_freed_though_the_sweeper_dies_over_it(
    jobs: Any, court: Court, effects: Effects, engine: Engine, start_worker: Any, tmp_path: Path
) -> None:
    held = identities({"held": None})["held"]
    first = start_worker(concurrency=1, faults=[park("before:app.finish.succeed", held, tmp_path)], options=QUICK)
    submit(jobs, "atomic", held)
    wait_parked(tmp_path, held)
    first.sigstop()
    # The worker is declared lost in one statement, its sessions are ended in the next: the sweeper dies in between.
    dies = Fault("before:db.session.rows", "kill", who="main", match="pg_terminate_backend")
    second = start_worker(concurrency=1, faults=[dies], options=QUICK, ready=False)
    assert second.wait(60) == 137
    assert rows(engine, "SELECT count(*) FROM workers WHERE lost_cause = 'stalled'") == [(1,)]
    start_worker(concurrency=1, options=QUICK)
    court.wait_succeeded([held])
    let_go(tmp_path, held)
    first.sigcont()
    wait_loser(first, held, "atomic")
    assert (effects.starts(held), effects.count(held)) == (2, 1)
