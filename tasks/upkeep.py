"""`deadsure.prune`: the retention as a periodic job; beat's own schedule has it once a day."""

from __future__ import annotations

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


@durable("deadsure.prune", payload=PruneJobs)
def prune_jobs(job: Job, payload: PruneJobs) -> dict[str, Any]:
    """Delete what is older than DEADSURE_RETENTION_*, a short run at a time, so that it holds up no other job."""
    began = saved_at = boottime_s()
    earlier = job.cursor or {"jobs": 0, "time": FIRST[0].isoformat(), "job_id": FIRST[1]}

    def over() -> bool:
        return boottime_s() - began >= payload.run_s or job.should_stop

    def save(place: tuple[datetime, str]) -> None:
        nonlocal saved_at
        saved_at = boottime_s()
        gone = earlier["jobs"] + run.done.jobs.total()
        job.checkpoint({"jobs": gone, "time": place[0].isoformat(), "job_id": place[1]})

    def save_sometimes(place: tuple[datetime, str]) -> None:
        if boottime_s() - saved_at >= SAVE_S:
            save(place)

    with closing(connect(settings().need_database(), "deadsure prune", statement_timeout_s=60)) as connection:
        after = datetime.fromisoformat(earlier["time"]), earlier["job_id"]
        run = Run(connection, Retention.of(settings()), stop=over, saved=save_sometimes, after=after)
        done = run.go()
    if not done.jobs_complete:
        save(run.after)
        job.stop()
    return {"jobs": earlier["jobs"] + done.jobs.total(), "complete": done.complete, **done.rest}
