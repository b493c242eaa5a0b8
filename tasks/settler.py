"""Settlers: what the main process must do elsewhere before a delivery may be settled, each in a thread of its own.

The event loop never waits for SQL or a broker: acknowledgements and heartbeats go on. Each item holds its delivery
until the other side has what it needs, however long an outage takes, and only then acknowledges or rejects it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

import psycopg2
from kombu import Connection
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


Act = Callable[[Settle], None]
Session = TypeVar("Session")


@dataclass(frozen=True)
class OtherSide(Generic[Session]):
    """Where the work is done: how to get there, how to leave, and which errors say that nobody answers there."""

    open: Callable[[], Session]
    close: Callable[[Session], object]
    is_away: Callable[[Exception], bool]


def database(url: str) -> OtherSide[PgConnection]:
    """The database; read-only or full it is away too."""

    def is_away(error: Exception) -> bool:
        wrong = (psycopg2.DataError, psycopg2.IntegrityError, psycopg2.ProgrammingError)
        return isinstance(error, psycopg2.Error) and not isinstance(error, wrong)

    return OtherSide(lambda: connect(url, "deadsure settler", statement_timeout_s=30), PgConnection.close, is_away)


def broker(url: str) -> OtherSide[Connection]:
    """The broker, for what is published before a delivery is settled."""
    errors = (OSError, *Connection(url).connection_errors, *Connection(url).channel_errors)
    return OtherSide(
        lambda: Connection(url, connect_timeout=5), Connection.release, lambda error: isinstance(error, errors)
    )


class Settler(threading.Thread, Generic[Session]):
    """Runs work items in order, each until the other side has taken it."""

    def __init__(self, other_side: OtherSide[Session]) -> None:
        super().__init__(name="deadsure-settler", daemon=True)
        self._other_side = other_side
        self._items: queue.SimpleQueue[tuple[Callable[[Session], Settle], Act, Settle | None] | None] = (
            queue.SimpleQueue()
        )
        self._session: Session | None = None
        self._stopped = threading.Event()

    def put(self, work: Callable[[Session], Settle], act: Act, on_bug: Settle | None = None) -> None:
        """Do `work` on the other side, then `act` on its answer; never blocks.

        `on_bug` is the answer when `work` fails by itself and not by an outage; None: it is tried until it works.
        """
        self._items.put((work, act, on_bug))

    def waiting(self) -> int:
        """Items that are not at hand yet."""
        return self._items.qsize()

    def stop(self) -> None:
        """End after the items at hand; what the other side does not take is left to the broker."""
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
        self._drop()

    def _until_done(self, work: Callable[[Session], Settle], on_bug: Settle | None) -> Settle | None:
        tries = 0
        while True:
            try:
                if self._session is None:
                    self._session = self._other_side.open()
                return work(self._session)
            except Exception as error:  # noqa: BLE001  # a bug of ours must cost one message's wait, not the worker
                self._drop()
                if not self._other_side.is_away(error):
                    log.error("settler.failed", reason=account(error).reason, consequence=on_bug or "it is tried again")
                    if on_bug is not None:
                        return on_bug
                if self._stopped.is_set():
                    return None
                self._stopped.wait(pause_s(tries))
                tries += 1

    def _drop(self) -> None:
        if self._session is not None:
            with suppress(Exception):  # whatever it says, it is dropped
                self._other_side.close(self._session)
            self._session = None
