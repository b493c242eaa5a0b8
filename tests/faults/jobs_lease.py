"""A job type that works until it is told that its worker has lost it (`celery worker -I tests.faults.jobs_lease`)."""

from __future__ import annotations

import time
from pathlib import Path

from app.errors import LeaseLost
from app.job import Job
from app.settings import settings
from tasks.durable import durable
from tests.faults.effects import record_now
from tests.faults.jobs import POLL_S, Slow, finish, start


def record(job: Job, kind: str) -> None:
    record_now(settings().database_url, kind, job.job_id, job.attempt)


@durable("tests.call_when_lost", payload=Slow, mode="leased")
def call_when_lost(job: Job, payload: Slow) -> None:
    """Make an external call once `until` is there or the job is lost: rows `lost`, `refused`, `call` tell which."""
    start(job)
    deadline = time.monotonic() + payload.wait_s
    while not job.lost and time.monotonic() < deadline and not (payload.until and Path(payload.until).exists()):
        time.sleep(POLL_S)
    if job.lost:
        record(job, "lost")
    try:
        job.call("charge", lambda _key: record(job, "call"))
    except LeaseLost:
        record(job, "refused")
        raise
    finish(job)
