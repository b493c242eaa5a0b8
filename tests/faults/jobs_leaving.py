"""Jobs that meet a worker which leaves (`celery -A tests.faults.jobs_leaving worker`)."""

from __future__ import annotations

import time
from pathlib import Path

from pydantic import BaseModel

from app.job import Job
from tasks.durable import durable
from tests.faults.jobs import POLL_S, Slow, finish, start
from tests.faults.worker_app import app

__all__ = ["app"]


class Walk(BaseModel):
    """`steps` steps; step n waits until the file `road/n` is there."""

    steps: int
    road: str


class Short(BaseModel):
    """Works for `s` seconds."""

    s: float = 0.03


@durable("tests.walk", payload=Walk, mode="leased")
def walk(job: Job, payload: Walk) -> dict[str, list[int]]:
    """Steps from its cursor on; asked to stop it saves the cursor and goes. Returns where each attempt began."""
    start(job)
    cursor = job.cursor or {"step": 0, "began": []}
    began = [*cursor["began"], cursor["step"]]
    for step in range(cursor["step"], payload.steps):
        while not (Path(payload.road) / str(step)).exists():
            if job.should_stop:
                job.checkpoint({"step": step, "began": began})
                job.stop()
            time.sleep(POLL_S)
    finish(job)
    return {"began": began}


def work(job: Job, payload: Short) -> None:
    start(job)
    time.sleep(payload.s)
    finish(job)


short_leased = durable("tests.short_leased", payload=Short, mode="leased")(work)
short_atomic = durable("tests.short_atomic", payload=Short, mode="atomic", time_limit_s=30)(work)


@durable("tests.slow_atomic", payload=Slow, mode="atomic", time_limit_s=30)
def slow_atomic(job: Job, payload: Slow) -> None:
    """Asks nobody whether it should stop."""
    start(job)
    while payload.until and not Path(payload.until).exists():
        time.sleep(POLL_S)
    finish(job)
