"""Periodic jobs: one job for each entry of the schedule and tick, however many beats run at once.

The race: two beats see the same tick, or one dies between submitting the job and writing down that it did. So the jobs
and the step of `last_tick` are one message and one transaction, which begins with a compare-and-set of `last_tick`:
the loser finds another value there and writes nothing; a crash leaves both or none; a beat that is frozen in between
holds no lock. Behind that stands the key (entry, tick): a tick that comes twice, because the clock went back or a row
was lost, gives the same job.

Time is the database's. Not promised: that a job starts at its tick. A late one says so by the tick in its payload.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, tzinfo
from enum import StrEnum
from itertools import islice
from typing import Any

import psycopg2
from psycopg2.errors import DivisionByZero
from psycopg2.extensions import connection as PgConnection

from app.job_types import JobType
from app.submit import BULK_ROWS, CHANNEL, INSERT, TAKEN, NewJob, parameters, prepare
from app.ticks import Ticks
from db.session import one, rows

ON_TIME = timedelta(seconds=60)  # `skip` still submits a tick that is this late: beat was restarted, not away
MOST = BULK_ROWS  # `all` submits at most so many missed ticks of an entry, the newest
LOOK = """
WITH entry AS (
    SELECT name, schedule FROM unnest(%(names)s::text[], %(schedules)s::text[]) AS entry (name, schedule)
), new AS (
    INSERT INTO periodic_ticks (name, schedule, last_tick)
    SELECT name, schedule, clock_timestamp() FROM entry
     WHERE NOT EXISTS (SELECT FROM periodic_ticks known
                        WHERE known.name = entry.name AND known.schedule = entry.schedule)
    ON CONFLICT DO NOTHING
    RETURNING name, schedule, last_tick
)
SELECT name, schedule, last_tick, clock_timestamp() FROM periodic_ticks JOIN entry USING (name, schedule)
UNION ALL
SELECT name, schedule, last_tick, clock_timestamp() FROM new
"""
MOVE = """
WITH moved AS (
    UPDATE periodic_ticks SET last_tick = %(reach)s, changed_at = clock_timestamp()
     WHERE name = %(name)s AND schedule = %(schedule)s AND last_tick = %(seen)s
    RETURNING 1
)
SELECT 1 / count(*) FROM moved
"""
SUBMIT = f"""
BEGIN;
{MOVE};
{TAKEN};
{INSERT} SELECT set_config('deadsure.created', (SELECT count(*) FROM job)::text, false);
COMMIT;
SELECT current_setting('deadsure.created'), pg_notify('{CHANNEL}', '')
"""


class CatchUp(StrEnum):
    """What becomes of ticks that nobody submitted in time."""

    SKIP = "skip"
    LAST = "last"
    ALL = "all"


@dataclass(frozen=True)
class FromTick:
    """A payload field that the tick fills in: `function(tick)`, the tick in the time zone of its entry."""

    function: Callable[[datetime], Any]


@dataclass(frozen=True)
class Entry:
    """One entry of the schedule. `fields` is the payload, with `FromTick` where the tick fills it in.

    `key(tick)` replaces the natural key: for a job type whose key other submitters use too. `terms` go to the submit:
    scope, priority, countdown_s, expires.
    """

    name: str
    job_type: JobType
    ticks: Ticks
    zone: tzinfo = UTC
    catch_up: CatchUp = CatchUp.LAST
    fields: Mapping[str, Any] = field(default_factory=dict)
    terms: Mapping[str, Any] = field(default_factory=dict)
    key: Callable[[datetime], str] | None = None

    @property
    def schedule(self) -> str:
        """What `last_tick` belongs to: a changed schedule is a new one, and its first tick is to come."""
        return str(self.ticks)

    def job(self, tick: datetime) -> NewJob:
        """The job of a tick; raises what the payload's model, its functions and `prepare` raise."""
        local = tick.astimezone(self.zone)
        payload = {
            name: value.function(local) if isinstance(value, FromTick) else value for name, value in self.fields.items()
        }
        key = self.key(local) if self.key else f"{self.name} {tick.astimezone(UTC).isoformat()}"
        return prepare(self.job_type, self.job_type.parse(payload), idempotency_key=key, **self.terms)


@dataclass(frozen=True)
class Due:
    """What is to be done about one entry: the ticks to submit, oldest first, and how far that brings it."""

    ticks: tuple[datetime, ...]
    reach: datetime
    left_out: bool


@dataclass(frozen=True)
class Seen:
    """The last tick of each entry, by name and schedule, and the database's time."""

    last: Mapping[tuple[str, str], datetime]
    now: datetime


def look(connection: PgConnection, entries: Sequence[Entry]) -> Seen:
    """How far each entry is. An entry or schedule seen for the first time begins now: no tick of it is in the past."""
    values = {"names": [entry.name for entry in entries], "schedules": [entry.schedule for entry in entries]}
    found = rows(connection, LOOK, values)
    now = max((row[3] for row in found), default=datetime.now(UTC))
    return Seen({(name, schedule): last for name, schedule, last, _ in found}, now)


def due(entry: Entry, last: datetime, now: datetime) -> Due | None:
    """What the entry's policy makes of the ticks since `last`; None when there is none.

    A `last` in the future is a clock that went back: the entry begins anew now, and the key keeps a tick from being
    submitted twice.
    """
    if last > now:
        return Due((), now, left_out=True)
    missed = entry.ticks.between(last, now)
    newest = list(islice(missed, MOST if entry.catch_up is CatchUp.ALL else 1))
    if not newest:
        return None
    left_out = next(missed, None) is not None
    if entry.catch_up is CatchUp.SKIP and now - newest[0] > ON_TIME:
        return Due((), newest[0], left_out=True)
    return Due(tuple(reversed(newest)), newest[0], left_out)


def submit_due(connection: PgConnection, entry: Entry, seen: datetime, what: Due) -> int | None:
    """Submit the jobs of the ticks and move `last_tick`, in one transaction; how many jobs are new.

    None when another beat was first: nothing was written. Raises what a payload that cannot be made raises, before
    anything is written, and psycopg2.Error.
    """
    jobs = [entry.job(tick) for tick in what.ticks]
    step = {"name": entry.name, "schedule": entry.schedule, "seen": seen, "reach": what.reach}
    try:
        if not jobs:
            rows(connection, MOVE, step)
            return 0
        row = one(connection, SUBMIT, {**step, **parameters(jobs)})
    except DivisionByZero:
        rows(connection, "ROLLBACK")
        return None
    except psycopg2.Error:
        if not connection.closed:
            rows(connection, "ROLLBACK")
        raise
    return int(row[0]) if row else 0
