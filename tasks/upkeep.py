"""`deadsure.prune`: the retention as a periodic job; beat's own schedule has it once a day."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from datetime import datetime
from typing import Any

from app.clock import boottime_s
from app.job import Job
from app.retention.jobs import FIRST
from app.retention.payload import PruneJobs
from app.retention.policy import Retention
from app.retention.prune import Run
from app.settings import settings
from db.session import connect
from tasks.durable import durable

SAVE_S = 5.0


@durable("deadsure.prune", payload=PruneJobs, time_limit_s=1800)
def prune_jobs(job: Job, payload: PruneJobs) -> dict[str, Any]:
    """Delete what is older than DEADSURE_RETENTION_*; what is left after `for_s` seconds is the next run's."""
    began = saved_at = boottime_s()

    def over() -> bool:
        return boottime_s() - began >= payload.for_s or job.should_stop

    def save(cursor: tuple[datetime, str]) -> None:
        nonlocal saved_at
        if boottime_s() - saved_at >= SAVE_S:
            saved_at = boottime_s()
            job.checkpoint([cursor[0].isoformat(), cursor[1]])

    with closing(connect(settings().need_database(), "deadsure prune", statement_timeout_s=60)) as connection:
        done = Run(connection, Retention.of(settings()), stop=over, saved=save, after=place(job.cursor)).go()
    if not done.complete and job.should_stop:
        job.stop()
    return {"jobs": done.jobs.total(), "complete": done.complete, **done.rest}


def place(cursor: Sequence[str] | None) -> tuple[datetime, str]:
    """Where an interrupted run goes on."""
    return FIRST if cursor is None else (datetime.fromisoformat(cursor[0]), cursor[1])
