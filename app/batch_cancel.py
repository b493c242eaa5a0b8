"""Cancel a batch: no further page, no completion job, and every child that is open is cancelled.

First the batch's own row: from then on a page of its coordinator writes nothing, and nobody completes it. Then the
coordinator, then the children, a few hundred rows in each commit, so that no worker waits long for a lock. A crash in
between leaves less to do: the command can be repeated, and goes on.

A running child is asked to stop (see `app.cancel`). A child of atomic kind at work is passed by; it ends within
seconds. Shared children belong to another batch, or to nobody, and are left alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from uuid import UUID

from psycopg2.extensions import connection as PgConnection

from app.cancel import Cancelled, cancel
from db.session import one, rows

PAGE = 500
COORDINATOR_LOOKS_S = (0.05, 0.1, 0.3, 1.0, 2.0)
CANCEL_BATCH = """
UPDATE batches SET cancelled_at = clock_timestamp(), cancelled_by = %(author)s, cancel_reason = %(reason)s
 WHERE batch_id = %(batch_id)s AND finished_at IS NULL AND cancelled_at IS NULL
"""
READ = """
SELECT coordinator_id, finished_at IS NOT NULL, completion_id FROM batches WHERE batch_id = %(batch_id)s
"""
CANCEL_CHILDREN = f"""
WITH candidate AS (
    SELECT job_id FROM jobs
     WHERE batch_id = %(batch_id)s AND state IN ('queued', 'retry_wait', 'quarantined')
     LIMIT {PAGE} FOR NO KEY UPDATE SKIP LOCKED
), job AS (
    UPDATE jobs SET state = 'cancelled', not_before = NULL, cause = 'cancelled', reason = %(reason)s,
                    changed_at = clock_timestamp(), finished_at = clock_timestamp()
      FROM candidate
     WHERE jobs.job_id = candidate.job_id AND state IN ('queued', 'retry_wait', 'quarantined')
    RETURNING jobs.job_id, attempt, episode
), closed AS (
    UPDATE quarantine_entries entry SET closed_at = clock_timestamp()
      FROM job WHERE entry.job_id = job.job_id AND entry.episode = job.episode AND closed_at IS NULL
    RETURNING entry.job_id, entry.episode
), paid AS (
    DELETE FROM outbox USING job LEFT JOIN closed USING (job_id) WHERE outbox.job_id = job.job_id
), decided AS (
    INSERT INTO quarantine_actions (job_id, episode, action, author, reason)
    SELECT job_id, episode, 'cancel', %(author)s, %(reason)s FROM closed
    ON CONFLICT DO NOTHING
), journal AS (
    INSERT INTO job_events (job_id, event, attempt, reason)
    SELECT job_id, 'cancel', attempt, %(author)s || ': ' || %(reason)s FROM job
)
SELECT count(*) FROM job
"""
ASK_CHILDREN = f"""
WITH candidate AS (
    SELECT job_id FROM jobs
     WHERE batch_id = %(batch_id)s AND state = 'running' AND NOT cancel_requested
     LIMIT {PAGE} FOR NO KEY UPDATE SKIP LOCKED
), asked AS (
    UPDATE jobs SET cancel_requested = true
      FROM candidate
     WHERE jobs.job_id = candidate.job_id AND state = 'running'
    RETURNING 1
)
SELECT count(*) FROM asked
"""


@dataclass(frozen=True)
class BatchCancelled:
    """What became of the wish: `finished` batches are left as they are; else how many children were dealt with."""

    finished: bool
    completion_id: UUID | None
    coordinator: Cancelled
    cancelled: int = 0
    asked: int = 0


def cancel_batch(
    connection: PgConnection, batch_id: UUID, *, author: str, reason: str, on_page: Callable[[int], None] | None = None
) -> BatchCancelled | None:
    """Cancel a batch and its open children; None when there is no such batch. `on_page` hears how many came now."""
    values = {"batch_id": str(batch_id), "author": author, "reason": reason}
    rows(connection, CANCEL_BATCH, values)
    found = one(connection, READ, values)
    if found is None:
        return None
    coordinator_id, finished, completion_id = found
    if finished:
        return BatchCancelled(True, completion_id, Cancelled.FINISHED)
    coordinator = cancel_coordinator(connection, coordinator_id, f"{author}: {reason}")
    counts = []
    for statement in (CANCEL_CHILDREN, ASK_CHILDREN, CANCEL_CHILDREN):
        total = 0
        while (row := one(connection, statement, values)) and row[0]:
            total += row[0]
            if on_page is not None:
                on_page(row[0])
        counts.append(total)
    return BatchCancelled(False, completion_id, coordinator, counts[0] + counts[2], counts[1])


def cancel_coordinator(connection: PgConnection, job_id: UUID, reason: str) -> Cancelled:
    """Cancel the coordinator, or ask it to stop; its row is locked for a moment while a page commits."""
    for wait_s in COORDINATOR_LOOKS_S:
        answer = cancel(connection, job_id, reason=reason)
        if answer is not Cancelled.RUNNING:
            return answer
        time.sleep(wait_s)
    return cancel(connection, job_id, reason=reason)
