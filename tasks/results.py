"""Celery's result backend that reads the job row. Storing is a no-op: the arrow that finished the job did it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

from celery import states
from celery.backends.base import Backend, SyncBackendMixin
from celery.exceptions import TimeoutError as CeleryTimeoutError

from app.errors import JobCancelled, JobQuarantined, UnsupportedOption
from app.settings import settings
from app.states import State
from db.pooled import with_pooled
from db.session import Row, one
from tasks.inspection import is_uuid

READ = """
WITH asked AS (
    SELECT coalesce((SELECT job_id FROM job_aliases WHERE alias_id = %(job_id)s), %(job_id)s::uuid) AS job_id
)
SELECT state::text, CASE WHEN state = 'running' AND progress_done IS NOT NULL
                         THEN jsonb_build_object('done', progress_done, 'total', progress_total) ELSE result END,
       cause, reason, finished_at, type
  FROM jobs JOIN asked USING (job_id)
UNION ALL
SELECT state, NULL, 'pruned', 'its record was pruned', pruned_at, type FROM job_tombstones JOIN asked USING (job_id)
"""
CELERY_STATES = {
    State.QUEUED: states.PENDING,
    State.RUNNING: states.STARTED,
    State.RETRY_WAIT: states.RETRY,
    State.SUCCEEDED: states.SUCCESS,
    State.QUARANTINED: states.FAILURE,
    State.CANCELLED: states.REVOKED,
}
POLL_FIRST_S, POLL_MAX_S = 0.02, 0.5


class JobResults(SyncBackendMixin, Backend):
    """`AsyncResult` answers from `jobs`. An id that is no job is PENDING, as everywhere in Celery.

    The `info` of a running job is what it has reported of its progress, as {"done": …, "total": …}.
    """

    supports_autoexpire = True  # retention is `deadsure prune`, not Celery's

    def store_result(self, task_id: str, result: Any, state: str, *_: Any, **__: Any) -> Any:
        """Nothing to do: the domain wrote the result in the same statement as the state."""
        return result

    _store_result = store_result

    def get_task_meta(self, task_id: str, cache: bool = True) -> dict[str, Any]:
        """State and result as Celery's meta dictionary; raises psycopg2.OperationalError when the database is away."""
        if not is_uuid(task_id):
            return {"status": states.PENDING, "result": None}
        row = read(task_id)
        if row is None:
            return {"status": states.PENDING, "result": None}
        state, result, cause, reason, finished_at, name = row
        meta: dict[str, Any] = {
            "task_id": task_id,
            "name": name,
            "status": CELERY_STATES[State(state)],
            "result": result,
            "traceback": None,
            "children": [],
            "date_done": finished_at,
        }
        if state == State.QUARANTINED:
            meta["result"] = JobQuarantined(task_id, cause, reason)
        elif state == State.CANCELLED:
            meta["result"] = JobCancelled(f"job {task_id} was cancelled")
        return meta

    def wait_for(
        self,
        task_id: str,
        timeout: float | None = None,
        interval: float = POLL_FIRST_S,
        no_ack: bool = True,
        on_interval: Callable[[], None] | None = None,
    ) -> dict[str, Any]:
        """Poll the row until the job has ended, at most `timeout` seconds; raises celery.exceptions.TimeoutError."""
        deadline = None if timeout is None else time.monotonic() + timeout
        pause_s = POLL_FIRST_S
        while True:
            meta = self.get_task_meta(task_id)
            if meta["status"] in states.READY_STATES:
                return meta
            if on_interval:
                on_interval()
            if deadline is not None and time.monotonic() + pause_s > deadline:
                raise CeleryTimeoutError(f"job {task_id} is {meta['status']} after {timeout:g} s")
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, POLL_MAX_S)

    def ensure_chords_allowed(self) -> None:
        """Refused before anything is sent: Celery would send the task that waits for the members first."""
        raise UnsupportedOption("a chord is not supported beside durable jobs, so nothing was sent")

    def apply_chord(self, *_: Any, **__: Any) -> None:
        """Refused, wherever Celery asks first."""
        self.ensure_chords_allowed()

    def forget(self, task_id: str) -> None:
        """Refused: a job's record is evidence, and is not dropped by a reader."""
        raise UnsupportedOption(f"job {task_id}: its record is kept; forget() is not supported on a durable task")


def read(task_id: str) -> Row | None:
    """The row of READ."""
    values = {"job_id": str(uuid.UUID(task_id))}
    return with_pooled(
        settings().need_database(), settings().submit_timeout_s, lambda connection: one(connection, READ, values)
    )
