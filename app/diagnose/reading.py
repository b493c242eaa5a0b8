"""Reads what the database knows of one id, in a few short statements. Writes nothing, locks nothing.

The race: the job is claimed after its row was read and before its debt is, and looks like one that nobody owes a
message. So all of it is read in one snapshot.

Behind a pooler sessions cannot be told apart, so nothing is concluded from them. The row lock of an atomic job at work
is seen from outside: the transaction that locked the row is in `pg_locks`, and its session names the worker.
"""

from __future__ import annotations

from dataclasses import fields
from datetime import datetime
from typing import Any, TypeVar
from uuid import UUID

from psycopg2.extensions import connection as PgConnection

from app.batch_story import CHILD, counts
from app.diagnose.attempts import winner
from app.diagnose.facts import (
    Action,
    Batch,
    Broker,
    Call,
    Debt,
    Entry,
    Event,
    Facts,
    Fleet,
    JobRow,
    Letter,
    Line,
    Owner,
)
from app.settings import Settings
from app.sweep import LOCK_IS_MISSING, SESSION_IS_GONE
from db.session import one, rows

T = TypeVar("T")
EVENTS_LIMIT, LETTERS_LIMIT, AHEAD_LIMIT, BLOCKING = 1000, 20, 100_000, 3
FIND = """
SELECT job_id::text FROM jobs WHERE job_id = %(id)s
UNION ALL
SELECT jobs.job_id::text FROM job_aliases JOIN jobs USING (job_id) WHERE alias_id = %(id)s LIMIT 1
"""
JOB = f"SELECT {', '.join(f.name for f in fields(JobRow))}, clock_timestamp() AS now FROM jobs WHERE job_id = %(id)s"
HELD = """
SELECT coalesce(xact_start, state_change) AS since, substring(application_name FROM 'deadsure job (.+)')::uuid AS worker
  FROM jobs JOIN pg_locks held ON held.locktype = 'transactionid' AND held.granted AND held.transactionid = jobs.xmax
            JOIN pg_stat_activity USING (pid)
 WHERE job_id = %(id)s AND jobs.state = 'queued' AND application_name LIKE 'deadsure job ________-%%'
"""
DEBT = """
SELECT kind, episode, sends, nullif(due_at, 'infinity') AS due_at, sent_at, returned_at, returned_reason, created_at
  FROM outbox WHERE job_id = %(id)s
"""
OWNER = f"""
SELECT worker_id, name, hostname, pid, lease_until, lost_at, lost_cause, stopped_at,
       (SELECT state_change FROM pg_locks held JOIN pg_stat_activity USING (pid)
         WHERE held.locktype = 'advisory' AND held.granted AND held.objsubid = 1 AND NOT pooled
           AND (held.classid::bigint << 32) | held.objid::bigint = workers.lock_key) AS renewed_at,
       CASE WHEN {SESSION_IS_GONE} THEN false WHEN NOT pooled AND NOT {LOCK_IS_MISSING} THEN true END AS session
  FROM workers WHERE worker_id = %(worker)s
"""
EVENTS = f"""
SELECT {", ".join(f.name for f in fields(Event))} FROM job_events WHERE job_id = %(id)s
 ORDER BY event_id DESC LIMIT %(events)s
"""
EFFECTS = f"SELECT {', '.join(f.name for f in fields(Call))} FROM effects WHERE job_id = %(id)s ORDER BY started_at"
ENTRIES = f"SELECT {', '.join(f.name for f in fields(Entry))} FROM quarantine_entries WHERE job_id = %(id)s ORDER BY 1"
ACTIONS = f"""
SELECT {", ".join(f.name for f in fields(Action))} FROM quarantine_actions WHERE job_id = %(id)s ORDER BY action_id
"""
LETTERS = f"""
SELECT {", ".join(f.name for f in fields(Letter))} FROM dead_letters
 WHERE job_id = %(id)s ORDER BY dead_letter_id DESC LIMIT %(letters)s
"""
# Without an index, so only for an id that names no job.
FOREIGN_LETTERS = f"""
SELECT {", ".join(f.name for f in fields(Letter))} FROM dead_letters
 WHERE job_id = %(id)s OR headers ->> 'id' = %(id)s ORDER BY dead_letter_id DESC LIMIT %(letters)s
"""
BATCH = """
SELECT batch_id, coordinator_id, exhausted, finished_at, cancelled_at FROM batches
 WHERE batch_id = %(batch)s OR coordinator_id = %(id)s ORDER BY coordinator_id = %(id)s DESC LIMIT 1
"""
BLOCKED = f"""
SELECT job_id::text FROM ({CHILD.format(states="('quarantined')")}) AS child ORDER BY changed_at LIMIT %(blocking)s
"""
LIVE = f"""
FROM workers WHERE stopped_at IS NULL AND lost_at IS NULL AND lease_until > clock_timestamp()
                   AND NOT ({SESSION_IS_GONE})
"""
CONSUMES = "(queues IS NULL OR queues @> to_jsonb(%(queue)s::text))"
FLEET = f"""
SELECT (SELECT count(*) {LIVE}), (SELECT count(*) {LIVE} AND pooled), (SELECT count(*) {LIVE} AND {CONSUMES}),
       (SELECT count(*) {LIVE} AND {CONSUMES} AND knows @> to_jsonb(%(versioned)s::text)),
       ARRAY(SELECT DISTINCT known FROM (SELECT jsonb_array_elements_text(knows) AS known {LIVE}) AS all_known
              WHERE split_part(known, '@', 1) = split_part(%(versioned)s, '@', 1) ORDER BY known)
"""
SESSIONS = """
SELECT split_part(application_name, ' ', 2), count(*),
       count(*) FILTER (WHERE state = 'active' OR state_change > clock_timestamp() - make_interval(secs => %(fresh_s)s))
  FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'deadsure %%' GROUP BY 1
"""
LINE = """
SELECT (SELECT count(*) FROM (
           SELECT FROM outbox other, outbox mine
            WHERE mine.job_id = %(id)s AND other.queue = mine.queue AND other.sends = 0
              AND other.due_at <= clock_timestamp()
              AND (other.priority > mine.priority OR other.priority = mine.priority AND other.due_at < mine.due_at)
            LIMIT %(ahead)s) AS before),
       (SELECT count(*) FROM outbox WHERE queue = %(queue)s AND sends > 0 AND due_at < 'infinity' AND kind = 'wake'),
       (SELECT count(*) FROM jobs WHERE state = 'running' AND queue = %(queue)s)
"""
TOMBSTONE = "SELECT type, state, result_key, pruned_at FROM job_tombstones WHERE job_id = %(id)s"
NAMES = """
SELECT 'batch' FROM batches WHERE batch_id = %(id)s UNION ALL SELECT 'worker' FROM workers WHERE worker_id = %(id)s
"""
NOW = "SELECT clock_timestamp()"
SNAPSHOT = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"


