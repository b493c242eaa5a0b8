"""succeed, retry, quarantine: the arrows out of `running` that the owner itself writes.

The race: a worker is declared lost while its handler still runs, another attempt starts, and then the first one
finishes. Each arrow therefore checks state, owner and `attempt` in its own UPDATE; zero rows means somebody else owns
the job, and the loser writes nothing: its open transaction, with all that the handler did in it, is rolled back.

In atomic mode the claim was never committed: the same arrows go out from `queued` under the row lock, attempt + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from uuid import UUID

from psycopg2.errors import DivisionByZero
from psycopg2.extensions import connection as PgConnection

from app.claim import JOB_PLANS, Claimed, Delivery
from app.errors import LeaseLost
from db.prepared import Prepared
from db.session import one, rows

# The guard of a committed attempt, and of the clean path, where the row lock is held since `begin_atomic`. `state` as
# text fits no index: the row is found by its key, whatever the statistics say.
COMMITTED = "state::text = 'running' AND attempt = %(attempt)s AND worker_id = %(worker_id)s"
UNCOMMITTED = "state::text = 'queued' AND attempt = %(attempt)s - 1"
JOURNAL = """
    INSERT INTO job_events (job_id, event, attempt, copy, delivery_tag, redelivered, worker_id, reason)
    SELECT job_id, word, attempt, %(copy)s, %(delivery_tag)s, %(redelivered)s, %(worker_id)s, {reason}
      FROM job, unnest(%(words)s::text[]) WITH ORDINALITY AS words (word, place) {only} ORDER BY place
"""
NOT_SCHEDULED_IF_CANCELLED = "WHERE NOT (word = 'retry_scheduled' AND state = 'cancelled')"
SUCCEED = """
WITH job AS (
    UPDATE jobs SET state = 'succeeded', attempt = %(attempt)s, worker_id = NULL, child_pid = NULL,
                    result_key = %(result_key)s, result = %(result)s::jsonb, not_before = NULL,
                    changed_at = clock_timestamp(), finished_at = clock_timestamp()
     WHERE job_id = %(job_id)s AND {guard}
    RETURNING job_id, attempt
), paid AS (
    DELETE FROM outbox USING job WHERE outbox.job_id = job.job_id
), journal AS ({journal})
SELECT 1 / count(*) FROM job
"""
SUCCEED_TYPES = {
    "job_id": "uuid",
    "attempt": "bigint",
    "worker_id": "uuid",
    "result_key": "text",
    "result": "text",
    "words": "text[]",
    "copy": "bigint",
    "delivery_tag": "text",
    "redelivered": "boolean",
    "journal_reason": "text",
}
# Of a chunk of atomic jobs that share a commit: all of them or none. As text, `state` fits no index but the key's.
SUCCEED_ALL = JOB_PLANS.statement(
    "succeed_all",
    """
