"""The outbox as a debt: a row says that somebody must wake a job up, and only the job's claim deletes it.

`take` commits `sends + 1` and the next due time *before* anything is published and keeps no lock: a claim that deletes
the row never waits for a broker (H4), and of a crash between take and publish only a gap remains. The copy number in
the message is `sends`, so the claim can tell the first copy of a debt from all others (H3).

A quarantined job's missing dead letter is a debt of the same kind, offered a bounded number of times (H2).

An early resend needs evidence that messages were lost. An empty queue is none (H1): prefetched messages are not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from psycopg2.extensions import connection as PgConnection

from app.settings import Settings
from app.submit import CHANNEL, NOTIFY
from db.prepared import Plans
from db.session import one, rows

TRACE_OFFERS = 8  # a dead letter that is still missing after so many offers is reported, not offered for ever
LISTEN = f"LISTEN {CHANNEL}"
# First sends refill the window of unpaid deliveries by quarters, highest priority first; resends are in it already.
PLANS = Plans("relay")
TAKE = PLANS.statement(
    "take",
    """
WITH room AS (
    SELECT CASE WHEN count(*) > 0.75 * %(window)s THEN 0 ELSE least(%(batch)s, %(window)s - count(*)) END AS free
      FROM (SELECT FROM outbox WHERE queue = %(queue)s AND sends > 0 AND due_at < 'infinity' AND kind = 'wake'
             LIMIT %(window)s) AS unpaid
), first_sends AS (
    SELECT due.job_id
      FROM generate_series(9, 0, -1) AS level (priority), LATERAL (
           SELECT job_id FROM outbox
            WHERE queue = %(queue)s AND priority = level.priority AND sends = 0
              AND due_at <= statement_timestamp()
            ORDER BY due_at LIMIT (SELECT free FROM room) FOR NO KEY UPDATE SKIP LOCKED) AS due
     LIMIT (SELECT free FROM room)
), resends AS (
    SELECT job_id FROM outbox
     WHERE queue = %(queue)s AND sends > 0 AND due_at <= statement_timestamp()
     ORDER BY due_at LIMIT %(batch)s FOR NO KEY UPDATE SKIP LOCKED
), taken AS (
    UPDATE outbox
       SET sends = sends + 1, sent_at = clock_timestamp(), returned_at = NULL, returned_reason = NULL,
           due_at = CASE WHEN kind = 'trace' AND sends + 1 >= %(offers)s THEN 'infinity' ELSE clock_timestamp()
                         + make_interval(secs => least(%(first_s)s * 2.0 ^ least(sends, 30), %(max_s)s)) END
     WHERE job_id IN (SELECT job_id FROM first_sends UNION ALL SELECT job_id FROM resends)
    RETURNING job_id, kind, type, schema_version, priority, correlation_id, trace_context, episode, sends, created_at
)
SELECT job_id, kind, type, schema_version, priority, correlation_id, trace_context, episode, sends
  FROM taken ORDER BY priority DESC, created_at
""",
    queue="text",
    window="bigint",
    batch="bigint",
    offers="bigint",
    first_s="float8",
    max_s="float8",
)
NEXT_DUE = PLANS.statement(
    "next_due",
    """
SELECT extract(epoch FROM least(
    (SELECT min(due_at) FROM generate_series(9, 0, -1) AS level (priority), LATERAL (
        SELECT due_at FROM outbox WHERE queue = %(queue)s AND priority = level.priority AND sends = 0
         ORDER BY due_at LIMIT 1) AS due),
    (SELECT due_at FROM outbox WHERE queue = %(queue)s AND sends > 0 AND due_at < 'infinity' ORDER BY due_at LIMIT 1)
) - clock_timestamp())::float8
""",
    queue="text",
)
UNPAID = """
SELECT type, schema_version, count(*) FILTER (WHERE sends = 1), count(*) FILTER (WHERE sends > 1)
  FROM outbox WHERE queue = %(queue)s AND sends > 0 AND kind = 'wake'
 GROUP BY type, schema_version
"""
EVIDENCE = """
UPDATE outbox
   SET due_at = least(due_at, greatest(clock_timestamp(),
                      sent_at + make_interval(secs => %(age_s)s * 2.0 ^ least(sends - 1, 30))))
 WHERE job_id = ANY (ARRAY(
       SELECT job_id FROM outbox WHERE queue = %(queue)s AND sends > 0 AND due_at < 'infinity'
          AND job_id <> ALL (%(waiting)s::uuid[]) FOR NO KEY UPDATE SKIP LOCKED))
