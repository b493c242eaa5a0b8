"""A pool child's signals: a SIGTERM that reaches the whole process group is the main process' business."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

import billiard

from app.lease import SharedLease

GROUP_SIGNAL_S = 1.0  # how long a child waits for its main process to have had the same signal
LOOK_S = 0.01


def outlive_group_term(lease: SharedLease) -> None:
    """Install the handler in a pool child; elsewhere do nothing.

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

    signal.signal(signal.SIGTERM, on_term)
