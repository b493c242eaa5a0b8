"""Jobs that wait to be tried again (`celery -A tests.faults.jobs_herd worker`)."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel

from app.errors import TransientError
from app.job import Job
from app.retry_policy import RetryPolicy
from tasks.durable import durable
from tests.faults.jobs import finish, start
from tests.faults.worker_app import app

__all__ = ["app"]

DAY_S = 86_400.0
WINDOW_S = 8.0


class Away(BaseModel):
    """The other side is away until the file `back` is there, and asks for `ask_s` seconds of patience."""

    back: str
    ask_s: float | None = None


class Times(BaseModel):
    """Fails so many times, each time asking for `delay_s` seconds."""

    times: int
    delay_s: float | None = None


@durable("tests.away", payload=Away, mode="leased", retry=RetryPolicy(first_s=WINDOW_S))
def away(job: Job, payload: Away) -> None:
    if not Path(payload.back).exists():
        raise TransientError("the other side is away", retry_after_s=payload.ask_s)
    finish(job)


@durable(
    "tests.patient", payload=Times, retry=RetryPolicy(limit=25, first_s=0.3, cap_s=0.3, retry_after_cap_s=50 * DAY_S)
)
def patient(job: Job, payload: Times) -> None:
    start(job)
    if job.failures < payload.times:
        job.retry(countdown=payload.delay_s)
    finish(job)
