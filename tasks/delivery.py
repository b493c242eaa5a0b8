"""What a delivery says, and what becomes of it: the request hooks that run in the worker's main process.

No database work here: it would block acknowledgements and heartbeats. What needs it is handed to the settler.
"""

from __future__ import annotations

import os
import signal
import uuid
from contextlib import suppress
from typing import Any

from billiard.einfo import ExceptionInfo, ExceptionWithTraceback
from celery.exceptions import Terminated, TimeLimitExceeded, WorkerLostError
from celery.worker import state
from celery.worker.request import Request
from kombu.message import Message
from psycopg2.extensions import connection as PgConnection

from app.claim import Delivery
from app.ending import Outcome
from app.job_types import REGISTRY
from app.journal import log
from app.metrics.counts import of_type
from app.release import release
from app.settings import settings
from app.sweep import CHILD_DIED, HARD_LIMIT, expire_child
from tasks.endings import ending_of, endings_of
from tasks.headers import COPY, EPISODE, JOBS, TAG, VERSION
from tasks.inspection import jobs_of
from tasks.members import tell_ended, tell_received
from tasks.services import services
from tasks.settler import Settle

LOST = (WorkerLostError, Terminated, SystemExit, KeyboardInterrupt)


def deliveries_of(request: Any) -> list[Delivery]:
    """What a child works on, from Celery's request context: one delivery for each job of the message."""
    return [delivery_of(request, job_id) for job_id in request.get(JOBS) or [request.id]]


def delivery_of(request: Any, job_id: str) -> Delivery:
    """The delivery of one job."""
    info = request.delivery_info or {}
    return Delivery(
        job_id=uuid.UUID(job_id),
        copy=int(request.get(COPY) or 0),
        episode=int(request.get(EPISODE) or 0),
        delivery_tag=request.get(TAG),
        redelivered=bool(info.get("redelivered")),
        redelivered_known=settings().broker_is_amqp,
    )


def raised(info: ExceptionInfo) -> BaseException:
    """The exception that a child reported."""
    error: BaseException = info.exception
    return error.exc if isinstance(error, ExceptionWithTraceback) else error


