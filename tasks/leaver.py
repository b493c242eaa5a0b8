"""Leaving in order: SIGTERM ends the intake of work, gives running jobs their grace, then takes them back.

Order: handlers that ask `job.should_stop` are told at once. At the end of the grace the children that still run a job
are killed, and only when the process is gone is its job released (`tasks.delivery` does that when it hears of the dead
child): no budget is spent, and a new debt brings the job to another worker.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress

from celery.worker import state

from app.clock import boottime_s
from app.journal import log
from tasks.delivery import DurableRequest

LOOK_S = 0.1


class Leaver(threading.Thread):
    """Started by the first signal to stop; a second one cuts the grace short."""

    def __init__(self, grace_s: float) -> None:
        super().__init__(name="deadsure-leaver", daemon=True)
        self._grace_s = grace_s
        self._hurry = threading.Event()

    def hurry(self) -> None:
        """End the grace now."""
        self._hurry.set()

    def run(self) -> None:
        """Wait for the running jobs, at most the grace; then take them back."""
        until = boottime_s() + self._grace_s
        while running() and boottime_s() < until and not self._hurry.is_set():
            self._hurry.wait(LOOK_S)
        for request in running():
            log.warning("worker.takes_back", job_id=request.id, pid=request.worker_pid, grace_s=self._grace_s)
            with suppress(ProcessLookupError):
                os.kill(request.worker_pid, signal.SIGKILL)


def running() -> list[DurableRequest]:
    """The durable jobs that a child works on."""
    return [
        request
        for request in tuple(state.active_requests)
        if isinstance(request, DurableRequest)
        and request.worker_pid not in (None, os.getpid())  # a pool of threads: nobody but us could be killed
        and not request.reported_lost
    ]
