"""Celery's remote control, with `revoke` of a job meaning `cancel`: a state in the database, not a worker's memory.

Celery's revoke tells the workers that are there to discard the message; a job's debt would send it again.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

from celery.app.control import Control

from app.cancel import Cancelled, cancel
from app.journal import log
from app.settings import settings
from db.pooled import with_pooled
from tasks.inspection import is_uuid


class JobControl(Control):
    """`revoke` cancels jobs (a running one is asked to stop) and passes every other id to Celery."""

    def revoke(self, task_id: str | Iterable[str], *args: Any, **kwargs: Any) -> Any:
        """Raises psycopg2.OperationalError when the database is away: then nothing was revoked."""
        ids = [task_id] if isinstance(task_id, str) else list(task_id)
        others = [one_id for one_id in ids if not self.cancelled(one_id)]
        return super().revoke(others, *args, **kwargs) if others else None

    def terminate(self, task_id: str | Iterable[str], *args: Any, **kwargs: Any) -> Any:
        """For a job the same as `revoke`: a handler is asked, never shot in the middle of its effect."""
        return self.revoke(task_id, *args, terminate=True, **kwargs)

    def cancelled(self, task_id: str) -> bool:
        """Cancel the job with this id; False when it is none of ours."""
        if not is_uuid(task_id) or not settings().database_url:
            return False
        answer = with_pooled(
            settings().need_database(),
            settings().submit_timeout_s,
            lambda connection: cancel(connection, uuid.UUID(task_id), reason="revoked"),
        )
        if answer is not Cancelled.UNKNOWN:
            log.info("job.revoked", job_id=task_id, answer=answer.value)
        return answer is not Cancelled.UNKNOWN
