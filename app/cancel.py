"""cancel: queued | retry_wait | quarantined -> cancelled; a running job is asked to stop.

A running job cannot be taken from its handler: `cancel_requested` is honoured by `job.should_stop`, retry, release and
expire. A row that is locked belongs to an atomic job at work; it finishes within seconds, so the caller is told
"running" instead of waiting for it.
"""

from __future__ import annotations

from enum import Enum
from uuid import UUID

from psycopg2.errors import LockNotAvailable
from psycopg2.extensions import connection as PgConnection

from db.session import one

# Entry before debt, as where a dead letter is stored: the other way round each would wait for the other.
CANCEL = """
WITH candidate AS (
    SELECT job_id FROM jobs
     WHERE job_id = %(job_id)s AND (%(episode)s::int IS NULL OR state = 'quarantined' AND episode = %(episode)s)
       FOR NO KEY UPDATE NOWAIT
), job AS (
    UPDATE jobs SET state = 'cancelled', not_before = NULL, cause = %(cause)s, reason = %(reason)s,
                    changed_at = clock_timestamp(), finished_at = clock_timestamp()
      FROM candidate
     WHERE jobs.job_id = candidate.job_id AND state IN ('queued', 'retry_wait', 'quarantined')
       AND (%(cause)s <> 'expired' OR expires_at <= clock_timestamp())
    RETURNING jobs.job_id, attempt, episode
), asked AS (
    UPDATE jobs SET cancel_requested = true
      FROM candidate
     WHERE jobs.job_id = candidate.job_id AND state = 'running' AND %(cause)s <> 'expired'
    RETURNING jobs.job_id
), closed AS (
    UPDATE quarantine_entries entry SET closed_at = clock_timestamp()
      FROM job WHERE entry.job_id = job.job_id AND entry.episode = job.episode AND closed_at IS NULL
    RETURNING entry.job_id, entry.episode
), paid AS (
    DELETE FROM outbox USING job LEFT JOIN closed USING (job_id) WHERE outbox.job_id = job.job_id
), action AS (
    INSERT INTO quarantine_actions (job_id, episode, action, author, reason)
    SELECT job_id, episode, 'cancel', %(author)s, %(reason)s FROM closed
    ON CONFLICT DO NOTHING
), journal AS (
    INSERT INTO job_events (job_id, event, attempt, reason)
    SELECT job_id, 'cancel', attempt, %(reason)s FROM job
    UNION ALL
    SELECT job_id, 'cancel_requested', NULL, %(reason)s FROM asked
)
SELECT EXISTS (SELECT FROM job), EXISTS (SELECT FROM asked), EXISTS (SELECT FROM candidate)
"""


class Cancelled(Enum):
    """What became of the wish."""

    CANCELLED = "cancelled"
    REQUESTED = "running; it is asked to stop"
    RUNNING = "running in one commit with its effect; ask again"
    FINISHED = "finished already"
    UNKNOWN = "no such job"


def cancel(
    connection: PgConnection,
    job_id: UUID,
    *,
    cause: str = "cancelled",
    reason: str = "cancelled",
    author: str = "unnamed",
) -> Cancelled:
    """Cancel a job, or ask a running one to stop. `cause` `expired` cancels only what is past its `expires`.

    `author` is who decided, where the job was in quarantine.
    """
    values = {"job_id": str(job_id), "cause": cause, "reason": reason, "episode": None, "author": author}
    try:
        row = one(connection, CANCEL, values)
    except LockNotAvailable:
        return Cancelled.RUNNING
    assert row is not None
    done, asked, there = row
    if done:
        return Cancelled.CANCELLED
    if asked:
        return Cancelled.REQUESTED
    return Cancelled.FINISHED if there else Cancelled.UNKNOWN


def cancel_quarantined(connection: PgConnection, job_id: UUID, episode: int, author: str, reason: str) -> bool:
    """Cancel a job in its `episode`-th quarantine, as a recorded decision; False when it no longer is in it."""
    values = {"job_id": str(job_id), "cause": "cancelled", "reason": reason, "episode": episode, "author": author}
    try:
        row = one(connection, CANCEL, values)
    except LockNotAvailable:
        return False  # somebody else is deciding about it
    return bool(row and row[0])
