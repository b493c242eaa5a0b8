"""Reading the worklist: groups, entries, one entry whole, messages that nobody could read. Writes nothing but notes.

A payload leaves here redacted by its job type's model, of results only whether there is one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from psycopg2.extensions import connection as PgConnection

from app.job_types import REGISTRY
from app.letters import of_job
from app.redaction import redact
from app.story import show as story
from db.session import one, rows

PAGE = 500
FILTER = """
    entry.closed_at IS NULL
    AND (%(fingerprint)s::text IS NULL OR entry.fingerprint = %(fingerprint)s)
    AND (%(type)s::text IS NULL OR type = %(type)s)
    AND (%(cause)s::text IS NULL OR entry.cause = %(cause)s)
    AND (%(scope)s::text IS NULL OR scope = %(scope)s)
    AND (%(older_s)s::float8 IS NULL OR quarantined_at <= clock_timestamp() - make_interval(secs => %(older_s)s))
    AND (%(newer_s)s::float8 IS NULL OR quarantined_at > clock_timestamp() - make_interval(secs => %(newer_s)s))
"""
OPEN = "quarantine_entries entry JOIN jobs ON jobs.job_id = entry.job_id AND jobs.episode = entry.episode"
GROUP_COLUMNS = (
    "fingerprint",
    "count",
    "first_seen",
    "last_seen",
    "types",
    "causes",
    "sample_job_id",
    "sample_reason",
    "missing_traces",
)
GROUPS = f"""
SELECT fingerprint, count(*), min(quarantined_at), max(quarantined_at), array_agg(DISTINCT type),
       array_agg(DISTINCT entry.cause), (array_agg(entry.job_id::text ORDER BY quarantined_at, entry.job_id))[1],
       (array_agg(entry.reason ORDER BY quarantined_at, entry.job_id))[1],
       count(*) FILTER (WHERE dead_lettered_at IS NULL)
  FROM {OPEN} WHERE {FILTER}
 GROUP BY fingerprint ORDER BY count(*) DESC, max(quarantined_at) DESC, fingerprint LIMIT %(limit)s
"""
ENTRY_COLUMNS = (
    "job_id",
    "type",
    "scope",
    "cause",
    "fingerprint",
    "reason",
    "attempt",
    "episode",
    "quarantined_at",
    "dead_lettered_at",
)
ENTRIES = f"""
SELECT entry.job_id::text, type, scope, entry.cause, fingerprint, entry.reason, entry.attempt, entry.episode,
       quarantined_at, dead_lettered_at
  FROM {OPEN} WHERE {FILTER}
 ORDER BY quarantined_at, entry.job_id LIMIT %(limit)s
"""
EXPORT_COLUMNS = (
    *ENTRY_COLUMNS,
    "schema_version",
    "failures",
    "crashes",
    "stalls",
    "created_at",
    "traceback",
    "payload",
)
EXPORT = f"""
SELECT entry.job_id::text, type, scope, entry.cause, fingerprint, entry.reason, entry.attempt, entry.episode,
       quarantined_at, dead_lettered_at, schema_version, failures, crashes, stalls, created_at, traceback, payload
  FROM {OPEN} WHERE {FILTER}
   AND (%(after_at)s::timestamptz IS NULL OR (quarantined_at, entry.job_id) > (%(after_at)s, %(after_id)s::uuid))
 ORDER BY quarantined_at, entry.job_id LIMIT %(limit)s
"""
CHOSEN = """
SELECT job_id, episode, state::text FROM jobs WHERE job_id = ANY (%(job_ids)s::uuid[])
"""
PAYLOAD = "SELECT payload FROM jobs WHERE job_id = %(job_id)s"
HISTORY_COLUMNS = (
    "episode",
    "cause",
    "fingerprint",
    "reason",
    "attempt",
    "quarantined_at",
    "dead_lettered_at",
    "closed_at",
    "traceback",
)
HISTORY = f"SELECT {', '.join(HISTORY_COLUMNS)} FROM quarantine_entries WHERE job_id = %(job_id)s ORDER BY episode"
ACTION_COLUMNS = ("at", "episode", "action", "author", "reason", "run_id", "accepted", "old_payload", "new_payload")
ACTIONS = f"SELECT {', '.join(ACTION_COLUMNS)} FROM quarantine_actions WHERE job_id = %(job_id)s ORDER BY action_id"
EFFECT_COLUMNS = ("name", "status", "attempt", "idempotency_key", "has_result", "started_at", "finished_at")
EFFECTS = """
SELECT name, status, attempt, idempotency_key, result IS NOT NULL, started_at, finished_at
  FROM effects WHERE job_id = %(job_id)s ORDER BY started_at, name
