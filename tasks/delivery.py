"""What a delivery says, and what becomes of it: the request hooks that run in the worker's main process.

No database work here: it would block acknowledgements and heartbeats. A lost child is handed to the reaper.
"""

from __future__ import annotations

import uuid
from typing import Any

from billiard.einfo import ExceptionInfo, ExceptionWithTraceback
from celery.exceptions import Terminated, WorkerLostError
from celery.worker import state
from celery.worker.request import Request
from kombu.message import Message

from app.claim import Delivery
from app.settings import settings
from tasks.headers import COPY, EPISODE, TAG
from tasks.services import reaper

LOST = (WorkerLostError, Terminated, SystemExit, KeyboardInterrupt)


def delivery_of(request: Any) -> Delivery:
    """The delivery that a child works on, from Celery's request context."""
    info = request.delivery_info or {}
    return Delivery(
        job_id=uuid.UUID(request.id),
        copy=int(request.get(COPY) or 0),
        episode=int(request.get(EPISODE) or 0),
        delivery_tag=request.get(TAG),
        redelivered=bool(info.get("redelivered")),
        redelivered_known=settings().broker_is_amqp,
    )


class DurableRequest(Request):
    """A delivery of a durable job: tells the child its tag, and turns a lost child into an expired job."""

    reported_lost = False

    def __init__(self, message: Message, **options: Any) -> None:
        super().__init__(message, **options)
        self._request_dict[TAG] = str(message.delivery_tag)

    def on_failure(self, exc_info: ExceptionInfo, send_failed_event: bool = True, return_ok: bool = False) -> Any:
        """A dead child is reported; what a handler raised was settled by its arrow already."""
        error = exc_info.exception
        if isinstance(error, ExceptionWithTraceback):
            error = error.exc
        if isinstance(error, LOST):
            return self.on_lost("the worker's child process died while the handler ran")
        return super().on_failure(exc_info, send_failed_event, return_ok)

    def on_timeout(self, soft: bool, timeout: float) -> None:
        """The hard limit kills the child: to the job that is a lost worker."""
        if soft:
            super().on_timeout(soft, timeout)
        else:
            self.on_lost(f"the handler ran into its hard time limit of {timeout:g} s")

    def on_lost(self, reason: str) -> None:
        """Hand the job of a dead child to the reaper, which settles this delivery afterwards."""
        state.task_ready(self)
        if self.reported_lost:
            return
        self.reported_lost = True
        reaper().report(self, reason)