WITH done AS (
    SELECT * FROM unnest(%(job_ids)s::uuid[], %(result_keys)s::text[], %(results)s::text[])
           AS done (job_id, result_key, result)
), job AS (
    UPDATE jobs SET state = 'succeeded', attempt = 1, worker_id = NULL, child_pid = NULL,
                    result_key = done.result_key, result = done.result::jsonb, not_before = NULL,
                    changed_at = clock_timestamp(), finished_at = clock_timestamp()
      FROM done
     WHERE jobs.job_id = done.job_id AND state::text = 'queued' AND attempt = 0
    RETURNING jobs.job_id
), paid AS (
    DELETE FROM outbox USING job WHERE outbox.job_id = job.job_id
), journal AS (
    INSERT INTO job_events (job_id, event, attempt, copy, delivery_tag, redelivered, worker_id)
    SELECT job_id, word, 1, 1, %(delivery_tag)s, false, %(worker_id)s
      FROM job, (VALUES (1, 'received'), (2, 'claim'), (3, 'result_saved'), (4, 'succeed')) AS words (place, word)
     ORDER BY job_id, place
)
SELECT 1 / (count(*) = cardinality(%(job_ids)s::uuid[]))::int FROM job
""",
    job_ids="text[]",
    result_keys="text[]",
    results="text[]",
    delivery_tag="text",
    worker_id="uuid",
)
# A cancel that was asked for while the job ran is honoured here: what would be tried again is cancelled instead.
RETRY = """
WITH job AS (
    UPDATE jobs SET state = CASE WHEN cancel_requested THEN 'cancelled' ELSE 'retry_wait' END::job_state,
                    attempt = %(attempt)s, worker_id = NULL, child_pid = NULL, failures = failures + 1,
                    not_before = clock_timestamp() + make_interval(secs => %(delay_s)s), last_delay_s = %(delay_s)s,
                    cause = %(cause)s, reason = %(reason)s, changed_at = clock_timestamp(),
                    finished_at = CASE WHEN cancel_requested THEN clock_timestamp() END
     WHERE job_id = %(job_id)s AND {guard}
    RETURNING jobs.*
), paid AS (
    DELETE FROM outbox USING job WHERE outbox.job_id = job.job_id AND job.state = 'cancelled'
), debt AS (
    INSERT INTO outbox (job_id, queue, type, schema_version, priority, correlation_id, trace_context, episode, due_at)
    SELECT job_id, queue, type, schema_version, priority, correlation_id, trace_context, episode + 1, not_before
      FROM job WHERE state = 'retry_wait'
    ON CONFLICT (job_id) DO UPDATE
       SET kind = 'wake', episode = excluded.episode, due_at = excluded.due_at, sends = 0, sent_at = NULL
), journal AS ({journal})
SELECT 1 / count(*) FROM job
"""
QUARANTINE = """
WITH job AS (
    UPDATE jobs SET state = 'quarantined', attempt = %(attempt)s, worker_id = NULL, child_pid = NULL,
                    failures = failures + 1, episode = episode + 1, not_before = NULL,
                    cause = %(cause)s, reason = %(reason)s, changed_at = clock_timestamp()
     WHERE job_id = %(job_id)s AND {guard}
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
    INSERT INTO quarantine_entries (job_id, episode, cause, fingerprint, reason, attempt, traceback)
    SELECT job_id, episode, cause, %(fingerprint)s, reason, attempt, to_jsonb(%(frames)s::text[]) FROM job
), journal AS ({journal})
SELECT 1 / count(*) FROM job
"""
# Every arrow writes its journal row in its own statement, so the row proves whose arrow it was. State and attempt do
# not: an atomic attempt spends its number only when it commits, so the next owner's attempt has the same one.
OUTCOME = """
SELECT state::text, attempt, EXISTS (
       SELECT FROM job_events written
        WHERE written.job_id = jobs.job_id AND event IN ('succeed', 'retry', 'quarantine')
          AND written.attempt = %(attempt)s AND written.worker_id = %(worker_id)s
          AND copy = %(copy)s AND delivery_tag IS NOT DISTINCT FROM %(delivery_tag)s)
  FROM jobs WHERE job_id = %(job_id)s
