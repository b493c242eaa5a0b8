"""One eye on the handler at hand, while a process works through the jobs of one delivery.

The pool knows a delivery, not the jobs in it: a slow job would keep those behind it waiting, and the one signal of a
soft time limit would be spent on the first that is late. So a thread of the process looks at the job that runs: past
its soft limit it is told, and when it is slow, what has not been started is given back. The hard limit is the pool's,
counted from the start of each handler (`app.limit_clock`).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from app.failures import account
from app.journal import log

LOOK_S = 0.2
SLOW_S = 1.0


@dataclass
class Watched:
    """One delivery at work. `soft_limit_s` of each of its jobs; `give_back` hands on what has not been started."""

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
        """It has ended; nobody is told once this has returned."""
        with self.lock:
            self.since = None


class Watch:
    """The thread, made at the first coalesced delivery of a process.

    `may_tell` is False where jobs run in the worker's main process, which must not get a child's signals.
    """

    def __init__(self, *, may_tell: bool) -> None:
        self.pid = os.getpid()
        self._may_tell = may_tell
        self._watched: list[Watched] = []  # several in a pool of threads
        self._lock = threading.Lock()
        self._busy = threading.Event()
        threading.Thread(target=self._run, name="deadsure-watch", daemon=True).start()

    def start(self, watched: Watched) -> None:
        """Begin with a delivery."""
        with self._lock:
            self._watched.append(watched)
            self._busy.set()

    def stop(self, watched: Watched) -> None:
        """The delivery has ended."""
        with self._lock:
            self._watched.remove(watched)
            if not self._watched:
                self._busy.clear()

    def _run(self) -> None:
        while True:
            self._busy.wait()
            time.sleep(LOOK_S)
            with self._lock:
                all_watched = list(self._watched)
            for watched in all_watched:
                self._look(watched)

    def _look(self, watched: Watched) -> None:
        with watched.lock:
            if watched.since is None:
                return
            took_s = time.monotonic() - watched.since
            if self._may_tell and watched.soft_limit_s and took_s >= watched.soft_limit_s and not watched.told:
                watched.told = True
                os.kill(self.pid, signal.SIGUSR1)
        if took_s >= SLOW_S and not watched.gave_back:
            watched.gave_back = True
            try:
                watched.give_back()
            except Exception as error:  # noqa: BLE001  # the thread tells soft limits too: it must outlive everything
                log.error("delivery.not_given_back", reason=account(error).reason)
