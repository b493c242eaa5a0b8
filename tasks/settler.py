"""The settler: what the main process must do in the database before a delivery may be settled, in a thread.

The event loop never waits for SQL: acknowledgements and heartbeats go on. Each item holds its delivery until the
database has what it needs, however long an outage takes, and only then acknowledges or rejects it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from enum import Enum

import psycopg2
from psycopg2.extensions import connection as PgConnection

from app.clock import pause_s
from app.failures import account
from app.journal import log
from db.session import connect


class Settle(Enum):
    """What becomes of a delivery."""

    ACK = "acknowledge"
    REJECT = "reject"
    REQUEUE = "requeue"


class TryAgain(Exception):
    """Raised by a work item whose other side is away."""


Work = Callable[[PgConnection], Settle]
Act = Callable[[Settle], None]


def is_outage(error: Exception) -> bool:
    """Whether the other side is away, read-only or full; not what the statement itself did wrong."""
    wrong = (psycopg2.DataError, psycopg2.IntegrityError, psycopg2.ProgrammingError)
    return isinstance(error, TryAgain) or (isinstance(error, psycopg2.Error) and not isinstance(error, wrong))


class Settler(threading.Thread):
    """Runs work items in order, each until the database has taken it."""

    def __init__(self, database_url: str) -> None:
        super().__init__(name="deadsure-settler", daemon=True)
        self._url = database_url
        self._items: queue.SimpleQueue[tuple[Work, Act, Settle | None] | None] = queue.SimpleQueue()
        self._connection: PgConnection | None = None
        self._stopped = threading.Event()

    def put(self, work: Work, act: Act, on_bug: Settle | None = None) -> None:
        """Do `work` in the database, then `act` on its answer; never blocks.

        `on_bug` is the answer when `work` fails by itself and not by an outage; None: it is tried until it works.
        """
        self._items.put((work, act, on_bug))

    def waiting(self) -> int:
        """Items that are not at hand yet."""
        return self._items.qsize()

    def stop(self) -> None:
        """End after the items at hand; what the database does not take is left to the broker."""
        self._stopped.set()
        self._items.put(None)
        if self.is_alive():
            self.join(timeout=10)

    def run(self) -> None:
        """Settle in order."""
        while (item := self._items.get()) is not None:
            work, act, on_bug = item
            answer = self._until_done(work, on_bug)
            if answer is not None:
                act(answer)
        if self._connection is not None:
            self._connection.close()

    def _until_done(self, work: Work, on_bug: Settle | None) -> Settle | None:
        tries = 0
        while True:
            try:
                if self._connection is None or self._connection.closed:
                    self._connection = connect(self._url, "deadsure settler", statement_timeout_s=30)
                return work(self._connection)
            except Exception as error:  # noqa: BLE001  # a bug of ours must cost one message's wait, not the worker
                if not isinstance(error, TryAgain):
                    self._drop()
                if not is_outage(error):
                    log.error("settler.failed", reason=account(error).reason, consequence=on_bug or "it is tried again")
                    if on_bug is not None:
                        return on_bug
                if self._stopped.is_set():
                    return None
                self._stopped.wait(pause_s(tries))
                tries += 1

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
