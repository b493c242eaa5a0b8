"""Messages without a job that no worker which saw them could read, kept until somebody who can read them lives.

A foreign message has nobody who would send it again, so it is the row here that waits, not a message that goes round
in the broker. It is offered to the broker again, and the row is gone, as soon as a live worker that may read it
consumes its queue; where no such worker has lived for the grace period, it becomes a dead letter.

The races: a worker dies between keeping a message and its acknowledgement, so it is delivered and kept again: one row,
known by its digest. A process dies between the broker's confirm and the commit that deletes the row: the message is
offered twice, and adopted once under its id. Two processes offer at once: each takes rows of its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from psycopg2 import Binary
from psycopg2.extensions import connection as PgConnection

from app.dead_letters import DeadLetter, store
from db.session import one, rows

# What a worker accepts stands there as `name` (a plain task) or `name@version` (foreign messages of a job type).
READABLE = """
EXISTS (SELECT FROM workers, jsonb_array_elements_text(accepts) AS accepted
         WHERE stopped_at IS NULL AND lost_at IS NULL AND lease_until > clock_timestamp()
           AND (queues IS NULL OR queues @> to_jsonb({of}.queue))
           AND regexp_replace(accepted, '@[0-9]+$', '') = {of}.task AND accepted <> ALL ({of}.tried))
"""
KEEP = f"""
INSERT INTO parked_messages (digest, task, tried, queue, envelope, body, reason, due_at)
SELECT %(digest)s, task, tried, queue, %(envelope)s, %(body)s, %(reason)s,
       clock_timestamp() + make_interval(secs => %(offer_s)s * (0.5 + random() / 2))
  FROM (SELECT %(task)s AS task, %(tried)s::text[] AS tried, %(queue)s AS queue) AS new
 WHERE NOT %(only_if_readable)s OR {READABLE.format(of="new")}
ON CONFLICT (digest) DO UPDATE SET due_at = excluded.due_at
RETURNING 1
"""
TAKE = f"""
DELETE FROM parked_messages
 WHERE parked_id = (
       SELECT parked_id FROM parked_messages
        WHERE due_at <= clock_timestamp() AND {READABLE.format(of="parked_messages")}
        ORDER BY due_at LIMIT 1 FOR UPDATE SKIP LOCKED)
RETURNING task, queue, envelope, body, reason
"""
TAKE_OVERDUE = f"""
DELETE FROM parked_messages
 WHERE parked_id = (
       SELECT parked_id FROM parked_messages
        WHERE parked_at < clock_timestamp() - make_interval(secs => %(grace_s)s)
          AND NOT {READABLE.format(of="parked_messages")}
        ORDER BY parked_at LIMIT 1 FOR UPDATE SKIP LOCKED)
RETURNING task, queue, envelope, body, reason
"""


@dataclass(frozen=True)
class Parked:
    """One message: `envelope` is JSON with its headers and properties, as the task layer writes and reads it."""

    task: str
    queue: str
    envelope: str
    body: bytes
    reason: str


def keep(
    connection: PgConnection,
    message: Parked,
    task_id: str,
    tried: Collection[str],
    offer_s: float,
    *,
    only_if_readable: bool = False,
) -> bool:
    """Keep the message for other workers; False when none that lives may read it and `only_if_readable` was asked.

    `tried`: what the worker that keeps it accepts under this task name. Offered after about `offer_s` seconds.
    """
    known_by = b"\0".join((message.task.encode(), task_id.encode(), message.queue.encode(), message.body))
    values = {
        "digest": Binary(hashlib.sha256(known_by).digest()),
        "task": message.task,
        "tried": list(tried),
        "queue": message.queue,
        "envelope": message.envelope,
        "body": Binary(message.body),
        "reason": message.reason,
        "offer_s": offer_s,
        "only_if_readable": only_if_readable,
    }
    return one(connection, KEEP, values) is not None


def offer(connection: PgConnection, publish: Callable[[Parked], None]) -> bool:
    """Offer one message to the broker again; False when none is due. What `publish` raises leaves it where it is."""
    return moved(connection, TAKE, {}, publish)


def give_up(connection: PgConnection, grace_s: float, age_s: float) -> bool:
    """Make a dead letter of one message that nobody could read for the grace period; False when there is none."""

    def bury(message: Parked) -> None:
        store(connection, dead_letter(message), age_s)

    return moved(connection, TAKE_OVERDUE, {"grace_s": grace_s}, bury)


def moved(connection: PgConnection, take: str, values: dict[str, Any], elsewhere: Callable[[Parked], None]) -> bool:
    """Delete a row in the transaction in which its message arrives elsewhere."""
    rows(connection, "BEGIN")
    try:
        row = one(connection, take, values)
        if row is not None:
            task, queue, envelope, body, reason = row
            elsewhere(Parked(task, queue, envelope, bytes(body), reason))
    except BaseException:
        rows(connection, "ROLLBACK")
        raise
    rows(connection, "COMMIT")
    return row is not None


def dead_letter(message: Parked) -> DeadLetter:
    """The dead letter of a message that was kept in vain."""
    envelope = json.loads(message.envelope)
    return DeadLetter(
        None,
        None,
        None,
        envelope.pop("headers"),
        envelope,
        message.body,
        f"{message.reason}; no live worker could read it",
        source="task layer",
    )
