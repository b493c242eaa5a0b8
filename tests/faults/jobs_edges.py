"""Jobs at the edges of Celery's interface (`celery -A tests.faults.jobs_edges worker`)."""

from __future__ import annotations

import time
from pathlib import Path

from pydantic import BaseModel

from app.errors import UnrecoverableError
from app.job import Job
from app.retry_policy import RetryPolicy
from tasks.durable import durable
from tests.faults.jobs import POLL_S, Number, finish, leased_effect, start
from tests.faults.worker_app import app

__all__ = ["app"]

QUICK = RetryPolicy(limit=3, first_s=0.2)


class Text(BaseModel):
    """Any text."""

    text: str


class Until(BaseModel):
    """Works until the file is there, or as `then` says when it is asked to stop."""

    until: str
    then: str = "stop"


@durable("tests.text", payload=Text)
def text_job(job: Job, payload: Text) -> int:
    start(job)
    finish(job)
    return len(payload.text)


@durable("tests.stubborn", payload=Until, retry=QUICK)
def stubborn(job: Job, payload: Until) -> None:
    """Asked to stop it stops, fails, or finishes nevertheless."""
    start(job)
    while not Path(payload.until).exists():
        if job.should_stop and payload.then == "stop":
            job.stop()
        time.sleep(POLL_S)
    if payload.then == "retry":
        job.retry(countdown=0.1)
    finish(job)


@durable("tests.auto", payload=Number, autoretry_for=(KeyError,), retry=QUICK)
def auto(job: Job, payload: Number) -> None:
    """Fails `n` times with the error that is to be tried again, or (n < 0) with another."""
    start(job)
    finish(job)
    if payload.n < 0:
        raise IndexError
    if job.failures < payload.n:
        raise KeyError


@durable("tests.fails", payload=Number, retry=QUICK, bind=True)
def fails(job: Job, payload: Number) -> dict[str, int]:
    """Asks for another try `n` times; for ever (n < 0) in vain."""
    start(job)
    finish(job)
    if payload.n < 0:
        raise UnrecoverableError("no use")
    if job.failures < payload.n:
        fails.retry(countdown=0.3, exc=OSError("away"))
    return {"tries": job.attempt}


@durable("tests.family", payload=Number, mode="atomic", time_limit_s=20)
def family(job: Job, payload: Number) -> list[str]:
    """Submits `n` children, which count their own."""
    start(job)
    children = [leased_effect.delay(n=n).id for n in range(payload.n)]
    finish(job)
    return children
