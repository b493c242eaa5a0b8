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


class Settler(threading.Thread):
    """Runs work items in order, each until the database has taken it."""

    def __init__(self, database_url: str) -> None:
        super().__init__(name="deadsure-settler", daemon=True)
        self._url = database_url
        self._items: queue.SimpleQueue[tuple[Work, Act] | None] = queue.SimpleQueue()
        self._connection: PgConnection | None = None
        self._stopped = threading.Event()

    def put(self, work: Work, act: Act) -> None:
        """Do `work` in the database, then `act` on its answer; never blocks."""
        self._items.put((work, act))

    def stop(self) -> None:
        """End after the items at hand; what the database does not take is left to the broker."""
        self._stopped.set()
        self._items.put(None)
        if self.is_alive():
            self.join(timeout=10)

    def run(self) -> None:
        """Settle in order."""
        while (item := self._items.get()) is not None:
            work, act = item
            answer = self._until_done(work)
            if answer is not None:
                act(answer)
        if self._connection is not None:
            self._connection.close()

    def _until_done(self, work: Work) -> Settle | None:
        tries = 0
        while True:
            try:
                if self._connection is None or self._connection.closed:
                    self._connection = connect(self._url, "deadsure settler", statement_timeout_s=30)
                return work(self._connection)
            except (psycopg2.OperationalError, psycopg2.InterfaceError, TryAgain):
                self._drop()
                if self._stopped.is_set():
                    return None
                self._stopped.wait(pause_s(tries))
                tries += 1
            except Exception as error:  # noqa: BLE001  # a bug of ours must cost one message's wait, not the worker
                self._drop()
                log.exception("settler.failed", error=type(error).__name__, consequence="the delivery is rejected")
                return Settle.REJECT

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
