"""`job.progress`: at most one write a second, under the fence, never in the handler's way."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import psycopg2
import pytest
from psycopg2.extensions import connection as PgConnection

from app import progress
from app.clock import boottime_s
from app.finish import Holder
from app.job import Job
from app.lease import SharedLease
from app.seat import Seat
from app.sweep import Sweeper
from db.session import rows
from tests.integration.scene import PLAIN, Scene, Worker
from tests.nodes.waiting import stays_true, wait_for


@pytest.fixture(autouse=True)
def short_lived(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The writer's thread ends with its test."""
    monkeypatch.setattr(progress, "IDLE_S", 0.2)
    monkeypatch.setattr(progress, "GAP_S", 0.05)
    yield
    wait_for(lambda: "deadsure-progress" not in [t.name for t in threading.enumerate()], 10, "the writer ends")


def job_of(scene: Scene, worker: Worker, holder: Holder) -> Job:
    """The handler's view of a claimed job."""
    lease = SharedLease()
    lease.write(worker.worker_id, boottime_s() + 60)
    return Job(Seat(lease, scene.url), holder.claimed, worker.worker_id, PLAIN)


def told(scene: Scene, job: Job) -> tuple[Any, Any]:
    row = scene.row(job.job_id)
    return row["progress_done"], row["progress_total"]


def test_the_newest_report_is_written(scene: Scene) -> None:
    worker = scene.worker()
    job = job_of(scene, worker, scene.claimed(worker))
    for done in range(100_001):
        job.progress(done, 100_000)
    wait_for(lambda: told(scene, job) == (100_000, 100_000), 10, "the last one is there")
    job.progress(5)
    wait_for(lambda: told(scene, job) == (5, None), 10, "without a total")


def test_async_result_tells_the_progress_of_a_running_job(scene: Scene, jobs: Any) -> None:
    worker = scene.worker()
    job = job_of(scene, worker, scene.claimed(worker))
    result = jobs.leased_effect.AsyncResult(str(job.job_id))
    assert (result.state, result.info) == ("STARTED", None)
    job.progress(1, 4)
    wait_for(lambda: (result.state, result.info) == ("STARTED", {"done": 1, "total": 4}), 10, "it is told")
    scene.change(job.job_id, state="succeeded", worker_id=None, result_key="k", finished_at="now", result='{"n": 1}')
    assert (result.state, result.info) == ("SUCCESS", {"n": 1})


def test_reports_of_one_gap_are_one_write(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Any] = []

    def counted(on: PgConnection, sql: str, values: Any = None) -> Any:
        written.append(values)
        return rows(on, sql, values)

    monkeypatch.setattr(progress, "rows", counted)
    monkeypatch.setattr(progress, "GAP_S", 0.3)
    worker = scene.worker()
    job = job_of(scene, worker, scene.claimed(worker))
    began = time.monotonic()
    while time.monotonic() - began < 1.0:
        job.progress(1, 2)
    assert 1 <= len([values for values in written if values]) <= 5


def test_lost_attempt_writes_nothing(scene: Scene) -> None:
    worker = scene.worker()
    job = job_of(scene, worker, scene.claimed(worker))
    scene.end_lease(worker)
    sweeper = Sweeper(lease_s=0)
    sweeper.look(scene.eyes)
    sweeper.look(scene.eyes)
    scene.claimed(scene.worker(), job.job_id)
    job.progress(1, 2)
    stays_true(lambda: told(scene, job) == (None, None), 0.5, "the old attempt is not heard")


def test_locked_row_is_passed_by(scene: Scene) -> None:
    worker = scene.worker()
    job = job_of(scene, worker, scene.claimed(worker))
    with scene.holding(job.job_id):
        job.progress(1, 2)
        stays_true(lambda: told(scene, job) == (None, None), 0.5, "nobody waits for the lock")
        waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        assert scene.ask(waits) == 0
    job.progress(2, 2)
    wait_for(lambda: told(scene, job) == (2, 2), 10, "the next one is written")


def test_clean_path_of_an_atomic_job_reports_nothing(scene: Scene) -> None:
    worker = scene.worker()
    job = job_of(scene, worker, scene.begun(worker))
    job.progress(1, 2)
    assert "deadsure-progress" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize("value", [None, "many", float("nan"), float("inf"), 10**30, -1, 1.5, object()])
def test_no_number_fails_no_job(scene: Scene, value: Any) -> None:
    worker = scene.worker()
    job = job_of(scene, worker, scene.claimed(worker))
    job.progress(value, value)
    job.progress(3, 4)
    wait_for(lambda: told(scene, job) == (3, 4), 10, "the next one is written")


def test_database_that_is_away_keeps_no_handler(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = threading.Event()

    def away(*_: Any, **__: Any) -> Any:
        tried.set()
        raise psycopg2.OperationalError("away")

    worker = scene.worker()
    job = job_of(scene, worker, scene.claimed(worker))
    with monkeypatch.context() as patched:
        patched.setattr(progress, "connect", away)
        began = time.monotonic()
        job.progress(1, 2)
        assert time.monotonic() - began < 0.5
        assert tried.wait(10)
    job.progress(2, 2)
    wait_for(lambda: told(scene, job) == (2, 2), 10, "it is written when the database is back")
