"""Job types that only tests run, registered on the real app through the real decorator.

Each run appends a `start` row at once; the `effect` row belongs to the finishing transaction.
"""

from __future__ import annotations

import time
from pathlib import Path

from pydantic import BaseModel

from app.job import Job
from app.settings import settings
from tasks.durable import durable
from tests.faults.effects import record_in, record_now

POLL_S = 0.02


class Number(BaseModel):
    """A job without work; `n` tells jobs apart."""

    n: int = 0


class Slow(BaseModel):
    """Works until the file `until` is there, for `wait_s` seconds at most."""

    wait_s: float = 60
    until: str | None = None


class Parent(BaseModel):
    """Submits `children` jobs."""

    children: int = 1


def start(job: Job) -> None:
    record_now(settings().database_url, "start", job.job_id, job.attempt)


def finish(job: Job) -> None:
    record_in(job.session, "effect", job.job_id, job.attempt)


@durable("tests.slow", payload=Slow, mode="leased")
def slow(job: Job, payload: Slow) -> None:
    start(job)
    deadline = time.monotonic() + payload.wait_s
    while time.monotonic() < deadline and not (payload.until and Path(payload.until).exists()):
        time.sleep(POLL_S)
    finish(job)


@durable("tests.leased_effect", payload=Number, mode="leased")
def leased_effect(job: Job, payload: Number) -> dict[str, int]:
    start(job)
    finish(job)
    return {"n": payload.n}


@durable("tests.atomic", payload=Number, mode="atomic", time_limit_s=20)
def atomic(job: Job, payload: Number) -> dict[str, int]:
    start(job)
    finish(job)
    return {"n": payload.n}


@durable("tests.parent", payload=Parent, mode="leased")
def parent(job: Job, payload: Parent) -> None:
    start(job)
    for n in range(payload.children):
        leased_effect.delay(n=n)
    finish(job)
