"""Repairs: what must never be, found and mended, counted and journaled. Two sweepers at once are harmless.

A job that waits without a debt would wait for ever; a quarantined job without its dead letter and without the debt for
it would never get one. No arrow leaves either behind: they come from a restored backup, or from a hand in the tables.
"""

from __future__ import annotations

from psycopg2.extensions import connection as PgConnection

from db.session import rows

PAGE = 500
WAITING_WITHOUT_DEBT = """
WITH job AS (
    SELECT jobs.* FROM jobs
     WHERE state IN ('queued', 'retry_wait') AND changed_at < clock_timestamp() - make_interval(secs => %(age_s)s)
       AND NOT EXISTS (SELECT FROM outbox WHERE outbox.job_id = jobs.job_id)
     LIMIT %(page)s FOR NO KEY UPDATE SKIP LOCKED
), debt AS (
    INSERT INTO outbox (job_id, queue, type, schema_version, priority, correlation_id, trace_context, episode, due_at)
    SELECT job_id, queue, type, schema_version, priority, correlation_id, trace_context, episode + 1,
           coalesce(not_before, clock_timestamp())
      FROM job
    ON CONFLICT DO NOTHING RETURNING job_id
)
INSERT INTO job_events (job_id, event, reason)
SELECT job_id, 'repaired', 'it waited without a debt' FROM debt RETURNING job_id::text
"""
QUARANTINED_WITHOUT_TRACE = """
WITH job AS (
    SELECT jobs.* FROM jobs JOIN quarantine_entries entry USING (job_id, episode)
     WHERE state = 'quarantined' AND dead_lettered_at IS NULL AND closed_at IS NULL
       AND changed_at < clock_timestamp() - make_interval(secs => %(age_s)s)
       AND NOT EXISTS (SELECT FROM outbox WHERE outbox.job_id = jobs.job_id)
     LIMIT %(page)s FOR NO KEY UPDATE OF jobs SKIP LOCKED
), debt AS (
    INSERT INTO outbox (job_id, kind, queue, type, schema_version, priority, correlation_id, trace_context, episode)
    SELECT job_id, 'trace', queue, type, schema_version, priority, correlation_id, trace_context, episode FROM job
    ON CONFLICT DO NOTHING RETURNING job_id
)
INSERT INTO job_events (job_id, event, reason)
SELECT job_id, 'repaired', 'its dead letter was missing and nobody owed it' FROM debt RETURNING job_id::text
"""
ORPHANS = """
WITH debt AS (
    DELETE FROM outbox
     WHERE NOT EXISTS (SELECT FROM jobs WHERE jobs.job_id = outbox.job_id)
        OR EXISTS (SELECT FROM jobs WHERE jobs.job_id = outbox.job_id AND state IN ('succeeded', 'cancelled'))
    RETURNING job_id
)
INSERT INTO job_events (job_id, event, reason)
SELECT job_id, 'repaired', 'a debt without a job that waits for it was deleted' FROM debt RETURNING job_id::text
"""


def repair(connection: PgConnection, age_s: float) -> list[str]:
    """Mend what is older than `age_s`; the ids of the jobs, at most `PAGE` of each kind."""
    values = {"age_s": age_s, "page": PAGE}
    mended = [*rows(connection, WAITING_WITHOUT_DEBT, values), *rows(connection, QUARANTINED_WITHOUT_TRACE, values)]
    return [row[0] for row in mended]


def forget_orphans(connection: PgConnection) -> list[str]:
    """Delete the debts of jobs that are gone or have ended; their ids.

    A job comes with its debt in one statement and leaves its end never again, so none of these can be needed. While one
    is there, its key cannot be submitted again.
    """
    return [row[0] for row in rows(connection, ORPHANS)]
