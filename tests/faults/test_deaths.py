"""Handlers that end their process: bounded, both traces, and nobody else is blamed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text

from tests.faults.conftest import Court
from tests.faults.effects import Effects
from tests.faults.points import QUICK
from tests.faults.traces import entries, wait_quarantined
from tests.nodes.marks import on_rabbitmq

pytestmark = pytest.mark.usefixtures("settings")
APP = "tests.faults.jobs_deaths"
MAX_CRASHES = 3
REPLAY_BY_HAND = """
WITH job AS (
    UPDATE jobs SET state = 'queued', max_crashes = max_crashes + 3 WHERE job_id = :job_id AND state = 'quarantined'
    RETURNING *
), debt AS (
    INSERT INTO outbox (job_id, queue, type, schema_version, priority, correlation_id, episode)
    SELECT job_id, queue, type, schema_version, priority, correlation_id, episode + 1 FROM job
    ON CONFLICT (job_id) DO UPDATE SET kind = 'wake', episode = excluded.episode, due_at = excluded.due_at, sends = 0
), closed AS (
    UPDATE quarantine_entries entry SET closed_at = clock_timestamp()
      FROM job WHERE entry.job_id = job.job_id AND closed_at IS NULL
)
INSERT INTO job_events (job_id, event) SELECT job_id, 'replay' FROM job
"""


def replay(engine: Engine, job_id: str) -> None:
    with engine.begin() as connection:
        connection.execute(text(REPLAY_BY_HAND), {"job_id": job_id})


def test_c02_c03_c04_process_dies_each_time(
    deadly: Any, jobs: Any, court: Court, effects: Effects, start_worker: Any, tmp_path: Path
) -> None:
    """SIGKILL, a bad pointer, abort, os._exit, sys.exit, KeyboardInterrupt, MemoryError; a healthy job beside."""
    go = tmp_path / "go"
    worker = start_worker(APP, concurrency=3, options=QUICK)
    pid = worker.pid
    healthy = jobs.slow.delay(until=str(go))
    court.wait_case(healthy.id, lambda case: case.state == "running", "runs")
    leased = {how: deadly.death.delay(how=how).id for how in deadly.DEATHS}
    atomic = {how: deadly.atomic_death.delay(how=how).id for how in ("killed", "sys_exit", "memory")}
    waiting = [task.delay(n=n).id for n in range(5) for task in (jobs.leased_effect, jobs.atomic)]

    found = wait_quarantined(court, [*leased.values(), *atomic.values()], "killed_worker")
    go.touch()
    beside = court.wait_succeeded([healthy.id, *waiting])
    for how, job_id in leased.items():
        assert (how, effects.starts(job_id), effects.count(job_id)) == (how, MAX_CRASHES, 0)
    for how, job_id in atomic.items():
        assert effects.starts(job_id) <= MAX_CRASHES + 1, how
        assert effects.count(job_id) == 0, how
    assert {(case.crashes, case.stalls, case.failures) for case in found.values()} == {(MAX_CRASHES, 0, 0)}
    for job_id in (healthy.id, *waiting):
        assert effects.count(job_id) == 1
        seen = beside[court.case(job_id).job_id]
        assert (seen.crashes, seen.stalls, seen.failures, seen.attempt) == (0, 0, 0, 1), "a bystander"
    assert (worker.pid, worker.is_running()) == (pid, True)
    court.wait_succeeded([jobs.leased_effect.delay(n=9).id])


@on_rabbitmq
def test_c02_made_queued_again_by_hand(
    deadly: Any, jobs: Any, court: Court, effects: Effects, engine: Engine, start_worker: Any, tmp_path: Path
) -> None:
    """As bad as before: counted on, quarantined again at the raised limit. A cured one succeeds."""
    worker = start_worker(APP, options=QUICK)
    cured = tmp_path / "cured"
    bad = deadly.death.delay(how="killed").id
    worse = deadly.death.delay(how="killed", once=str(cured)).id
    court.wait_succeeded([worse])
    wait_quarantined(court, [bad], "killed_worker")
    replay(engine, bad)
    (case,) = wait_quarantined(court, [bad], "killed_worker", episode=2).values()
    assert (case.crashes, effects.starts(bad), effects.count(bad)) == (2 * MAX_CRASHES, 2 * MAX_CRASHES, 0)
    assert entries(engine, bad, traced=True) == [("killed_worker", 1), ("killed_worker", 2)]
    assert worker.is_running()
    court.wait_succeeded([jobs.leased_effect.delay(n=9).id])
