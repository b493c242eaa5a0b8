"""release: running -> queued, by the worker that holds the job and has stopped working on it.

Used when the attempt was cut short by something that is not the job's fault: its database transaction died with the
server, or the worker is going away. No budget is spent; `releases` counts it. `attempt` does not fall (H9): a late
write of the released attempt must not pass the next one's guard. The debt is new and due at once.
"""

from __future__ import annotations

from uuid import UUID

from psycopg2.extensions import connection as PgConnection

from db.session import one

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


def release(connection: PgConnection, job_id: UUID, worker_id: UUID, pid: int, reason: str) -> int | None:
    """Give back the job that this process holds; its attempt, or None when it holds it no longer."""
    values = {"job_id": str(job_id), "worker_id": str(worker_id), "pid": pid, "reason": reason}
    row = one(connection, RELEASE, values)
    return int(row[0]) if row else None
