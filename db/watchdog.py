"""A client-side limit for waits on the database: a server that falls silent must not hold a caller for ever.

`statement_timeout` is the server's, and a peer's kernel answers keepalives for a frozen server. One thread per process
looks at the deadlines of the waits under way and shuts the socket of one that is over: the driver then reports a lost
connection.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from psycopg2.extensions import connection as PgConnection

LOOK_S = 0.25


class Watchdog:
    """The waits of one process; made anew after a fork, which takes no thread along."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._waits: dict[int, tuple[float, int]] = {}
        self._busy = threading.Event()
        self._thread = threading.Thread(target=self._run, name="deadsure-watchdog", daemon=True)
        self._thread.start()

    def watch(self, number: int, limit_s: float) -> int:
        """Begin a wait on the socket `number`; the key ends it."""
        key = threading.get_ident()
        self._waits[key] = (time.monotonic() + limit_s, number)
        self._busy.set()
        return key

    def end(self, key: int) -> None:
        """The wait is over."""
        self._waits.pop(key, None)

    def _run(self) -> None:
        while True:
            if not self._waits:
                self._busy.clear()
                if not self._waits:
                    self._busy.wait()
            time.sleep(LOOK_S)
            now = time.monotonic()
            for key, (until, number) in list(self._waits.items()):
                if now > until and self._waits.pop(key, None) is not None:
                    shut(number)


def shut(number: int) -> None:
    """End both directions of a socket that belongs to somebody else, who closes it."""
    with suppress(OSError), socket.socket(fileno=os.dup(number)) as theirs:
        theirs.shutdown(socket.SHUT_RDWR)


_watchdogs: list[Watchdog] = []


@contextmanager
def bounded(connection: PgConnection, limit_s: float) -> Iterator[None]:
    """Bound the wait for the server inside the block; psycopg2.OperationalError follows when it is over."""
    if not _watchdogs or _watchdogs[0].pid != os.getpid():
        _watchdogs[:] = [Watchdog()]
    watchdog = _watchdogs[0]
    key = watchdog.watch(connection.fileno(), limit_s)
    try:
        yield
    finally:
        watchdog.end(key)
