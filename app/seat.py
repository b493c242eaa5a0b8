"""A process' place in its worker: the shared lease, and the database sessions that its attempts run on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from uuid import UUID

import psycopg2
from psycopg2.extensions import connection as PgConnection
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session
from sqlalchemy.pool import StaticPool

from app.clock import boottime_s, pause_s
from app.errors import DeadsureError
from app.lease import SharedLease
from app.limit_clock import NO_CLOCK, LimitClock
from app.transaction_words import refuse_end
from db.session import connect, rows


class DatabaseAway(DeadsureError):
    """The session broke: our own outage. Caught by the attempt, which holds the delivery and tries again."""


class JobSession(Session):
    """The session of the finishing transaction: what it writes commits together with `succeed`, or not at all."""

    def __init__(self, bind: Connection, back: str) -> None:
        """`back`: the SQL that undoes what the handler wrote."""
        super().__init__(bind=bind)
        self._back = back

    def commit(self) -> None:
        """Refused: a commit of its own would let the effect stand without the job's success."""
        raise DeadsureError(
            "job.session commits with the job's success; use flush(), or a session of your own for separate work"
        )

    def rollback(self) -> None:
        """Undo what the handler wrote so far in this attempt."""
        super().rollback()
        bind = self.get_bind()
        bind.exec_driver_sql(self._back)  # type: ignore[union-attr]  # always bound to a Connection


class Seat:
    """One process (one thread of it) that runs attempts. Sessions are replaced when they broke or the lease changed."""

    def __init__(self, lease: SharedLease, database_url: str, clock: LimitClock = NO_CLOCK) -> None:
        self.lease, self.database_url = lease, database_url
        self.clock = clock
        self.pid = os.getpid()
        self._worker_id: UUID | None = None
        self._main: PgConnection | None = None
        self._ledger: PgConnection | None = None
        self._engine: Engine | None = None
        self._note: Callable[[str], None] = lambda _sql: None
        self._bind: Connection | None = None  # kept over jobs: making one costs more than a short job's SQL

    @property
    def worker_id(self) -> UUID:
        """The worker's present identity."""
        return self.lease.read()[0]

    def trusted(self, worker_id: UUID) -> bool:
        """Whether `worker_id` still is this worker and inside its window of trust."""
        current, trusted_until = self.lease.read()
        return current == worker_id and boottime_s() < trusted_until

    def connection(self) -> PgConnection:
        """The session for arrows; raises DatabaseAway. Its name lets a sweeper end it with the lease."""
        worker_id = self.worker_id
        if self._main is None or self._main.closed or worker_id != self._worker_id:
            self.drop()
            self._main, self._worker_id = self._connect(worker_id), worker_id
            main = self._main
            self._engine = create_engine(
                "postgresql+psycopg2://",
                creator=lambda: main,
                poolclass=StaticPool,
                isolation_level="AUTOCOMMIT",
                pool_reset_on_return=None,
                hide_parameters=True,  # what is logged of an error must quote no payload
            )
            event.listen(self._engine, "before_cursor_execute", self._look)
            with noticing_outage(main):
                self._engine.connect().close()
        return self._main

    def reachable(self) -> bool:
        """Whether the database answers at once."""
        try:
            self.connection()
        except DatabaseAway:
            return False
        return True

    def ledger(self) -> PgConnection:
        """A second session for ledger rows, which must commit apart from the job's transaction."""
        self.connection()
        if self._ledger is None or self._ledger.closed:
            self._ledger = self._connect(self.worker_id)
        return self._ledger

    def session(self, connection: PgConnection, back: str, note: Callable[[str], None]) -> JobSession:
        """A SQLAlchemy session on `connection`; the transaction around it is the attempt's. Raises DatabaseAway.

        `back`: the SQL that undoes what the handler wrote; `note` is told each statement before it is sent.
        """
        if self._engine is None or connection is not self._main:
            raise DatabaseAway("the session of this attempt is gone")
        if self._bind is None:
            self._bind = self._engine.connect()
        self._note = note
        return JobSession(self._bind, back)

    def _look(self, _connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        """Before each statement of the handler's session."""
        refuse_end(statement)
        self._note(statement)

    def reconnect(self, tries: int) -> PgConnection:
        """A new session, however long it takes: pauses grow from the `tries`-th on."""
        self.clock.wait()
        while True:
            self.drop()
            time.sleep(pause_s(tries))
            with suppress(DatabaseAway):
                found = self.connection()
                self.clock.go_on()
                return found
            tries += 1

    def drop(self) -> None:
        """Close the sessions; the next use opens new ones."""
        for connection in (self._main, self._ledger):
            if connection is not None:
                with suppress(psycopg2.Error):
                    connection.close()
        self._main = self._ledger = self._engine = self._bind = None

    def _connect(self, worker_id: UUID) -> PgConnection:
        try:
            connection = connect(self.database_url, f"deadsure job {worker_id}")
            # Backstop for an abandoned transaction; the lease ends it much earlier.
            rows(connection, "SET idle_in_transaction_session_timeout = '20min'")
        except psycopg2.OperationalError as error:
            raise DatabaseAway(type(error).__name__) from error
        return connection


@contextmanager
def noticing_outage(connection: PgConnection) -> Iterator[None]:
    """Turn a driver's error into DatabaseAway when it broke the session; other errors pass."""
    try:
        yield
    except (psycopg2.Error, DBAPIError) as error:
        if broken(connection):
            raise DatabaseAway(type(error).__name__) from error
        raise


def broken(connection: PgConnection) -> bool:
    """Whether the session cannot answer any more (an aborted transaction still answers)."""
    try:
        rows(connection, "SELECT 1")
    except psycopg2.errors.InFailedSqlTransaction:
        return False
    except psycopg2.Error:
        return True
    return False
