"""Jobs that travel together (`celery -A tests.faults.jobs_coalesced worker`)."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from pydantic import BaseModel

from app.errors import TransientError, UnrecoverableError
from app.job import Job
from app.retry_policy import RetryPolicy
from tasks.durable import durable
from tests.faults.jobs import POLL_S, start
from tests.faults.worker_app import app

__all__ = ["app"]

FOREVER_S = 60
HANG_LIMIT_S = 2.0
EFFECT = "INSERT INTO test_effects (kind, job_id, attempt, pid) VALUES ('effect', %s, %s, %s)"


class Packed(BaseModel):
    """How the job behaves; `path`: what it waits for."""

    n: int
    how: str = "well"
    path: str = ""


def work(job: Job, payload: Packed) -> None:
    """Leave a start and an effect, and behave."""
    start(job)
    job.execute(EFFECT, (str(job.job_id), job.attempt, os.getpid()))
    match payload.how:
        case "fail once" if job.failures == 0:
            raise TransientError("later")
        case "never":
            raise UnrecoverableError("never")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            time.sleep(FOREVER_S)
        case "wait":
            deadline = time.monotonic() + FOREVER_S
            while time.monotonic() < deadline and not Path(payload.path).exists():
                time.sleep(POLL_S)


@durable("tests.packed", payload=Packed, mode="atomic", time_limit_s=20, coalesce=20, retry=RetryPolicy(first_s=0.2))
def packed(job: Job, payload: Packed) -> None:
    """Shares commits."""
    work(job, payload)


@durable("tests.packed_short", payload=Packed, mode="atomic", time_limit_s=HANG_LIMIT_S)
def packed_short(job: Job, payload: Packed) -> None:
    """Shares commits, and may not take long."""
    work(job, payload)


@durable("tests.packed_leased", payload=Packed, mode="leased", coalesce=50)
def packed_leased(job: Job, payload: Packed) -> None:
    """Shares deliveries; each commits its own claim."""
    work(job, payload)
