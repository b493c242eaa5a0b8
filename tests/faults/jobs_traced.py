"""A job that says what it knows of itself, in its log lines and to its child (`-I tests.faults.jobs_traced`)."""

from __future__ import annotations

import logging
from typing import Any

import structlog
from pydantic import BaseModel
from structlog.contextvars import get_contextvars

from app.errors import TransientError
from app.job import Job
from app.retry_policy import RetryPolicy
from tasks.durable import durable
from tests.faults.jobs import finish, leased_effect, start
from tests.faults.worker_app import app

__all__ = ["app"]

seen: list[dict[str, Any]] = []  # of attempts in the test's own process
PRIVATE = "a-customer's-name"


class Failing(BaseModel):
    """Fails so many times."""

    failures: int = 0


@durable("tests.traced", payload=Failing, mode="leased", retry=RetryPolicy(limit=3, first_s=0.1))
def traced(job: Job, payload: Failing) -> None:
    start(job)
    seen.append(get_contextvars())
    logging.getLogger("shop").info("a line of the standard library")
    structlog.get_logger("shop").info("a line of structlog")
    leased_effect.delay(n=1)
    if job.failures < payload.failures:
        raise TransientError(PRIVATE)
    finish(job)
