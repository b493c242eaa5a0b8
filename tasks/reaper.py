"""The reaper: settles the jobs of children that died, in a thread, so that the event loop never waits for SQL.

The race: the dead child's message must not go back to the queue before the crash is counted, or the job runs again
uncounted. So the job is expired first (a new debt brings it back) and the delivery acknowledged after that. A child
that had not committed a claim leaves nothing to expire: its delivery is requeued, and comes back as redelivered.
"""

from __future__ import annotations

import queue
import threading
import uuid
from typing import Any

import psycopg2
from psycopg2.extensions import connection as PgConnection

from app.clock import pause_s
from app.journal import log
from app.lease import Keeper
from app.sweep import expire_child
from db.session import connect


class Reaper(threading.Thread):
    """Waits for reports of lost children; holds each delivery until the database has the crash."""

    def __init__(self, database_url: str, keeper: Keeper) -> None:
        super().__init__(name="deadsure-reaper", daemon=True)
        self._url, self._keeper = database_url, keeper
        self._reports: queue.SimpleQueue[tuple[Any, uuid.UUID, str] | None] = queue.SimpleQueue()
        self._connection: PgConnection | None = None
        self._going = True

    def report(self, request: Any, reason: str) -> None:
        """A child died with this request; never blocks."""
        self._reports.put((request, self._keeper.worker_id, reason))

    def stop(self) -> None:
        """End after the reports at hand."""
        self._going = False
        self._reports.put(None)
        if self.is_alive():
            self.join(timeout=10)

    def run(self) -> None:
        """Settle reports in order."""
        while (entry := self._reports.get()) is not None:
            request, worker_id, reason = entry
            state = self._expire(uuid.UUID(request.id), worker_id, request.worker_pid or 0, reason)
            log.warning("job.child_lost", job_id=request.id, pid=request.worker_pid, state=state, reason=reason)
            if state is None:
                request.reject(requeue=True)
            elif state == "quarantined":
                request.reject(requeue=False)
            else:
                request.acknowledge()

    def _expire(self, job_id: uuid.UUID, worker_id: uuid.UUID, pid: int, reason: str) -> str | None:
        tries = 0
        while True:
            try:
                if self._connection is None or self._connection.closed:
                    self._connection = connect(self._url, "deadsure reaper", statement_timeout_s=30)
                return expire_child(self._connection, job_id, worker_id, pid, reason)
            except psycopg2.Error:
                if self._connection is not None:
                    self._connection.close()
                if not self._going:
                    return None
                threading.Event().wait(pause_s(tries))
                tries += 1
