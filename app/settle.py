"""settle: quarantined -> succeeded. The effect is proven done; somebody says so, with the evidence.

The same guard as for a replay: job, state and episode. What the job owed (its trace) is paid, its entry is closed.
Not promised: whatever else the handler would have done. A job whose calls are done but whose handler does more is
replayed instead: the ledger hands the rerun its recorded results, and nothing is called twice.
"""

from __future__ import annotations

from uuid import UUID

from psycopg2.extensions import connection as PgConnection

from app.replay import Decider
from db.session import one

SETTLE = """
WITH job AS (
    UPDATE jobs SET state = 'succeeded', result_key = %(result_key)s, result = %(result)s::jsonb, not_before = NULL,
                    changed_at = clock_timestamp(), finished_at = clock_timestamp()
     WHERE job_id = %(job_id)s AND state = 'quarantined' AND episode = %(episode)s
    RETURNING jobs.job_id, jobs.episode, jobs.attempt
), closed AS (
    UPDATE quarantine_entries entry SET closed_at = clock_timestamp()
      FROM job WHERE entry.job_id = job.job_id AND entry.episode = job.episode
    RETURNING entry.job_id
), paid AS (
    DELETE FROM outbox USING job LEFT JOIN closed USING (job_id) WHERE outbox.job_id = job.job_id
), action AS (
    INSERT INTO quarantine_actions (job_id, episode, action, author, reason, run_id)
    SELECT job_id, episode, 'settle', %(author)s, %(reason)s, %(run_id)s::uuid FROM job
), ran AS (
    UPDATE replay_run_jobs SET outcome = 'settled', stage = %(stage)s
      FROM job WHERE run_id = %(run_id)s::uuid AND replay_run_jobs.job_id = job.job_id AND outcome IS NULL
), journal AS (
    INSERT INTO job_events (job_id, event, attempt, reason)
    SELECT job_id, 'settle', attempt, %(author)s || ': ' || %(reason)s FROM job
)
SELECT EXISTS (SELECT FROM job)
"""


def settle(
    connection: PgConnection,
    job_id: UUID,
    episode: int,
    decider: Decider,
    result_key: str | None = None,
    result: str | None = None,
) -> bool:
    """Close the job as succeeded; `result` is JSON text. False when it no longer is in that quarantine."""
    values = {
        "job_id": str(job_id),
        "episode": episode,
        "result_key": result_key or f"job:{job_id}",
        "result": result,
        "author": decider.author,
        "reason": decider.reason,
        "run_id": str(decider.run_id) if decider.run_id else None,
        "stage": decider.stage,
    }
    row = one(connection, SETTLE, values)
    return bool(row and row[0])
