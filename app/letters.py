"""Dead letters for people: those of a job, and those that belong to no job, to be looked at and dismissed.

What a message says of itself may hold what a payload holds. Only headers of brokers, of Celery's protocol and of our
own are shown, and no body unless somebody asks for it.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from psycopg2.extensions import connection as PgConnection

from db.session import one, rows

SHOWN_HEADERS = frozenset(
    {
        "id",
        "task",
        "lang",
        "origin",
        "eta",
        "expires",
        "retries",
        "timelimit",
        "root_id",
        "parent_id",
        "group",
        "correlation_id",
        "occurred_at",
        "traceparent",
        "redelivered",
    }
)
SHOWN_PREFIXES = ("x-death", "x-first-death", "x-last-death", "x-delivery", "x-acquired", "deadsure_")
SHOWN_PROPERTIES = frozenset(
    {"content_type", "content_encoding", "delivery_mode", "priority", "message_id", "timestamp"}
)
COLUMNS = (
    "dead_letter_id",
    "job_id",
    "episode",
    "copy",
    "reason",
    "source",
    "received_at",
    "size",
    "truncated",
    "headers",
    "properties",
    "dismissed_at",
    "dismissed_by",
    "dismissed_reason",
)
SELECT = """
SELECT dead_letter_id, job_id, episode, copy, reason, source, received_at, length(body), truncated, headers, properties,
       dismissed_at, dismissed_by, dismissed_reason
  FROM dead_letters letter
"""
OF_JOB = f"{SELECT} WHERE job_id = %(job_id)s ORDER BY dead_letter_id"
WITHOUT_JOB = f"""
{SELECT} WHERE dismissed_at IS NULL
   AND (job_id IS NULL OR NOT EXISTS (SELECT FROM jobs WHERE jobs.job_id = letter.job_id))
 ORDER BY dead_letter_id LIMIT %(limit)s
"""
ONE = f"{SELECT} WHERE dead_letter_id = %(dead_letter_id)s"
BODY = "SELECT body FROM dead_letters WHERE dead_letter_id = %(dead_letter_id)s"
DISMISS = """
UPDATE dead_letters SET dismissed_at = clock_timestamp(), dismissed_by = %(author)s, dismissed_reason = %(reason)s
 WHERE dead_letter_id = %(dead_letter_id)s AND dismissed_at IS NULL
   AND (job_id IS NULL OR NOT EXISTS (SELECT FROM jobs WHERE jobs.job_id = dead_letters.job_id))
RETURNING 1
"""


def of_job(connection: PgConnection, job_id: UUID) -> list[dict[str, Any]]:
    """The dead letters of a job, oldest first."""
    return [shown(row) for row in rows(connection, OF_JOB, {"job_id": str(job_id)})]


def without_job(connection: PgConnection, limit: int) -> list[dict[str, Any]]:
    """Dead letters that belong to no job and were not dismissed, oldest first."""
    return [shown(row) for row in rows(connection, WITHOUT_JOB, {"limit": limit})]


def letter(connection: PgConnection, dead_letter_id: int) -> dict[str, Any] | None:
    """One dead letter, without its body."""
    row = one(connection, ONE, {"dead_letter_id": dead_letter_id})
    return shown(row) if row else None


def body(connection: PgConnection, dead_letter_id: int) -> bytes | None:
    """The bytes of a dead letter as they came (cut at `app.dead_letters.BODY_LIMIT`)."""
    row = one(connection, BODY, {"dead_letter_id": dead_letter_id})
    return bytes(row[0]) if row else None


def dismiss(connection: PgConnection, dead_letter_id: int, author: str, reason: str) -> bool:
    """Take a dead letter without a job off the worklist; it stays stored. False when there is none to dismiss."""
    values = {"dead_letter_id": dead_letter_id, "author": author, "reason": reason}
    return one(connection, DISMISS, values) is not None


def shown(row: tuple[Any, ...]) -> dict[str, Any]:
    """A dead letter as it may be printed."""
    known = dict(zip(COLUMNS, row, strict=True))
    known["headers"] = {
        name: value if name in SHOWN_HEADERS or name.startswith(SHOWN_PREFIXES) else "(hidden)"
        for name, value in known["headers"].items()
    }
    known["properties"] = {n: v for n, v in known["properties"].items() if n in SHOWN_PROPERTIES and v is not None}
    return known
