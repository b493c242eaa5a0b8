"""What this release knows: the types of `jobs_older`, one of them in a second version, and a new one."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from pydantic import BaseModel

from app.job import Job
from app.settings import settings
from tasks.application import app
from tasks.durable import durable
from tests.faults.effects import record_now
from tests.faults.jobs import Number, finish, start
from tests.faults.jobs_older import versioned as versioned_1

__all__ = ["foreign_newer", "foreign_versioned", "only_newer", "plain_newer", "versioned", "versioned_1"]


class Named(BaseModel):
    """What the second version takes: a name will do as well as a number."""

    n: int | str


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


@durable("tests.foreign_newer", payload=Number, foreign=True)
def foreign_newer(job: Job, payload: Number) -> dict[str, int]:
    start(job)
    finish(job)
    return {"n": payload.n}


@durable("tests.foreign_versioned", payload=Named, version=2, foreign=True)
def foreign_versioned(job: Job, payload: Named) -> dict[str, int | str]:
    start(job)
    finish(job)
    return {"version": 2, "n": payload.n}


@app.task(name="tests.plain_newer", bind=True, ignore_result=True)
def plain_newer(self: Any, n: int = 0) -> None:
    record_now(settings().database_url, "effect", UUID(self.request.id), n)
