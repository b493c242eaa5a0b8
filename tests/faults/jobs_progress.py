"""A job that says how far it is, step by step, each step when the test allows it."""

from __future__ import annotations

import time
from pathlib import Path

from pydantic import BaseModel

from app.errors import UnrecoverableError
from app.job import Job
from tasks.durable import durable
from tests.faults.jobs import POLL_S, finish, start


class Steps(BaseModel):
    """`total` steps; step n waits for the file `{go}-{n}`. `fails`: it ends in quarantine."""

    total: int
    go: str
    fails: bool = False


@durable("tests.steps", payload=Steps)
def steps(job: Job, payload: Steps) -> None:
    start(job)
    for n in range(1, payload.total + 1):
        for _ in range(1000):  # many reports in no time are one write
            job.progress(n, payload.total)
        while not Path(f"{payload.go}-{n}").exists():
            time.sleep(POLL_S)
    if payload.fails:
        raise UnrecoverableError("as the test wants")
    finish(job)