def read(connection: PgConnection, asked: UUID, settings: Settings, broker: Broker | None = None) -> Facts:
    """Everything that the database knows of `asked`: a job, an alias of one, or what else it may be."""
    rows(connection, SNAPSHOT)
    try:
        found = one(connection, FIND, {"id": str(asked)})
        if found is None:
            return of_other(connection, asked, settings)
        return of_job(connection, asked, UUID(found[0]), settings, broker)
    finally:
        if not connection.closed:
            rows(connection, "ROLLBACK")


def of_job(connection: PgConnection, asked: UUID, job_id: UUID, settings: Settings, broker: Broker | None) -> Facts:
    """The facts of a job."""
    values: dict[str, Any] = {
        "id": str(job_id),
        "events": EVENTS_LIMIT,
        "letters": LETTERS_LIMIT,
        "ahead": AHEAD_LIMIT,
    }
    row = record(connection, JOB, values)
    assert row is not None  # found in this snapshot
    now: datetime = row.pop("now")
    job = JobRow(**ids(row))
    held = record(connection, HELD, values)
    events = tuple(reversed(records(connection, EVENTS, values, Event)))
    end = winner(events)
    owner_id = job.worker_id or (held and held["worker"]) or (end.worker_id if end else None)
    owner = record(connection, OWNER, {"worker": str(owner_id)}) if owner_id else None
    line = one(connection, LINE, {**values, "queue": job.queue})
    debts = records(connection, DEBT, values, Debt)
    return Facts(
        asked=asked,
        now=now,
        settings=settings,
        fleet=fleet(connection, job.versioned, job.queue, settings),
        job=job,
        debt=debts[0] if debts else None,
        owner=Owner(**ids(owner)) if owner else None,
        held_since=held["since"] if held else None,
        events=events,
        older_events=len(events) == EVENTS_LIMIT,
        effects=tuple(records(connection, EFFECTS, values, Call)),
        entries=tuple(records(connection, ENTRIES, values, Entry)),
        actions=tuple(records(connection, ACTIONS, values, Action)),
        letters=tuple(reversed(records(connection, LETTERS, values, Letter))),
        batch=batch(connection, job),
        line=Line(*line) if line else Line(0, 0, 0),
        broker=broker,
    )


