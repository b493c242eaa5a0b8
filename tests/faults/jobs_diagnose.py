"""Jobs that get into a situation and stay there until a file lets them go (`celery -A tests.faults.jobs_diagnose`)."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from pydantic import BaseModel

from app.errors import TransientError, UncertainError, UnrecoverableError
from app.job import Job
from app.retry_policy import RetryPolicy
from tasks.durable import durable
from tests.faults.jobs import POLL_S, Number, finish, start
from tests.faults.worker_app import app

__all__ = ["app"]

ROUNDS = 2


class Situation(BaseModel):
    """Which one, and the file that ends it."""

    how: str
    go: str


def cut_off(_key: str) -> None:
    raise UncertainError("no answer")


@durable("tests.situation", payload=Situation, retry=RetryPolicy(first_s=0.1))
def situation(job: Job, payload: Situation) -> None:
    """Crashes or fails `ROUNDS` times and then takes its time; or ends in quarantine once it may."""
    start(job)
    if payload.how == "crash" and job.attempt <= ROUNDS:
        os.kill(os.getpid(), signal.SIGKILL)
    if payload.how == "fail" and job.attempt <= ROUNDS:
        raise TransientError("the other side is away")
    if payload.how == "uncertain":
        job.call("charge", cut_off, takes_key=False)
    while not Path(payload.go).exists():
        time.sleep(POLL_S)
    if payload.how == "hopeless":
        raise UnrecoverableError("cannot be done")
    finish(job)


@durable("tests.aside", payload=Number, queue="aside")
def aside(job: Job, _payload: Number) -> None:
    """Has a queue of its own."""
    start(job)
    finish(job)
