"""Jobs that fail until somebody repairs what they need, and jobs that call (`-I tests.faults.jobs_replay`)."""

from __future__ import annotations

import time
from pathlib import Path

from pydantic import BaseModel

from app.errors import UnrecoverableError
from app.job import Job
from app.settings import settings
from tasks.durable import durable
from tests.faults.effects import record_now
from tests.faults.jobs import POLL_S, finish, start


class Gated(BaseModel):
    """The file `gate` holds the numbers of the jobs that cannot be done."""

    n: int
    gate: str


class Calling(BaseModel):
    """Acts with `n`; waits for the file `go` before its call, or in it."""

    n: int
    where: str
    go: str


def broken(payload: Gated) -> bool:
    return str(payload.n) in Path(payload.gate).read_text().split()


@durable("tests.gated", payload=Gated, mode="atomic", time_limit_s=20)
def gated(job: Job, payload: Gated) -> None:
    if broken(payload):
        raise UnrecoverableError("the provider refuses")
    finish(job)


def wait(go: str) -> None:
    while not Path(go).exists():
        time.sleep(POLL_S)


@durable("tests.calling", payload=Calling, mode="leased", max_stalls=1)
def calling(job: Job, payload: Calling) -> None:
    """Its first stall quarantines it."""
    start(job)
    if payload.where == "before":
        wait(payload.go)

    def act(_key: str) -> dict[str, int]:
        if payload.where == "in":
            wait(payload.go)
        record_now(settings().database_url, f"act {payload.n}", job.job_id, job.attempt)
        return {"n": payload.n}

    job.call("act", act)
    finish(job)
