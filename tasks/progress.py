"""Progress in Flower: what jobs report while they run, as Celery events of their tasks.

The numbers come from the job rows, so a handler never waits for a broker. The event `task-progress` gives the task the
state PROGRESS, and the text in the field that Flower shows as its result. Events are sent by the event loop, as all
of a worker's are, and only for a task that still runs: Flower would put the text of a later one over the real result.
"""

from __future__ import annotations

import threading
from typing import Any

import psycopg2
from celery import bootsteps
from celery.worker import state
from celery.worker.consumer.tasks import Tasks
from psycopg2.extensions import connection as PgConnection

from app.settings import settings
from db.session import connect, rows
from tasks.services import services

GAP_S = 1.0
EVENT = "task-progress"
RUNNING = """
SELECT job_id::text, type, progress_done, progress_total FROM jobs
 WHERE state = 'running' AND worker_id = %(worker_id)s AND progress_done IS NOT NULL
"""

Row = tuple[Any, ...]


class ProgressEvents(threading.Thread):
    """Looks once a second at this worker's running jobs, while somebody listens to its task events."""

    def __init__(self, consumer: Any) -> None:
        super().__init__(name="deadsure-events", daemon=True)
        self._consumer = consumer
        self._stopped = threading.Event()
        self._connection: PgConnection | None = None
        self._told: set[Row] = set()

    def stop(self) -> None:
        """End after the look at hand."""
        self._stopped.set()

    def run(self) -> None:
        """Look until stopped; a database that is away is tried again at the next look."""
        while not self._stopped.wait(GAP_S):
            try:
                self._look()
            except psycopg2.Error:
                self._drop()
        self._drop()

    def _look(self) -> None:
        if not listening(self._consumer.event_dispatcher):
            self._told.clear()  # whoever listens next has heard nothing
            return
        if self._connection is None or self._connection.closed:
            self._connection = connect(settings().need_database(), "deadsure events", statement_timeout_s=5)
        found = set(rows(self._connection, RUNNING, {"worker_id": str(services().keeper.worker_id)}))
        for job_id, name, done, total in found - self._told:
            self._consumer.call_soon(self._send, job_id, name, done, total)
        self._told = found

    def _send(self, job_id: str, name: str, done: int, total: int | None) -> None:
        """In the event loop."""
        dispatcher = self._consumer.event_dispatcher
        if job_id in state.requests and listening(dispatcher):
            dispatcher.send(EVENT, uuid=job_id, name=name, result=told(done, total), done=done, total=total)

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class TellProgress(bootsteps.StartStopStep):
    """Starts the thread with the consumer, and once only: it outlives the consumer's connections."""

    requires = (Tasks,)
    thread: ProgressEvents | None = None

    def start(self, parent: Any) -> None:
        """Start the thread."""
        if self.thread is None:
            self.thread = ProgressEvents(parent)
            self.thread.start()

    def shutdown(self, parent: Any) -> None:
        """End the thread with the worker."""
        if self.thread is not None:
            self.thread.stop()


def listening(dispatcher: Any) -> bool:
    """Whether the worker sends task events: by `-E`, or because Flower asked for them."""
    return bool(dispatcher and dispatcher.enabled and (not dispatcher.groups or "task" in dispatcher.groups))


def told(done: int, total: int | None) -> str:
    """The progress for people."""
    if total is None:
        return f"{done} so far"
    return f"{done} of {total}" + (f" ({100 * done // total} %)" if total > 0 else "")
