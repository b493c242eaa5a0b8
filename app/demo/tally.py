"""Counting one run: from the job rows, the journal, the append-only records of effects, and the files on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from psycopg2.extensions import connection as PgConnection

from db.session import one, rows

RUN = "run AS (SELECT * FROM jobs WHERE scope = %(run)s AND created_at >= %(since)s)"
NOW = "SELECT clock_timestamp()"
PROGRESS = f"""
WITH {RUN}
SELECT count(*) FILTER (WHERE state = 'succeeded'), count(*) FILTER (WHERE state = 'running'),
       count(*) FILTER (WHERE state NOT IN ('succeeded', 'quarantined', 'cancelled'))
  FROM run
"""
STUCK = f"""
WITH {RUN}
SELECT job_id::text, type, state::text, attempt FROM run WHERE state <> 'succeeded' ORDER BY created_at
"""
# A delivery came a second time when the broker says so, when it is a resent copy, or when its job had one before.
BY_TYPE = f"""
WITH {RUN}, effect AS (
    SELECT job_id, count(*) AS times
      FROM (SELECT job_id FROM report_exports UNION ALL SELECT job_id FROM ledger_entries) AS record
      JOIN run USING (job_id) GROUP BY job_id
), delivery AS (
    SELECT job_id, count(*) FILTER (WHERE again) AS again
      FROM (SELECT job_id, coalesce(redelivered, false) OR coalesce(copy, 1) > 1
                   OR row_number() OVER (PARTITION BY job_id ORDER BY at, event_id) > 1 AS again
              FROM job_events JOIN run USING (job_id) WHERE event = 'received') AS received
     GROUP BY job_id
)
SELECT type, count(*) FILTER (WHERE state = 'succeeded'),
       count(*) FILTER (WHERE state = 'succeeded' AND times >= 1),
       coalesce(sum(greatest(times - 1, 0)), 0)::bigint, coalesce(sum(again), 0)::bigint,
       count(*) FILTER (WHERE attempt > 1), sum(crashes)::bigint
  FROM run LEFT JOIN effect USING (job_id) LEFT JOIN delivery USING (job_id)
 GROUP BY type
"""
AFTER_KILL = f"""
WITH {RUN}
SELECT extract(epoch FROM min(at) - %(killed_at)s)::float8, extract(epoch FROM max(at) - %(killed_at)s)::float8
  FROM job_events JOIN run USING (job_id) JOIN workers ON workers.worker_id = job_events.worker_id
 WHERE event = 'succeed' AND workers.started_at > %(killed_at)s
"""
FILES = f"WITH {RUN} SELECT job_id::text, report_exports.sha256 FROM report_exports JOIN run USING (job_id)"
HIT = f"WITH {RUN} SELECT job_id::text FROM run WHERE crashes > 0 ORDER BY type DESC, created_at LIMIT 1"
STORY = """
SELECT extract(epoch FROM at - min(at) OVER ())::float8, event, attempt, copy, workers.pid, reason
  FROM job_events LEFT JOIN workers USING (worker_id) WHERE job_id = %(job_id)s ORDER BY at, event_id
"""


@dataclass(frozen=True)
class Progress:
    """Jobs of the run: succeeded, being worked on, and not at an end yet."""

    succeeded: int
    running: int
    unfinished: int


@dataclass(frozen=True)
class TypeTally:
    """One job type of the run. `lost`: no effect, or no success; `doubled`: effects beyond one per job."""

    type: str
    jobs: int
    succeeded: int
    lost: int
    doubled: int
    redelivered: int
    attempts_over_1: int
    crashes: int


class Tally:
    """Reads one run, told apart from all others by scope and begin."""

    def __init__(self, connection: PgConnection, run: str) -> None:
        self._connection = connection
        self._run = {"run": run, "since": self.now()}

    def now(self) -> datetime:
        """The database's time."""
        row = one(self._connection, NOW)
        assert row is not None
        at: datetime = row[0]
        return at

    def progress(self) -> Progress:
        """Where the run is."""
        return Progress(*self._rows(PROGRESS)[0])

    def stuck(self) -> list[dict[str, Any]]:
        """The jobs that have not succeeded, oldest first."""
        return [dict(zip(("job_id", "type", "state", "attempt"), row, strict=True)) for row in self._rows(STUCK)]

    def by_type(self, submitted: dict[str, int]) -> list[TypeTally]:
        """One tally for each type in `submitted` (jobs by type); a job without a row is lost too."""
        found = {name: counts for name, *counts in self._rows(BY_TYPE)}
        tallies = []
        for name, jobs in submitted.items():
            succeeded, proven, *others = found.get(name, [0] * 6)
            tallies.append(TypeTally(name, jobs, succeeded, jobs - proven, *others))
        return tallies

    def after(self, killed_at: datetime) -> tuple[float | None, float | None]:
        """Seconds from the kill to the first and to the last effect that a later worker committed."""
        first, last = self._rows(AFTER_KILL, killed_at=killed_at)[0]
        return first, last

    def bad_files(self, reports: Path) -> list[str]:
        """Ids of the exports whose file is missing or is not the one that was recorded."""
        return [job_id for job_id, sha256 in self._rows(FILES) if sha256_of(reports / f"{job_id}.csv") != sha256]

    def hit(self) -> str | None:
        """A job that was being worked on when its worker died; None when there is none."""
        found = self._rows(HIT)
        return found[0][0] if found else None

    def story(self, job_id: str) -> Sequence[tuple[Any, ...]]:
        """The job's journal: seconds since its first event, event, attempt, copy, worker's pid, reason."""
        return rows(self._connection, STORY, {"job_id": job_id})

    def _rows(self, sql: str, **values: Any) -> Sequence[tuple[Any, ...]]:
        return rows(self._connection, sql, {**self._run, **values})


def sha256_of(path: Path) -> str | None:
    """Hex digest of a file; None when it is missing."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None