"""
ADD_NOTE = """
INSERT INTO quarantine_actions (job_id, episode, action, author, reason)
SELECT job_id, episode, 'note', %(author)s, %(text)s FROM jobs WHERE job_id = %(job_id)s AND episode > 0
RETURNING episode
"""
ENDS = ("succeed", "retry", "quarantine", "expire", "release")


@dataclass(frozen=True)
class Filters:
    """Which open entries; None is any. Ages in seconds since the quarantine."""

    fingerprint: str | None = None
    job_type: str | None = None
    cause: str | None = None
    scope: str | None = None
    older_s: float | None = None
    newer_s: float | None = None

    def values(self) -> dict[str, Any]:
        """As parameters of a query."""
        return {
            "fingerprint": self.fingerprint,
            "type": self.job_type,
            "cause": self.cause,
            "scope": self.scope,
            "older_s": self.older_s,
            "newer_s": self.newer_s,
        }


def named(columns: Sequence[str], found: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    """Rows as dictionaries."""
    return [dict(zip(columns, row, strict=True)) for row in found]


def groups(connection: PgConnection, filters: Filters, limit: int) -> list[dict[str, Any]]:
    """Open entries by fingerprint, the largest group first; the sample is its oldest job."""
    return named(GROUP_COLUMNS, rows(connection, GROUPS, {**filters.values(), "limit": limit}))


def entries(connection: PgConnection, filters: Filters, limit: int | None) -> list[dict[str, Any]]:
    """Open entries, oldest first."""
    return named(ENTRY_COLUMNS, rows(connection, ENTRIES, {**filters.values(), "limit": limit}))


def export(connection: PgConnection, filters: Filters, limit: int | None) -> Iterator[dict[str, Any]]:
    """Open entries with traceback and redacted payload, oldest first, read in pages."""
    values: dict[str, Any] = {**filters.values(), "after_at": None, "after_id": None}
    left = limit
    while left is None or left > 0:
        page = named(EXPORT_COLUMNS, rows(connection, EXPORT, {**values, "limit": min(PAGE, left or PAGE)}))
        for entry in page:
            entry["payload"] = shown(entry["type"], entry["schema_version"], entry["payload"])
            yield entry
        if len(page) < PAGE:
            return
        left = None if left is None else left - len(page)
        values |= {"after_at": page[-1]["quarantined_at"], "after_id": page[-1]["job_id"]}


def chosen(connection: PgConnection, job_ids: Sequence[UUID]) -> dict[UUID, tuple[int, str]]:
    """(episode, state) of the jobs that there are."""
    found = rows(connection, CHOSEN, {"job_ids": [str(job_id) for job_id in job_ids]})
    return {UUID(str(job_id)): (episode, state) for job_id, episode, state in found}


def show(connection: PgConnection, job_id: UUID) -> dict[str, Any] | None:
    """All that is known of a job that is or was in quarantine; None when there is no such job."""
    found = story(connection, job_id)
    row = one(connection, PAYLOAD, {"job_id": str(job_id)})
    if found is None or row is None:
        return None
    values = {"job_id": str(job_id)}
    kind = found["type"], found["schema_version"]
    actions = named(ACTION_COLUMNS, rows(connection, ACTIONS, values))
    for action in actions:
        for name in ("old_payload", "new_payload"):
            action[name] = None if action[name] is None else shown(*kind, action[name])
    journal = found.pop("journal")
    return {
        **found,
        "payload": shown(*kind, row[0]),
        "entries": named(HISTORY_COLUMNS, rows(connection, HISTORY, values)),
        "attempts": attempts(journal),
        "effects": named(EFFECT_COLUMNS, rows(connection, EFFECTS, values)),
        "actions": actions,
        "dead_letters": of_job(connection, job_id),
        "journal": journal,
    }


def shown(job_type: str, version: int, payload: Any) -> Any:
    """A payload as it may be printed."""
    known = REGISTRY.get((job_type, version))
    return redact(known.payload if known else None, payload)


def attempts(journal: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line for each attempt: when it was claimed and by whom, how it ended and why."""
    found: dict[int, dict[str, Any]] = {}
    for event in journal:
        number, word = event["attempt"], event["event"]
        if number is None:
            continue
        if word == "claim":
            found[number] = {"attempt": number, "claimed_at": event["at"], "worker_id": event["worker_id"]}
            found[number] |= {"ended": None, "ended_at": None, "reason": None}
        elif word in ENDS and number in found:
            found[number] |= {"ended": word, "ended_at": event["at"], "reason": event["reason"]}
    return [found[number] for number in sorted(found)]


def note(connection: PgConnection, job_id: UUID, author: str, text: str) -> bool:
    """Add a note to the job's newest quarantine; False when it never was in one."""
    return one(connection, ADD_NOTE, {"job_id": str(job_id), "author": author, "text": text}) is not None
