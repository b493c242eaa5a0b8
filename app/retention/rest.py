"""What else grows old: dead letters of ended jobs, replay runs, workers that are gone, tombstones, orphaned journal.

A dead letter that belongs to no job is somebody's lost work: it stays until a person has dismissed it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID, uuid4

from psycopg2.extensions import connection as PgConnection

from app.retention.jobs import given
from app.retention.policy import Retention
from db.session import one, rows


@dataclass(frozen=True)
class Kind:
    """One kind of old rows: `found` is what can go, `key` the column that names a row of `table`."""

    name: str
    table: str
    key: str
    found: str

    @property
    def count(self) -> str:
        """How many rows can go."""
        return f"SELECT count(*) FROM {self.table} old WHERE {self.found}"

    @property
    def delete(self) -> str:
        """Delete a page of them; one row for each that is gone."""
        return f"""
        DELETE FROM {self.table} WHERE {self.key} = ANY (ARRAY(
            SELECT {self.key} FROM {self.table} old WHERE {self.found} LIMIT %(page)s FOR UPDATE SKIP LOCKED))
        RETURNING 1
        """


KINDS = (
    Kind(
        "dead_letters",
        "dead_letters",
        "dead_letter_id",
        "received_at < %(now)s - make_interval(secs => %(dead_letters_s)s) AND ("
        " dismissed_at < %(now)s - make_interval(secs => %(dead_letters_s)s)"
        " OR EXISTS (SELECT FROM jobs WHERE jobs.job_id = old.job_id AND state IN ('succeeded', 'cancelled'))"
        " OR EXISTS (SELECT FROM job_tombstones stone WHERE stone.job_id = old.job_id))",
    ),
    Kind(
        "replay_runs",
        "replay_runs",
        "run_id",
        "created_at < %(now)s - make_interval(secs => %(replay_runs_s)s)",
    ),
    Kind(
        "batches",
        "batches",
        "batch_id",
        "created_at < %(now)s - make_interval(secs => %(batches_s)s)"
        " AND coalesce(finished_at, cancelled_at) < %(now)s - make_interval(secs => %(batches_s)s)"
        " AND NOT EXISTS (SELECT FROM jobs WHERE jobs.batch_id = old.batch_id)",
    ),
    Kind(
        "workers",
        "workers",
        "worker_id",
        "coalesce(stopped_at, lost_at) < %(now)s - make_interval(secs => %(workers_s)s)"
        " AND NOT EXISTS (SELECT FROM jobs WHERE state = 'running' AND jobs.worker_id = old.worker_id)",
    ),
    Kind(
        "tombstones",
        "job_tombstones",
        "job_id",
        "(NOT keyed AND pruned_at < %(now)s - make_interval(secs => %(keyless_s)s)"
        " OR keyed AND pruned_at < %(now)s - make_interval(secs => %(tombstones_s)s))",
    ),
)
# A journal has an index by job alone, so its jobs are walked from one to the next; each step is one probe.
ORPHANS = """
WITH RECURSIVE step (job_id) AS (
    (SELECT job_id FROM job_events WHERE job_id > %(after)s::uuid ORDER BY job_id LIMIT 1)
    UNION ALL
    SELECT (SELECT later.job_id FROM job_events later WHERE later.job_id > step.job_id ORDER BY later.job_id LIMIT 1)
      FROM step WHERE step.job_id IS NOT NULL
), page AS MATERIALIZED (
    SELECT job_id FROM step WHERE job_id IS NOT NULL LIMIT %(page)s
)
SELECT job_id::text, NOT EXISTS (SELECT FROM jobs WHERE jobs.job_id = page.job_id) AND NOT EXISTS (
           SELECT FROM job_events event WHERE event.job_id = page.job_id
              AND coalesce(at >= %(now)s - make_interval(secs => %(journal_s)s), true))
  FROM page ORDER BY job_id
"""
# Since they were found, a key whose tombstone is gone may have been submitted anew.
FORGET = """
DELETE FROM job_events WHERE job_id = ANY(%(ids)s::uuid[])
   AND NOT EXISTS (SELECT FROM jobs WHERE jobs.job_id = job_events.job_id)
RETURNING 1
"""
SMALLEST = str(UUID(int=0))


def count(connection: PgConnection, kind: Kind, retention: Retention, now: datetime) -> int:
    """How many rows of a kind can go."""
    row = one(connection, kind.count, given(retention, now))
    return int(row[0]) if row else 0


def delete(connection: PgConnection, kind: Kind, retention: Retention, now: datetime, size: int) -> int:
    """Delete up to `size` rows of a kind in one transaction; how many."""
    return len(rows(connection, kind.delete, {**given(retention, now), "page": size}))


@dataclass
class JournalWalk:
    """A walk round all jobs that the journal knows. It begins anywhere, so that short walks reach all in time."""

    begin: str
    after: str
    round_the_end: bool = False

    @classmethod
    def anywhere(cls) -> JournalWalk:
        """From a place of its own."""
        place = str(uuid4())
        return cls(place, place)

    def orphans(self, connection: PgConnection, retention: Retention, now: datetime, size: int) -> list[str] | None:
        """The ids without a job, all events old, among the next `size` ids; None when the walk is done."""
        if self.round_the_end and self.after >= self.begin:
            return None
        found = rows(connection, ORPHANS, {**given(retention, now), "after": self.after, "page": size})
        if found:
            self.after = found[-1][0]
        elif self.round_the_end:
            return None
        else:
            self.round_the_end, self.after = True, SMALLEST
        return [job_id for job_id, orphaned in found if orphaned]


def forget(connection: PgConnection, ids: list[str]) -> int:
    """Delete the journal of these ids; how many events."""
    return len(rows(connection, FORGET, {"ids": ids}))
