"""park: a delivery whose type or version this worker does not know. Another worker, newer or older, may know it.

The debt stays unpaid, so the message is offered again with a growing gap; while a live worker knows the type and
consumes its queue, the gap does not grow, and is never the same twice, so that the message meets that worker soon. Only
when nobody has known the job for the grace period, and no such worker lives, is it quarantined; the database's clock
runs from the first worker that said so.
"""

from __future__ import annotations

from enum import Enum
from uuid import UUID

from psycopg2.extensions import connection as PgConnection

from db.session import one

# A worker that does not consume the job's queue will never meet its message; NULL: it has not said yet what it does.
KNOWN_ELSEWHERE = """
EXISTS (SELECT FROM workers
         WHERE stopped_at IS NULL AND lost_at IS NULL AND lease_until > clock_timestamp()
           AND (queues IS NULL OR queues @> to_jsonb(jobs.queue))
           AND knows @> to_jsonb(jobs.type || '@' || jobs.schema_version))
"""
PARK = f"""
WITH job AS (
    UPDATE jobs SET parked_at = coalesce(parked_at, clock_timestamp())
     WHERE job_id = %(job_id)s AND state IN ('queued', 'retry_wait')
    RETURNING job_id, parked_at < clock_timestamp() - make_interval(secs => %(grace_s)s) AS over,
              {KNOWN_ELSEWHERE} AS known
), again AS (
    UPDATE outbox
       SET due_at = least(due_at, clock_timestamp() + make_interval(secs => %(offer_s)s * (0.5 + random() / 2)))
      FROM job WHERE outbox.job_id = job.job_id AND job.known AND kind = 'wake' AND sends > 0
), journal AS (
    INSERT INTO job_events (job_id, event, copy, worker_id, reason)
    SELECT job_id, 'received', %(copy)s, %(worker_id)s, 'type or version unknown here' FROM job
)
SELECT over FROM job
"""
QUARANTINE = f"""
WITH job AS (
    UPDATE jobs SET state = 'quarantined', episode = episode + 1, not_before = NULL, cause = 'unknown_type',
                    reason = 'no live worker knew its type and version', changed_at = clock_timestamp()
     WHERE job_id = %(job_id)s AND state IN ('queued', 'retry_wait')
       AND parked_at < clock_timestamp() - make_interval(secs => %(grace_s)s)
       AND NOT {KNOWN_ELSEWHERE}
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
    SELECT job_id, word, NULL, %(worker_id)s, reason FROM job, unnest(ARRAY['quarantine', 'quarantined']) AS word
)
SELECT 1 FROM job
"""
# The journal names no attempt here: `quarantine` with one is the attempt's own word that it has ended (app.effects).
# As at the claim: without a job (a pruned one has a tombstone), or with a quarantined one whose dead letter is to come,
# the delivery is rejected.
REJECT = """
SELECT NOT EXISTS (SELECT FROM jobs WHERE job_id = %(job_id)s
                   UNION ALL SELECT FROM job_tombstones WHERE job_id = %(job_id)s), EXISTS (
    SELECT FROM jobs JOIN outbox debt USING (job_id)
     WHERE job_id = %(job_id)s AND state = 'quarantined' AND jobs.episode = %(episode)s
       AND kind = 'trace' AND debt.episode = jobs.episode)
"""


class Parked(Enum):
    """What is to be done with the delivery. QUARANTINED: rejected too, and it was this call that did it.

    UNKNOWN: rejected, and no debt will ever bring the dead letter of that job.
    """

    LEFT = "acknowledge"
    REJECT = "reject"
    QUARANTINED = "reject, newly quarantined"
    UNKNOWN = "reject, no such job"


def park(
    connection: PgConnection,
    job_id: UUID,
    copy: int,
    episode: int,
    worker_id: UUID,
    grace_s: float,
    offer_s: float,
) -> Parked:
    """Leave the job for others, or quarantine it; REJECT when it was quarantined before, and its dead letter is due."""
    values = {
        "job_id": str(job_id),
        "copy": copy,
        "episode": episode,
        "worker_id": str(worker_id),
        "grace_s": grace_s,
        "offer_s": offer_s,
    }
    row = one(connection, PARK, values)
    if row is not None and not row[0]:
        return Parked.LEFT
    if row is not None and one(connection, QUARANTINE, values) is not None:
        return Parked.QUARANTINED
    unknown, untraced = one(connection, REJECT, values) or (False, False)
    if unknown:
        return Parked.UNKNOWN
    return Parked.REJECT if untraced else Parked.LEFT
