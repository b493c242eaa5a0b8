"""How far a running job is: the newest numbers of this process' jobs, written at most once a second.

Promise: a report costs its handler a few microseconds; it never waits for the database and never fails the job. The
row is changed only under the attempt's fence, and not at all while somebody holds it.
Not promised: that every report, or the last one before the end, is written.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from uuid import UUID

import psycopg2
from psycopg2.extensions import connection as PgConnection

from app.clock import pause_s
from db.session import connect, rows

GAP_S = 1.0
IDLE_S = 30.0  # without a report for so long, thread and session end
BIGGEST = 2**63 - 1
WRITE = """
WITH mine AS (
    SELECT job_id FROM jobs
     WHERE job_id = %(job_id)s AND state = 'running' AND attempt = %(attempt)s AND worker_id = %(worker_id)s
       FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE jobs SET progress_done = %(done)s, progress_total = %(total)s
  FROM mine
 WHERE jobs.job_id = mine.job_id AND state = 'running' AND attempt = %(attempt)s AND worker_id = %(worker_id)s
"""


@dataclass(frozen=True, slots=True)
class Report:
    """What one attempt says: `done` of `total`; `total` is None when nobody knows it."""

    job_id: UUID
    attempt: int
    worker_id: UUID
    done: int
    total: int | None

    def parameters(self) -> dict[str, object]:
        """Parameters of WRITE."""
        return {
            "job_id": str(self.job_id),
            "attempt": self.attempt,
            "worker_id": str(self.worker_id),
            "done": min(self.done, BIGGEST),
            "total": None if self.total is None else min(self.total, BIGGEST),
        }


class ProgressWriter(threading.Thread):
    """Writes the newest report of each job from its own thread and session; ends by itself when nobody reports."""

    def __init__(self, database_url: str) -> None:
        super().__init__(name="deadsure-progress", daemon=True)
        self._url = database_url
        self._newest: dict[UUID, Report] = {}
        self._reported = threading.Event()
        self._lock = threading.Lock()
        self._ended = False
        self._connection: PgConnection | None = None

    def put(self, report: Report) -> bool:
        """Remember a report instead of the job's earlier one; False once the thread has ended."""
        with self._lock:
            if self._ended:
                return False
            self._newest[report.job_id] = report
        self._reported.set()
        return True

    def run(self) -> None:
        """Write until nobody has reported for `IDLE_S`; what cannot be written is dropped."""
        tries, pause = 0, threading.Event()
        while self._next():
            for report in self._take():
                try:
                    if self._connection is None or self._connection.closed:
                        self._connection = connect(self._url, "deadsure progress", statement_timeout_s=5)
                        rows(self._connection, "SET synchronous_commit = off")
                    rows(self._connection, WRITE, report.parameters())
                    tries = 0
                except psycopg2.Error:
                    tries += 1
                    self._close()
            pause.wait(GAP_S if tries == 0 else max(GAP_S, pause_s(tries)))
        self._close()

    def _next(self) -> bool:
        """Wait for a report; False when none came, and no further one is taken."""
        if self._reported.wait(IDLE_S):
            return True
        with self._lock:
            self._ended = not self._newest
        return not self._ended

    def _take(self) -> list[Report]:
        self._reported.clear()
        with self._lock:
            taken = list(self._newest.values())
            self._newest.clear()
        return taken

    def _close(self) -> None:
        if self._connection is not None:
            with suppress(psycopg2.Error):
                self._connection.close()
            self._connection = None


_writers: dict[tuple[int, str], ProgressWriter] = {}


def put(database_url: str, report: Report) -> None:
    """Hand a report to this process' writer. Two threads that start one at once leave a second that soon ends."""
    key = (os.getpid(), database_url)
    writer = _writers.get(key)
    if writer is None or not writer.put(report):
        writer = ProgressWriter(database_url)
        writer.put(report)
        _writers[key] = writer
        writer.start()
