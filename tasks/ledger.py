"""`ledger.post`: an entry in the same database, in one commit with the job's success."""

from __future__ import annotations

from app.domain.ledger import PostEntry, post
from app.job import Job
from tasks.durable import durable


@durable("ledger.post", payload=PostEntry, mode="atomic", time_limit_s=30)
def post_entry(job: Job, payload: PostEntry) -> None:
    """Insert one ledger entry."""
    job.result_key = post(job.session, job.job_id, payload)
