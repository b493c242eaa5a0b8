"""A pool child's signals.

A SIGTERM that reaches the whole process group is the main process' business. A soft time limit is for handlers: raised
in the middle of an arrow it would leave a job that ran, and of which nobody wrote how it ended. One that meets the
record of an external call strikes right after it; one that meets an arrow comes too late.
"""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

import billiard
from billiard.exceptions import SoftTimeLimitExceeded

from app.job import put_off, uninterrupted
from app.lease import SharedLease

GROUP_SIGNAL_S = 1.0  # how long a child waits for its main process to have had the same signal
LOOK_S = 0.01


def take_signals(lease: SharedLease) -> None:
    """Install both handlers in a pool child; elsewhere do nothing.

    Not earlier than the first job: billiard sets its own handlers after every initializer has run.
    """
    if billiard.current_process().name == "MainProcess":
        return

    def on_term(_number: int, _frame: FrameType | None) -> None:
        until = time.monotonic() + GROUP_SIGNAL_S
        while time.monotonic() < until:
            if lease.leaving:
                return  # the main process decides when this job's grace is over
            time.sleep(LOOK_S)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # meant for this child alone
        os.kill(os.getpid(), signal.SIGTERM)

    def on_soft_limit(_number: int, _frame: FrameType | None) -> None:
        if uninterrupted.get():
            put_off[:] = [SoftTimeLimitExceeded()]
        else:
            raise SoftTimeLimitExceeded

    signal.signal(signal.SIGTERM, on_term)
    signal.signal(signal.SIGUSR1, on_soft_limit)