"""
RETURNED = """
WITH lost AS (
    SELECT job_id, reason FROM unnest(%(job_ids)s::uuid[], %(reasons)s::text[]) AS back (job_id, reason)
), row AS (
    UPDATE outbox
       SET returned_at = clock_timestamp(), returned_reason = lost.reason,
           due_at = least(due_at, sent_at + make_interval(secs => %(age_s)s * 2.0 ^ least(sends - 1, 30)))
      FROM lost WHERE outbox.job_id = lost.job_id AND sends > 0
    RETURNING outbox.job_id, sends, lost.reason
)
INSERT INTO job_events (job_id, event, copy, reason) SELECT job_id, 'returned', sends, reason FROM row
"""


STRANGERS = """
SELECT job_id::text FROM unnest(%(job_ids)s::uuid[]) AS given (job_id)
 WHERE NOT EXISTS (SELECT FROM jobs WHERE jobs.job_id = given.job_id)
   AND NOT EXISTS (SELECT FROM job_tombstones old WHERE old.job_id = given.job_id)
"""
GIVE_BACK = """
UPDATE outbox SET due_at = clock_timestamp()
 WHERE job_id = ANY (%(job_ids)s::uuid[]) AND kind = 'wake' AND sends = 1 AND due_at > clock_timestamp()
"""


@dataclass(frozen=True, slots=True)
class Debt:
    """One message to publish; `copy` counts the publishes of this debt from 1."""

    job_id: UUID
    kind: str
    type: str
    version: int
    priority: int
    correlation_id: str
    trace_context: str | None
    episode: int
    copy: int


def take(connection: PgConnection, queue: str, settings: Settings) -> list[Debt]:
    """Commit one more send of the due debts of a queue and return them; publish them afterwards."""
    values = {
        "queue": queue,
        "batch": settings.batch,
        "window": settings.window,
        "first_s": settings.resend_first_s,
        "max_s": settings.resend_max_s,
        "offers": TRACE_OFFERS,
    }
    return [Debt(UUID(job_id), *rest) for job_id, *rest in rows(connection, TAKE, values)]


def next_due_s(connection: PgConnection, queue: str) -> float | None:
    """Seconds until the next debt of the queue is due (negative: overdue, window full); None without debts."""
    row = one(connection, NEXT_DUE, {"queue": queue})
    return row[0] if row else None


def unpaid_messages(connection: PgConnection, queue: str, limit: Callable[[str, int], int]) -> int:
    """How many messages of the queue, at the least, were sent and not claimed; `limit` jobs of a type share one."""
    found = rows(connection, UNPAID, {"queue": queue})
    return sum(-(-first // limit(name, version)) + again for name, version, first, again in found)


def note_loss(connection: PgConnection, queue: str, age_s: float, waiting: Collection[UUID] = ()) -> None:
    """There is evidence that the broker lost messages: unpaid debts fall due at `age_s`, doubling with each send.

    Jobs in `waiting` are known to have a message in the queue.
    """
    values = {"queue": queue, "age_s": age_s, "waiting": [str(job_id) for job_id in waiting]}
    rows(connection, EVIDENCE, values)


def give_back(connection: PgConnection, job_ids: Sequence[UUID]) -> set[UUID]:
    """A delivery does not come to these jobs of it: they are sent again at once, each by itself.

    Returns those that the database does not know: nothing would bring them again.
    """
    values = {"job_ids": [str(job_id) for job_id in job_ids]}
    unknown = {UUID(row[0]) for row in rows(connection, STRANGERS, values)}
    rows(connection, f"{GIVE_BACK}; {NOTIFY}", values)
    return unknown


def note_returned(connection: PgConnection, returned: Sequence[tuple[UUID, str]], age_s: float) -> None:
    """The broker found no queue for these messages: write it on their rows and journal it."""
    values: dict[str, Any] = {
        "job_ids": [str(job_id) for job_id, _ in returned],
        "reasons": [reason for _, reason in returned],
        "age_s": age_s,
    }
    rows(connection, RETURNED, values)
