"""One eye on the handler at hand, while a process works through the jobs of one delivery.

The pool knows a delivery, not the jobs in it: its time limits would be for all of them together, and a slow job would
keep those behind it waiting. So a thread of the process looks at the job that runs: past its soft limit it is told,
past its hard limit the process ends by SIGKILL (to the job that is a lost worker, as ever), and when it is slow, what
has not been started is given back. A handler that never lets go of the interpreter is left to the pool's limit.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from app.journal import log

LOOK_S = 0.2
SLOW_S = 1.0


@dataclass
class Watched:
    """One delivery at work; times in seconds. `give_back` hands on what has not been started."""

    limit_s: float
    soft_limit_s: float | None
    give_back: Callable[[], None]
    since: float | None = None
    told: bool = False
    gave_back: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> None:
        """A handler starts."""
        self.told, self.since = False, time.monotonic()

    def end(self) -> None:
        """It has ended; no limit strikes once this has returned."""
        with self.lock:
            self.since = None


class Watch:
    """The thread, made at the first coalesced delivery of a process.

    `may_kill` is False where jobs run in the worker's main process.
    """

    def __init__(self, *, may_kill: bool) -> None:
        self.pid = os.getpid()
        self._may_kill = may_kill
        self._watched: Watched | None = None
        self._busy = threading.Event()
        threading.Thread(target=self._run, name="deadsure-watch", daemon=True).start()

    def start(self, watched: Watched) -> None:
        """Begin with a delivery."""
        self._watched = watched
        self._busy.set()

    def stop(self) -> None:
        """The delivery has ended."""
        self._watched = None
        self._busy.clear()

    def _run(self) -> None:
        while True:
            self._busy.wait()
            time.sleep(LOOK_S)
            if (watched := self._watched) is not None:
                self._look(watched)

    def _look(self, watched: Watched) -> None:
        with watched.lock:
            if watched.since is None:
                return
            took_s = time.monotonic() - watched.since
            if self._may_kill and took_s >= watched.limit_s:
                log.error("job.time_limit", pid=self.pid, limit_s=watched.limit_s, consequence="this process ends")
                os.kill(self.pid, signal.SIGKILL)
            if self._may_kill and watched.soft_limit_s and took_s >= watched.soft_limit_s and not watched.told:
                watched.told = True
                os.kill(self.pid, signal.SIGUSR1)
        if took_s >= SLOW_S and not watched.gave_back:
            watched.gave_back = True
            watched.give_back()
