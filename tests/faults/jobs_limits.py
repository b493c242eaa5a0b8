"""Job types with short limits that meet an outage of the database (`celery -A tests.faults.jobs_limits worker`)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from app.job import Job
from tasks.durable import durable
from tests.faults.jobs import POLL_S, finish, start
from tests.faults.jobs_deaths import sleep_swallowing
from tests.faults.worker_app import app

__all__ = ["app"]

HARD_S, SOFT_S = 2.0, 1.5
LIMITS: dict[str, Any] = {"time_limit_s": HARD_S, "soft_time_limit_s": SOFT_S, "max_crashes": 1}


class Waits(BaseModel):
    """`how`: what meets the outage; `road`: where the handler says that it is there, and looks whether to go on."""

    how: str
    road: str


def meet(job: Job, payload: Waits) -> None:
    """Say so, and wait for the outage."""
    (Path(payload.road) / f"there-{job.job_id}").touch()
    while not (Path(payload.road) / "go").exists():
        time.sleep(POLL_S)


@durable("tests.limited", payload=Waits, mode="leased", **LIMITS)
def limited(job: Job, payload: Waits) -> None:
    start(job)
    if payload.how == "claim":
        return
    if payload.how == "overrun":
        sleep_swallowing()
    if payload.how == "call":
        job.call("it", lambda _key: meet(job, payload))
        return
    if payload.how == "commit":
        finish(job)
    meet(job, payload)
    if payload.how == "checkpoint":
        job.checkpoint({})
    if payload.how == "effect":
        finish(job)


@durable("tests.limited_atomic", payload=Waits, mode="atomic", **LIMITS)
def limited_atomic(job: Job, payload: Waits) -> None:
    start(job)
    meet(job, payload)
    finish(job)
