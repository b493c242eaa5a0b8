"""The second trace: what came back through the dead-letter exchange is stored, and stamps its episode.

A dead letter pays the trace debt of the episode that its message belonged to, and of no other: an old one that arrives
late must not stamp a newer quarantine (H10). One of a healthy job (a broker's delivery limit) changes no state; it only
makes the job's debt due, so that the message which the broker gave up is sent again.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from psycopg2 import Binary
from psycopg2.extensions import connection as PgConnection

from db.session import one

BODY_LIMIT = 256 * 1024
TEXT_LIMIT, DEPTH_LIMIT, ITEMS_LIMIT = 2000, 8, 100
STORE = """
WITH letter AS (
    INSERT INTO dead_letters (job_id, episode, copy, headers, properties, body, truncated, digest, reason, source)
    VALUES (%(job_id)s::uuid, %(episode)s::smallint, %(copy)s::bigint, %(headers)s::jsonb, %(properties)s::jsonb,
            %(body)s, %(truncated)s, %(digest)s, %(reason)s, %(source)s)
    ON CONFLICT DO NOTHING
), stamped AS (
    UPDATE quarantine_entries entry SET dead_lettered_at = clock_timestamp()
      FROM jobs
     WHERE entry.job_id = %(job_id)s::uuid AND entry.episode = %(episode)s::smallint AND dead_lettered_at IS NULL
       AND jobs.job_id = entry.job_id AND jobs.state = 'quarantined' AND jobs.episode = entry.episode
    RETURNING entry.job_id
), paid AS (
    DELETE FROM outbox USING stamped
     WHERE outbox.job_id = stamped.job_id AND kind = 'trace' AND outbox.episode = %(episode)s::smallint
), again AS (
    UPDATE outbox SET due_at = least(due_at, greatest(clock_timestamp(),
                                     sent_at + make_interval(secs => %(age_s)s * 2.0 ^ least(sends - 1, 30))))
      FROM jobs
     WHERE outbox.job_id = %(job_id)s::uuid AND kind = 'wake' AND sends > 0 AND outbox.episode = %(episode)s::smallint
       AND jobs.job_id = outbox.job_id AND jobs.state IN ('queued', 'retry_wait')
    RETURNING outbox.job_id
), journal AS (
    INSERT INTO job_events (job_id, event, copy, reason)
    SELECT job_id, 'dead_lettered', %(copy)s::bigint, %(source)s FROM stamped
    UNION ALL
    SELECT job_id, 'dead_lettered', %(copy)s::bigint, 'given up by the broker; the debt is due again' FROM again
)
SELECT (SELECT count(*) FROM stamped), (SELECT count(*) FROM again)
"""


@dataclass(frozen=True)
class DeadLetter:
    """One message from the quarantine queue; `job_id`, `episode`, `copy` are None for a foreign or unreadable one."""

    job_id: UUID | None
    episode: int | None
    copy: int | None
    headers: Any
    properties: Any
    body: bytes
    reason: str
    source: str = "broker"


def store(connection: PgConnection, letter: DeadLetter, age_s: float) -> tuple[bool, bool]:
    """Keep the dead letter; (it stamped its episode, it made a healthy job's debt due). A repeat changes nothing.

    The debt falls due at `age_s`, doubling with each send: a job whose every message is rejected must not run hot.
    """
    headers, properties = json.dumps(storable(letter.headers)), json.dumps(storable(letter.properties))
    # A job's letter is known by episode and copy; any other by all of it, the broker's time of death included.
    digest = hashlib.sha256(b"\0".join((headers.encode(), properties.encode(), letter.body))).digest()
    row = one(
        connection,
        STORE,
        {
            "job_id": str(letter.job_id) if letter.job_id else None,
            "episode": letter.episode,
            "copy": letter.copy,
            "headers": headers,
            "properties": properties,
            "digest": None if None not in (letter.job_id, letter.episode, letter.copy) else Binary(digest),
            "age_s": age_s,
            "body": Binary(letter.body[:BODY_LIMIT]),
            "truncated": len(letter.body) > BODY_LIMIT,
            "reason": letter.reason,
            "source": letter.source,
        },
    )
    return (bool(row[0]), bool(row[1])) if row else (False, False)


UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


def storable(value: Any, depth: int = 0) -> Any:
    """Headers as JSONB can hold them: bounded in depth, length and number, other types as text; each cut is marked."""
    if depth > DEPTH_LIMIT:
        return "…"
    if isinstance(value, dict):
        entries = list(value.items())[:ITEMS_LIMIT]
        kept = {storable(str(name)): storable(entry, depth + 1) for name, entry in entries}
        return {**kept, "…": f"{len(value) - ITEMS_LIMIT} more"} if len(value) > ITEMS_LIMIT else kept
    if isinstance(value, list | tuple):
        listed = [storable(entry, depth + 1) for entry in value[:ITEMS_LIMIT]]
        return [*listed, f"… {len(value) - ITEMS_LIMIT} more"] if len(value) > ITEMS_LIMIT else listed
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and abs(value) < 1 << 63:
        return value
    text = str(value)
    rest = f"… {len(text) - TEXT_LIMIT} more characters" if len(text) > TEXT_LIMIT else ""
    return UNSTORABLE.sub("\ufffd", text[:TEXT_LIMIT]) + rest