class DurableRequest(Request):
    """A delivery of a durable job: tells the child its tag, and turns a lost child into an expired job."""

    reported_lost = False

    def __init_subclass__(cls, **options: Any) -> None:
        """Count endings behind `on_success`, which Celery puts into a subclass of its own making."""
        super().__init_subclass__(**options)
        inner = cls.on_success

        def on_success(self: DurableRequest, failed__retval__runtime: tuple[Any, Any, Any], **more: Any) -> Any:
            settled = inner(self, failed__retval__runtime, **more)
            self.count(*failed__retval__runtime[:2])
            return settled

        cls.on_success = on_success

    def __init__(self, message: Message, **options: Any) -> None:
        super().__init__(message, **options)
        self.jobs = jobs_of(message.headers)
        self.counts = of_type(self.name)
        self.counts.delivered.inc()
        if self.delivery_info["redelivered"]:
            self.counts.redelivered.inc()
        self._request_dict[TAG] = str(message.delivery_tag)
        known = REGISTRY.get((self.name, self._request_dict.get(VERSION)))
        if known is not None:
            # Of a coalesced delivery each job is told by its own watch when it is late.
            self.time_limits = (known.time_limit_s, known.soft_time_limit_s if len(self.jobs) == 1 else None)
        if self.tells_events:
            tell_received(self._eventer, self.name, self.jobs[1:])

    @property
    def tells_events(self) -> bool:
        """Whether anybody wants task events, such as Flower's."""
        return bool(self._eventer and self._eventer.enabled and self.task.send_events)

    def revoked(self) -> bool:
        """Never by this worker's memory: what a revoke means for a job stands in its row."""
        return False

    def terminate(self, pool: Any, signal: Any = None) -> None:
        """A handler is asked (`tasks.revoking`), never shot in the middle of its effect."""

    def send_event(self, type: str, **fields: Any) -> None:  # noqa: A002  # Celery's name
        """Celery's event; how a coalesced delivery ended is told of each of its jobs."""
        endings = endings_of(fields.get("result"))
        if endings is None:
            super().send_event(type, **fields)
        elif self.tells_events:
            tell_ended(self._eventer, self.jobs, endings)

    def count(self, failed: Any, returned: Any) -> None:
        """Tell the metrics how the child says that the delivery ended."""
        told = raised(returned) if failed else returned
        alone = ending_of(told)
        others = getattr(told, "others", ())  # of a rejected delivery
        for ending in [alone, *others] if alone is not None else endings_of(returned) or []:
            self.counts.note_ending(ending)

    def on_failure(self, exc_info: ExceptionInfo, send_failed_event: bool = True, return_ok: bool = False) -> Any:
        """A dead child is reported; what a handler raised was settled by its arrow already."""
        error = raised(exc_info)
        if isinstance(error, TimeLimitExceeded):
            return None  # `on_timeout` follows, and deals with it
        if isinstance(error, LOST):
            return self.on_lost(f"{CHILD_DIED} while the handler ran")
        return super().on_failure(exc_info, send_failed_event, return_ok)

    def on_timeout(self, soft: bool, timeout: float) -> None:
        """The hard limit kills the child: to the job that is a lost worker."""
        if soft:
            super().on_timeout(soft, timeout)
        else:
            # Billiard would kill the child only after this: the job must not be free while its handler still runs.
            if self.worker_pid and self.worker_pid != os.getpid():
                with suppress(ProcessLookupError):
                    os.kill(self.worker_pid, signal.SIGKILL)
            self.on_lost(f"{HARD_LIMIT} of {timeout:g} s")

    def on_lost(self, reason: str) -> None:
        """Hand the job of a dead child to the settler.

        The race: the message must not go back to the queue before the crash is counted, or the job runs again
        uncounted. So the job is expired first (a new debt brings it back) and the delivery acknowledged after that. A
        child that had not committed a claim leaves nothing to expire: its delivery is requeued, and comes back as
        redelivered, so that its next claim is a committed one.
        """
        state.task_ready(self)
        if self.reported_lost:
            return
        self.reported_lost = True
        jobs, pid = self.jobs, self.worker_pid or 0
        worker_id, leaving = services().keeper.worker_id, services().leaving

        def work(connection: PgConnection) -> Settle:
            became = None
            for job_id in jobs:  # at most one of them was running
                if leaving:
                    attempt = release(connection, job_id, worker_id, pid, "the worker is shutting down")
                    became = None if attempt is None else "queued"
                else:
                    became = expire_child(connection, job_id, worker_id, pid, reason)
                if became is not None:
                    break
            self.count_lost(became, leaving)
            log.warning("job.child_lost", job_id=self.id, pid=pid, state=became, reason=reason, leaving=leaving)
            if became is None or len(jobs) > 1:
                return Settle.REQUEUE  # redelivered, the jobs of a coalesced delivery run one by one
            return Settle.REJECT if became == "quarantined" else Settle.ACK

        services().settler.put(work, self.settle)

    def count_lost(self, became: str | None, leaving: bool) -> None:
        """Tell the metrics what became of the job of a dead child; None: it had not claimed one."""
        if leaving or became is None:
            self.counts.processed[Outcome.RELEASED if became else Outcome.SKIPPED].inc()
            return
        self.counts.processed[Outcome.CRASHED].inc()
        self.counts.note_crash("killed", became)

    def settle(self, answer: Settle) -> None:
        """Settle the delivery; the frames are sent by the event loop."""
        if answer is Settle.ACK:
            self.acknowledge()
        else:
            self.reject(requeue=answer is Settle.REQUEUE)

    def reject(self, requeue: bool = False) -> None:
        """Reject; where the broker has no dead-letter exchange the copy is published before it is acknowledged."""
        if not (requeue or self.acknowledged):
            # To Flower a rejected task is less than a started one: it would show a quarantined job as running for ever.
            self.send_event("task-failed", exception=f"quarantined; the reason: deadsure show {self.id}")
        if requeue or settings().broker_is_amqp or self.acknowledged:
            super().reject(requeue=requeue)
        else:
            services().publish_dead_letter(self.message, self.acknowledge)
