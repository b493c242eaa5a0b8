"""park: a delivery whose type or version this worker does not know. Another worker, newer or older, may know it.

The debt stays unpaid, so the message is offered again with a growing gap. Only when nobody has known the job for the
grace period is it quarantined; the database's clock runs from the first worker that said so.
"""

from __future__ import annotations

from uuid import UUID

from psycopg2.extensions import connection as PgConnection

from db.session import one

PARK = """
WITH job AS (
    UPDATE jobs SET parked_at = coalesce(parked_at, clock_timestamp())
     WHERE job_id = %(job_id)s AND state IN ('queued', 'retry_wait')
    RETURNING job_id, parked_at < clock_timestamp() - make_interval(secs => %(grace_s)s) AS over
), journal AS (
    INSERT INTO job_events (job_id, event, copy, worker_id, reason)
    SELECT job_id, 'received', %(copy)s, %(worker_id)s, 'type or version unknown here' FROM job
)
SELECT over FROM job
"""
QUARANTINE = """
WITH job AS (
    UPDATE jobs SET state = 'quarantined', episode = episode + 1, not_before = NULL, cause = 'unknown_type',
                    reason = 'no live worker knew its type and version', changed_at = clock_timestamp()
     WHERE job_id = %(job_id)s AND state IN ('queued', 'retry_wait')
       AND parked_at < clock_timestamp() - make_interval(secs => %(grace_s)s)
    RETURNING jobs.*
), trace AS (
    INSERT INTO outbox (job_id, kind, queue, type, schema_version, priority, correlation_id, trace_context, episode,
                        due_at)
    SELECT job_id, 'trace', queue, type, schema_version, priority, correlation_id, trace_context, episode,
           clock_timestamp() + make_interval(secs => %(offer_s)s)
      FROM job
    ON CONFLICT (job_id) DO UPDATE
       SET kind = 'trace', episode = excluded.episode, due_at = excluded.due_at, sends = 0, sent_at = NULL
), entry AS (
    INSERT INTO quarantine_entries (job_id, episode, cause, fingerprint, reason, attempt)
    SELECT job_id, episode, cause, cause || ':' || type || '@' || schema_version, reason, attempt FROM job
), journal AS (
    INSERT INTO job_events (job_id, event, attempt, worker_id, reason)
    SELECT job_id, word, attempt, %(worker_id)s, reason FROM job, unnest(ARRAY['quarantine', 'quarantined']) AS word
)
SELECT 1 FROM job
"""


def park(connection: PgConnection, job_id: UUID, copy: int, worker_id: UUID, grace_s: float, offer_s: float) -> bool:
    """Leave the job for others; True when its grace is over and it was quarantined: reject the delivery then."""
    values = {
        "job_id": str(job_id),
        "copy": copy,
        "worker_id": str(worker_id),
        "grace_s": grace_s,
        "offer_s": offer_s,
    }
    row = one(connection, PARK, values)
    return bool(row and row[0]) and one(connection, QUARANTINE, values) is not None