"""


@cache
def statement(arrow: str, committed: bool) -> str:
    """The SQL of an arrow for a committed attempt, or for the clean path under its row lock."""
    guard = COMMITTED if committed else UNCOMMITTED
    only = NOT_SCHEDULED_IF_CANCELLED if arrow is RETRY else ""
    sql = arrow.format(guard=guard, journal=JOURNAL.format(reason="%(journal_reason)s", only=only))
    if arrow is not SUCCEED:
        return sql
    return JOB_PLANS.statement("succeed_committed" if committed else "succeed", sql, **SUCCEED_TYPES)


@cache
def finishing(arrow: str, committed: bool, after_commit: str) -> str:
    """The message that ends the handler's transaction with an arrow.

    Deferred constraints are checked first, while the handler's savepoint can still be rolled back.
    """
    sql = arrow if isinstance(arrow, Prepared) else statement(arrow, committed)
    template = f"SET CONSTRAINTS ALL IMMEDIATE; {{arrow}}; COMMIT; {after_commit}"
    return JOB_PLANS.message(template, arrow=sql) if isinstance(sql, Prepared) else template.format(arrow=sql)


# Known before the first session is made, since a session prepares all its statements at once.
for _committed in (True, False):
    statement(SUCCEED, _committed)


@dataclass(frozen=True, slots=True)
class Holder:
    """Who writes: the won claim, the delivery it came by, and the worker that holds the lease.

    `commits` is False for a job that shares its transaction with others: an arrow then leaves it open.
    """

    claimed: Claimed
    delivery: Delivery
    worker_id: UUID
    commits: bool = True

    def write(
        self,
        connection: PgConnection,
        arrow: str,
        words: list[str],
        values: dict[str, Any],
        in_transaction: bool,
        after_commit: str = "",
    ) -> None:
        """One guarded arrow in one round trip, committed. Raises LeaseLost when the guard finds no row.

        Inside a transaction the guard's failure aborts the message before its COMMIT: nothing of the loser stays.
        """
        if not self.claimed.committed:
            words = ["received", "claim", *words]
        committed = self.claimed.committed
        whole = in_transaction and self.commits
        sql = finishing(arrow, committed, after_commit) if whole else statement(arrow, committed)
        try:
            rows(
                connection,
                sql,
                {
                    "job_id": str(self.claimed.job_id),
                    "attempt": self.claimed.attempt,
                    "worker_id": str(self.worker_id),
                    "copy": self.delivery.copy,
                    "delivery_tag": self.delivery.delivery_tag,
                    "redelivered": self.delivery.redelivered,
                    "words": words,
                    "journal_reason": None,
                    **values,
                },
            )
        except DivisionByZero:
            if in_transaction:
                rows(connection, "ROLLBACK")
            raise LeaseLost(
                f"job {self.claimed.job_id}: attempt {self.claimed.attempt} no longer owns the job; nothing was written"
            ) from None


def succeed(
    connection: PgConnection,
    holder: Holder,
    result_key: str,
    result: str | None,
    in_transaction: bool,
    after_commit: str = "",
) -> None:
    """Write running -> succeeded, with the proof of the effect; `result` is JSON text. Raises LeaseLost."""
    values = {"result_key": result_key, "result": result}
    holder.write(connection, SUCCEED, ["result_saved", "succeed"], values, in_transaction, after_commit)


def succeed_all(
    connection: PgConnection,
    done: Sequence[tuple[UUID, str, str | None]],
    delivery_tag: str | None,
    worker_id: UUID,
    after_commit: str,
) -> None:
    """Commit the open transaction with the success of all of `done`: (job id, result key, result as JSON text).

    Raises LeaseLost when one of them is not held any more: nothing is written then.
    """
    sql = finishing(SUCCEED_ALL, committed=False, after_commit=after_commit)
    values = {
        "job_ids": [str(job_id) for job_id, _, _ in done],
        "result_keys": [key for _, key, _ in done],
        "results": [result for _, _, result in done],
        "delivery_tag": delivery_tag,
        "worker_id": str(worker_id),
    }
    try:
        rows(connection, sql, values)
    except DivisionByZero:
        rows(connection, "ROLLBACK")
        raise LeaseLost(f"one of {len(done)} jobs is not held any more; nothing was written") from None


def retry(
    connection: PgConnection,
    holder: Holder,
    delay_s: float,
    cause: str,
    reason: str,
    *,
    in_transaction: bool,
) -> None:
    """Write running -> retry_wait: time, cause and debt in one statement. Raises LeaseLost."""
    values = {
        "delay_s": delay_s,
        "cause": cause,
        "reason": reason,
        "journal_reason": f"{cause}: {reason}; in {delay_s:.3f} s",
    }
    holder.write(connection, RETRY, ["retry", "retry_scheduled"], values, in_transaction)


def quarantine(
    connection: PgConnection,
    holder: Holder,
    cause: str,
    reason: str,
    fingerprint: str,
    *,
    failure: str,
    offer_s: float,
    in_transaction: bool,
    frames: Sequence[str] = (),
) -> None:
    """Write running -> quarantined, the first of two traces, and the debt for the second. Raises LeaseLost.

    `frames`: where it happened, without values. The caller rejects the delivery; when that is lost, the debt offers a
    message to reject after `offer_s` seconds.
    """
    values = {
        "cause": cause,
        "reason": reason,
        "fingerprint": fingerprint,
        "journal_reason": f"{failure}: {reason}",
        "offer_s": offer_s,
        "frames": list(frames),
    }
    holder.write(connection, QUARANTINE, ["quarantine", "quarantined"], values, in_transaction)


def outcome(connection: PgConnection, holder: Holder) -> str:
    """What became of an arrow whose COMMIT answer was lost: `ours`, `open` (nothing was written) or `other`."""
    claimed = holder.claimed
    row = one(
        connection,
        OUTCOME,
        {
            "job_id": str(claimed.job_id),
            "attempt": claimed.attempt,
            "worker_id": str(holder.worker_id),
            "copy": holder.delivery.copy,
            "delivery_tag": holder.delivery.delivery_tag,
        },
    )
    if row is None:
        return "other"
    state, attempt, ours = row
    if ours:
        return "ours"
    before = claimed.attempt if claimed.committed else claimed.attempt - 1
    return "open" if attempt == before and state in ("running", "queued") else "other"
