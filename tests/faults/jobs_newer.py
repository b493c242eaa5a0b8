"""What this release knows: the types of `jobs_older`, one of them in a second version, and a new one."""

from __future__ import annotations

from app.job import Job
from tasks.durable import durable
from tests.faults.jobs import Number, finish, start
from tests.faults.jobs_older import versioned as versioned_1

__all__ = ["only_newer", "versioned", "versioned_1"]


@durable("tests.versioned", payload=Number, version=2)
def versioned(job: Job, payload: Number) -> dict[str, int]:
    start(job)
    finish(job)
    return {"version": 2, "n": payload.n}


@durable("tests.only_newer", payload=Number, mode="atomic", time_limit_s=20)
def only_newer(job: Job, payload: Number) -> dict[str, int]:
    start(job)
    finish(job)
    return {"n": payload.n}
