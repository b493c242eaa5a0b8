"""release: running -> queued, by the worker that holds the job and has stopped working on it.

Used when the attempt was cut short by something that is not the job's fault: its database transaction died with the
server, or the worker is going away. No budget is spent; `releases` counts it. `attempt` does not fall (H9): a late
write of the released attempt must not pass the next one's guard. The debt is new and due at once.

On the clean path of `atomic` there is nothing to release: the job never left `queued`, and its rollback leaves nothing.
What brings it back is the debt that is there, made due at once under the row lock: nobody else can claim it before.
"""

from __future__ import annotations

from uuid import UUID

from psycopg2.extensions import connection as PgConnection

from app.finish import Holder
from db.session import one, rows

RELEASE = """
WITH job AS (
    UPDATE jobs SET state = CASE WHEN cancel_requested THEN 'cancelled' ELSE 'queued' END::job_state,
                    worker_id = NULL, child_pid = NULL, releases = releases + 1, not_before = NULL,
                    changed_at = clock_timestamp(),
                    finished_at = CASE WHEN cancel_requested THEN clock_timestamp() END
     WHERE job_id = %(job_id)s AND state = 'running' AND worker_id = %(worker_id)s AND child_pid = %(pid)s
    RETURNING jobs.*
), debt AS (
    INSERT INTO outbox (job_id, queue, type, schema_version, priority, correlation_id, trace_context, episode)
    SELECT job_id, queue, type, schema_version, priority, correlation_id, trace_context, episode + 1
      FROM job WHERE state = 'queued'
    ON CONFLICT (job_id) DO UPDATE
       SET kind = 'wake', episode = excluded.episode, due_at = excluded.due_at, sends = 0, sent_at = NULL
), journal AS (
    INSERT INTO job_events (job_id, event, attempt, worker_id, reason)
    SELECT job_id, 'release', attempt, %(worker_id)s, %(reason)s FROM job
)
SELECT attempt FROM job
"""

GIVE_BACK = """
WITH debt AS (
    UPDATE outbox SET due_at = least(due_at, clock_timestamp())
      FROM jobs
     WHERE outbox.job_id = %(job_id)s AND kind = 'wake' AND sends > 0
       AND jobs.job_id = outbox.job_id AND state = 'queued' AND attempt = %(attempt)s - 1
    RETURNING outbox.job_id
)
INSERT INTO job_events (job_id, event, copy, delivery_tag, redelivered, worker_id, reason)
SELECT job_id, 'received', %(copy)s, %(delivery_tag)s, %(redelivered)s, %(worker_id)s, %(reason)s FROM debt;
COMMIT
"""


def release(connection: PgConnection, job_id: UUID, worker_id: UUID, pid: int, reason: str) -> int | None:
    """Give back the job that this process holds; its attempt, or None when it holds it no longer."""
    values = {"job_id": str(job_id), "worker_id": str(worker_id), "pid": pid, "reason": reason}
    row = one(connection, RELEASE, values)
    return int(row[0]) if row else None


def give_back(connection: PgConnection, holder: Holder, reason: str) -> None:
    """End the transaction of an attempt without a committed claim, rolled back to its savepoint; the job is due."""
    values = {
        "job_id": str(holder.claimed.job_id),
        "attempt": holder.claimed.attempt,
        "copy": holder.delivery.copy,
        "delivery_tag": holder.delivery.delivery_tag,
        "redelivered": holder.delivery.redelivered,
        "worker_id": str(holder.worker_id),
        "reason": reason,
    }
    rows(connection, GIVE_BACK, values)