def of_other(connection: PgConnection, asked: UUID, settings: Settings) -> Facts:
    """The facts about an id that is no job's."""
    values = {"id": str(asked), "events": EVENTS_LIMIT, "letters": LETTERS_LIMIT}
    now, names = one(connection, NOW), one(connection, NAMES, values)
    assert now is not None
    return Facts(
        asked=asked,
        now=now[0],
        settings=settings,
        fleet=fleet(connection, "", "", settings),
        events=tuple(reversed(records(connection, EVENTS, values, Event))),
        letters=tuple(reversed(records(connection, FOREIGN_LETTERS, values, Letter))),
        tombstone=record(connection, TOMBSTONE, values),
        names=names[0] if names else None,
    )


def queue_of(connection: PgConnection, asked: UUID) -> str | None:
    """The queue to ask the broker about; None when there is no such job."""
    found = one(connection, FIND, {"id": str(asked)})
    row = one(connection, "SELECT queue FROM jobs WHERE job_id = %(id)s", {"id": found[0]}) if found else None
    return row[0] if row else None


def fleet(connection: PgConnection, versioned: str, queue: str, settings: Settings) -> Fleet:
    """Who is alive; a session that has not looked for a while (a frozen process) does not count as looking."""
    counted = one(connection, FLEET, {"versioned": versioned, "queue": queue})
    assert counted is not None
    live, pooled, consuming, knowing, versions = counted
    fresh_s = 3 * max(settings.poll_s, settings.sweep_s) + 2
    seen = {name: (count, fresh) for name, count, fresh in rows(connection, SESSIONS, {"fresh_s": fresh_s})}
    # A role without pg_read_all_stats does not see other roles' sessions: then live workers seem to have no keeper.
    visible = not pooled and not settings.pooled and (not live or "keeper" in seen)
    return Fleet(
        live=live,
        consuming=consuming,
        knowing=knowing,
        versions=tuple(versions),
        relays=seen.get("relay", (0, 0)) if visible else None,
        sweepers=seen.get("sweeper", (0, 0)) if visible else None,
        busy=seen.get("job", (0, 0))[1] if visible else None,
    )


def batch(connection: PgConnection, job: JobRow) -> Batch | None:
    """The job's batch, its own or the one that it coordinates, with its children counted."""
    row = record(connection, BATCH, {"id": str(job.job_id), "batch": str(job.batch_id) if job.batch_id else None})
    batch_id = UUID(str(row["batch_id"])) if row else job.batch_id
    if batch_id is None:
        return None
    values = {"batch_id": str(batch_id), "blocking": BLOCKING}
    blocked = tuple(UUID(found[0]) for found in rows(connection, BLOCKED, values))
    gone = {"coordinator_id": batch_id, "exhausted": True, "finished_at": None, "cancelled_at": None}
    return Batch(
        **{**(ids(row) if row else gone), "batch_id": batch_id},
        states=dict(counts(connection, batch_id)),
        blocking=blocked,
    )


def record(connection: PgConnection, sql: str, values: dict[str, Any]) -> dict[str, Any] | None:
    """The first row with the names of its columns."""
    found = named(connection, sql, values)
    return found[0] if found else None


def records(connection: PgConnection, sql: str, values: dict[str, Any], kind: type[T]) -> list[T]:
    """Rows as objects of `kind`, whose fields are the columns."""
    return [kind(**ids(row)) for row in named(connection, sql, values)]


def named(connection: PgConnection, sql: str, values: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows with the names of their columns."""
    with connection.cursor() as cursor:
        cursor.execute(sql, values)
        columns = [column.name for column in cursor.description or ()]
        return [dict(zip(columns, row, strict=True)) for row in cursor.fetchall()]


def ids(row: dict[str, Any]) -> dict[str, Any]:
    """The driver gives ids as text."""
    return {
        name: UUID(value) if isinstance(value, str) and name.endswith("_id") else value for name, value in row.items()
    }
