"""Jobs that ended long ago: found a page at a time, judged, locked, judged again, deleted. A tombstone stays.

There is no index on the end of a job, and none is made: the jobs are walked by the time of their submit, which lies
before it. A job is kept while something still needs it, and `why` says what.

The races: two prunes at once (SKIP LOCKED: each takes what the other left), a replay of a quarantined job (the second
judgement is made under the row's lock), a submit of the same key (`app.submit.TAKEN`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from psycopg2.extensions import connection as PgConnection

from app.retention.policy import Retention
from db.session import one, rows

FIRST = (datetime(1970, 1, 1, tzinfo=UTC), "00000000-0000-0000-0000-000000000000")
LOCK_S = 8  # a prune that is frozen with its locks held must not hold up a submit of the same key for longer
CLOCK = "SELECT clock_timestamp()"
# A batch is named by its coordinator's id. Its completion job reads the children: they stay until that has ended too.
OPEN_BATCH = """
    cancelled_at IS NULL AND (batches.finished_at IS NULL OR EXISTS (
        SELECT FROM jobs last WHERE last.job_id = completion_id AND last.state NOT IN ('succeeded', 'cancelled')))
"""
# Ages count from the run's beginning, so that a job has one verdict in all its pages.
JUDGED = f"""
    SELECT jobs.job_id, jobs.created_at, jobs.type, state::text AS state, CASE
           WHEN state NOT IN ('succeeded', 'cancelled', 'quarantined') THEN 'it has not ended'
           WHEN NOT coalesce(coalesce(jobs.finished_at, jobs.changed_at) < %(now)s - make_interval(secs => CASE state
                    WHEN 'succeeded' THEN %(succeeded_s)s WHEN 'cancelled' THEN %(cancelled_s)s
                    ELSE %(quarantined_s)s END), false) THEN 'its retention'
           WHEN EXISTS (SELECT FROM quarantine_entries entry
                         WHERE entry.job_id = jobs.job_id AND closed_at IS NULL) THEN 'an open quarantine entry'
           WHEN EXISTS (SELECT FROM batches WHERE batches.batch_id IN (jobs.batch_id, jobs.job_id) AND {OPEN_BATCH})
             OR EXISTS (SELECT FROM batch_shared_jobs shared JOIN batches USING (batch_id)
                         WHERE shared.job_id = jobs.job_id AND {OPEN_BATCH}) THEN 'an open batch'
           WHEN EXISTS (SELECT FROM jobs parent WHERE parent.job_id = jobs.parent_id
                           AND parent.state NOT IN ('succeeded', 'cancelled')) THEN 'an open parent'
           WHEN EXISTS (SELECT FROM dead_letters letter WHERE letter.job_id = jobs.job_id AND coalesce(
                         received_at >= %(now)s - make_interval(secs => %(dead_letters_s)s), true)) THEN 'a dead letter'
           WHEN EXISTS (SELECT FROM replay_run_jobs part JOIN replay_runs run USING (run_id)
                         WHERE part.job_id = jobs.job_id AND run.finished_at IS NULL AND coalesce(
                         run.created_at >= %(now)s - make_interval(secs => %(replay_runs_s)s), true))
                THEN 'an open replay'
           WHEN EXISTS (SELECT FROM outbox WHERE outbox.job_id = jobs.job_id) THEN 'an unpaid debt'
           END AS why
"""
PAGE = f"""
WITH page AS MATERIALIZED (
    SELECT job_id FROM jobs
     WHERE created_at < %(now)s - make_interval(secs => %(soonest_s)s)
       AND (created_at, job_id) > (%(after_time)s::timestamptz, %(after_id)s::uuid)
     ORDER BY created_at, job_id LIMIT %(page)s
)
{JUDGED} FROM page JOIN jobs USING (job_id) ORDER BY jobs.created_at, jobs.job_id
"""
BEGIN = f"BEGIN; SET LOCAL idle_in_transaction_session_timeout = '{LOCK_S}s'"
LOCK = """
SELECT job_id::text FROM jobs
 WHERE job_id = ANY(%(ids)s::uuid[]) AND state IN ('succeeded', 'cancelled', 'quarantined')
   FOR UPDATE SKIP LOCKED
"""
AGAIN = f"{JUDGED} FROM jobs WHERE jobs.job_id = ANY(%(ids)s::uuid[])"
# An id of version 7 without a key is of our own making: nobody can give it again.
BURY = """
WITH stone AS (
    INSERT INTO job_tombstones (job_id, type, state, payload_digest, result_key, keyed)
    SELECT job_id, type, state::text, payload_digest, result_key,
           idempotency_key IS NOT NULL OR substr(job_id::text, 15, 1) <> '7'
      FROM jobs WHERE job_id = ANY(%(ids)s::uuid[])
    ON CONFLICT (job_id) DO NOTHING
), journal AS (
    DELETE FROM job_events WHERE job_id = ANY(%(ids)s::uuid[])
)
DELETE FROM jobs WHERE job_id = ANY(%(ids)s::uuid[]) AND state IN ('succeeded', 'cancelled', 'quarantined')
"""


@dataclass(frozen=True)
class Verdict:
    """One job of a page; `why` is None when it can go."""

    job_id: str
    created_at: datetime
    type: str
    state: str
    why: str | None


def clock(connection: PgConnection) -> datetime:
    """The database's time, from which a run counts its ages."""
    row = one(connection, CLOCK)
    assert row is not None
    now: datetime = row[0]
    return now


def page(
    connection: PgConnection, retention: Retention, now: datetime, after: tuple[datetime, str], size: int
) -> list[Verdict]:
    """The next `size` jobs behind `after` that were submitted long enough ago, judged; none at the end."""
    values = {**given(retention, now), "after_time": after[0], "after_id": after[1], "page": size}
    return [Verdict(str(job_id), *rest) for job_id, *rest in rows(connection, PAGE, values)]


def hold(connection: PgConnection, retention: Retention, now: datetime, ids: Sequence[str]) -> list[Verdict]:
    """Begin a transaction and lock what can go of these jobs: what others hold, or need since, is left out."""
    rows(connection, BEGIN)
    locked = [row[0] for row in rows(connection, LOCK, {"ids": list(ids)})]
    judged = rows(connection, AGAIN, {**given(retention, now), "ids": locked})
    return [found for found in (Verdict(str(job_id), *rest) for job_id, *rest in judged) if found.why is None]


def bury(connection: PgConnection, ids: Sequence[str]) -> None:
    """Delete the held jobs with their journal, leave their tombstones, and commit."""
    rows(connection, BURY, {"ids": list(ids)})
    rows(connection, "COMMIT")


def given(retention: Retention, now: datetime) -> dict[str, Any]:
    """The parameters of every judgement."""
    return {**retention.parameters(), "soonest_s": retention.soonest.seconds, "now": now}
