"""What the previous release knew (`-I tests.faults.jobs_older`)."""

from __future__ import annotations

from app.job import Job
from tasks.durable import durable
from tests.faults.jobs import Number, finish, start


@durable("tests.versioned", payload=Number)
def versioned(job: Job, payload: Number) -> dict[str, int]:
    start(job)
    finish(job)
    return {"version": 1, "n": payload.n}


@durable("tests.foreign_versioned", payload=Number, foreign=True)
def foreign_versioned(job: Job, payload: Number) -> dict[str, int]:
    start(job)
    finish(job)
    return {"version": 1, "n": payload.n}
