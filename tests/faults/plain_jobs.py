"""Plain Celery tasks and a failing durable job beside the test jobs (`celery -A tests.faults.plain_jobs worker`).

Plain tasks have no job: what they did stands in `test_effects` under their task id, kinds `start` and `effect`.
"""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import Any

from app.job import Job
from app.retry_policy import RetryPolicy
from app.settings import settings
from tasks.durable import durable
from tests.faults.effects import record_now
from tests.faults.jobs import POLL_S, Number, finish, start
from tests.faults.worker_app import app

__all__ = ["app", "broken", "failing", "plain"]

RETRIES = RetryPolicy(limit=3, first_s=1.0)


@app.task(name="tests.plain", bind=True)
def plain(self: Any, until: str | None = None) -> str:
    """Works until the file `until` is there."""
    record_now(settings().database_url, "start", uuid.UUID(self.request.id), 0)
    while until and not Path(until).exists():
        time.sleep(POLL_S)
    record_now(settings().database_url, "effect", uuid.UUID(self.request.id), 0)
    return "done"


@app.task(name="tests.broken")
def broken() -> None:
    raise ValueError("a plain task that fails")


@durable("tests.failing", payload=Number, mode="leased", retry=RETRIES)
def failing(job: Job, payload: Number) -> None:
    """Fails `n` times, after it has written its effect into the finishing transaction."""
    start(job)
    finish(job)
    if job.failures < payload.n:
        raise ConnectionRefusedError("the other side is away")
