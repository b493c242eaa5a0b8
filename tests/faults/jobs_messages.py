"""Job types for messages that come from elsewhere, and one that always fails (`-I tests.faults.jobs_messages`)."""

from __future__ import annotations

from app.errors import UnrecoverableError
from app.job import Job
from tasks.durable import durable
from tests.faults.jobs import Number, finish, start


@durable("tests.foreign", payload=Number, foreign=True)
def foreign(job: Job, payload: Number) -> dict[str, int]:
    """Open to clients that have only the broker."""
    start(job)
    finish(job)
    return {"n": payload.n}


@durable("tests.foreign_keyed", payload=Number, foreign=True, key=lambda payload: f"n{payload.n}")
def foreign_keyed(job: Job, payload: Number) -> dict[str, int]:
    """Open to them too, and done once for each `n`."""
    start(job)
    finish(job)
    return {"n": payload.n}


@durable("tests.hopeless", payload=Number)
def hopeless(job: Job, payload: Number) -> None:
    """Fails for good."""
    start(job)
    raise UnrecoverableError(f"number {payload.n} cannot be done")
