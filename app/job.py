"""What a handler knows of its job, and may do with it.

Everything here runs inside one attempt (`app.attempt`): the session of the finishing transaction, calls to other
systems behind the ledger, children, checkpoints, and the questions whether to go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, NoReturn
from uuid import UUID

import psycopg2
from psycopg2.errors import DivisionByZero, InvalidSavepointSpecification
from psycopg2.extensions import TRANSACTION_STATUS_IDLE, TRANSACTION_STATUS_INERROR
from psycopg2.extensions import connection as PgConnection
from sqlalchemy.exc import SQLAlchemyError

from app import effects, progress
from app.claim import (
    Claimed,
)
from app.clock import boottime_s, pause_s
from app.errors import DeadsureError, LeaseLost, TransientError, UnrecoverableError
from app.job_types import JobType
from app.json_text import to_json
from app.seat import DatabaseAway, JobSession, Seat, broken, noticing_outage
from app.submit import NOTIFY, NewJob, within
from app.transaction_words import lasts, refuse_end
from app.watch import Watched
from db.session import one, rows

CANCEL_LOOK_S = 1.0
SAVEPOINTS = ("deadsure_effect", "deadsure_effect_too")
CANCEL_REQUESTED = "SELECT cancel_requested FROM jobs WHERE job_id = %(job_id)s"
CHECKPOINT = """
UPDATE jobs SET checkpoint = %(cursor)s::jsonb
 WHERE job_id = %(job_id)s AND state = 'running' AND attempt = %(attempt)s AND worker_id = %(worker_id)s
RETURNING 1
"""
# The row stays locked until the COMMIT behind it: nobody can take the job in between.
HELD = """
SELECT 1 / count(*) FROM (
    SELECT FROM jobs WHERE job_id = %(job_id)s AND state = 'running' AND attempt = %(attempt)s
       AND worker_id = %(worker_id)s FOR NO KEY UPDATE) AS held
"""

current: ContextVar[Job | None] = ContextVar("deadsure_job", default=None)
# Statements of handlers that PostgreSQL has read before, so that they may share a message with others.
SEEN_LIMIT = 1000
_seen: set[str] = set()
# Whether code of ours runs that a soft time limit must not cut in two: a claim, an arrow, a wait for the database.
uninterrupted: ContextVar[bool] = ContextVar("deadsure_uninterrupted", default=False)
# A soft time limit that met such code: the handler gets it as soon as it goes on.
put_off: list[BaseException] = []
# What looks at the handlers of a delivery that carries several jobs.
watching: ContextVar[Watched | None] = ContextVar("deadsure_watched", default=None)


class StoppedEarly(DeadsureError):
    """The handler gave its job back in order. Never leaves `app.attempt` and `app.coalesced`."""


class RunAgain(DeadsureError):
    """The attempt's transaction died with the database: claim once more. Never leaves those two either."""


def strike() -> None:
    """Raise the soft time limit that was put off, if one was."""
    if put_off:
        raise put_off.pop()


class Job:
    """What a handler knows of its job and may do with it."""

    def __init__(self, seat: Seat, claimed: Claimed, worker_id: UUID, job_type: JobType, *, behind: str = "") -> None:
        """`behind`: the savepoint that another job has left in the transaction which this one shares."""
        self.job_id = claimed.job_id
        self.attempt = claimed.attempt
        self.failures = claimed.failures
        self.correlation_id = claimed.correlation_id
        self.trace_context = claimed.trace_context
        self.cursor = claimed.checkpoint
        self.time_limit_s = job_type.time_limit_s
        self.result_key = f"job:{claimed.job_id}"
        self.payload: Any = None
        self.outgoing: list[NewJob] = []
        self.in_transaction = not claimed.committed
        self.savepoint = False
        self._committed = claimed.committed
        self.may_repeat = job_type.on_uncertain == "retry"
        self.connection: PgConnection = seat.connection()
        self._seat, self._worker_id, self._type = seat, worker_id, job_type
        self._session: JobSession | None = None
        self._behind = behind
        # Never the name of the one before: what did not set its own savepoint must not roll back to another job's.
        self.savepoint_name = SAVEPOINTS[behind == SAVEPOINTS[0]]
        self.lasting = False
        self._cancel_asked_at, self._cancel_requested = 0.0, False

    @property
    def session(self) -> JobSession:
        """A SQLAlchemy session whose writes commit with the job's success, or not at all."""
        if self._session is None:
            self.begin()
            self._session = self._seat.session(self.connection, self._back, self._note)
        return self._session

    @property
    def lost(self) -> bool:
        """Whether this worker may have lost the job: stop working on it, nothing it writes will count."""
        return not self._seat.trusted(self._worker_id)

    @property
    def should_stop(self) -> bool:
        """Whether to stop soon: the worker is leaving, has lost the job, or the job is to be cancelled.

        Save a cursor with `checkpoint` and call `stop()`; the next attempt finds it in `cursor`.
        """
        return self._seat.lease.leaving or self.lost or self.cancel_requested

    @property
    def cancel_requested(self) -> bool:
        """Whether somebody asked to cancel this running job; looked up once a second until it is so."""
        now = boottime_s()
        if not self._cancel_requested and now - self._cancel_asked_at >= CANCEL_LOOK_S:
            self._cancel_asked_at = now
            with suppress(psycopg2.Error, DatabaseAway):
                row = one(self._seat.ledger(), CANCEL_REQUESTED, {"job_id": str(self.job_id)})
                self._cancel_requested = bool(row and row[0])
        return self._cancel_requested

    @property
    def fence(self) -> dict[str, Any]:
        """The parameters by which a statement checks that this attempt still owns the job."""
        return {"job_id": str(self.job_id), "attempt": self.attempt, "worker_id": str(self._worker_id)}

    def progress(self, done: int, total: int | None = None) -> None:
        """Say how far the job is, for `deadsure show` and Flower; written at most once a second.

        Never waits and never fails. A job on the clean path of `atomic` is over before anybody could look.
        """
        if not self._committed:
            return
        with suppress(TypeError, ValueError, OverflowError, RuntimeError):  # no number; no thread in an ending process
            of = None if total is None else int(total)
            report = progress.Report(self.job_id, self.attempt, self._worker_id, int(done), of)
            progress.put(self._seat.database_url, report)

    def stop(self) -> NoReturn:
        """End this attempt in order: the job goes back to the queue (or is cancelled) and no budget is spent."""
        raise StoppedEarly("the handler stopped when it was asked to")

    def checkpoint(self, cursor: Any) -> None:
        """Save a cursor (JSON) at once, for the next attempt to read; holds while the database is away.

        Raises LeaseLost when the job is not ours; UnrecoverableError for an atomic job, whose work before the cursor
        would be undone while the cursor stays.
        """
        if self._type.mode == "atomic":
            raise UnrecoverableError(f"{self._type.name}: an atomic job has no cursor, it begins anew; make it leased")
        values = {**self.fence, "cursor": to_json(cursor)}
        tries = 0
        while True:
            try:
                saved = one(self._seat.ledger(), CHECKPOINT, values)
                break
            except (psycopg2.OperationalError, psycopg2.InterfaceError, DatabaseAway):
                self._seat.clock.wait()
                time.sleep(pause_s(tries))
                tries += 1
        self._seat.clock.go_on()
        if saved is None:
            raise LeaseLost(f"job {self.job_id}: attempt {self.attempt} no longer owns the job; no cursor was saved")
        self.cursor = cursor

    def retry(self, countdown: float | None = None, reason: str = "the handler asked for another try") -> NoReturn:
        """Fail this attempt on purpose: tried again like any transient failure, not sooner than `countdown` seconds."""
        raise TransientError(reason, retry_after_s=countdown)

    def still_mine(self) -> None:
        """Raise LeaseLost when this worker may have lost the job: ask before an effect that cannot be fenced."""
        if self.lost:
            raise LeaseLost(f"job {self.job_id}: the worker's lease is over")

    def call(self, name: str, function: Callable[[str], Any], *, takes_key: bool = True) -> Any:
        """Make the external call `name` at most once per key: see `app.effects`. `function` gets the idempotency key.

        Raises LeaseLost when the worker has lost the job or cannot be sure that it has not.
        """
        if self._type.mode == "atomic":
            raise UnrecoverableError(f"{self._type.name}: an atomic job cannot make external calls; make it leased")
        self.still_mine()
        caller = effects.Caller(
            self._seat.ledger,
            self.job_id,
            self.attempt,
            self._worker_id,
            self.payload,
            self._type.check,
            risk_repeat=self._type.on_uncertain == "retry",
            clock=self._seat.clock,
        )
        before, self.may_repeat = self.may_repeat, self.may_repeat or takes_key or self._type.check is not None

        def interruptible(key: str) -> Any:
            inner = uninterrupted.set(False)
            try:
                return function(key)
            finally:
                uninterrupted.reset(inner)

        # A soft time limit may strike in the call, never between its answer and the ledger.
        outer = uninterrupted.set(True)
        try:
            answer = caller.call(name, interruptible, takes_key=takes_key)
        finally:
            uninterrupted.reset(outer)
        self.may_repeat = before
        strike()
        return answer

    def child_key(self, job_type: str) -> str:
        """The idempotency key of the next child of this job: a rerun derives the same one."""
        nth = sum(1 for child in self.outgoing if child.job_type.name == job_type)
        return f"{self.job_id}/{nth}"

    def execute(self, sql: str, parameters: Any = None) -> list[tuple[Any, ...]]:
        """Run one SQL statement in the finishing transaction and return its rows: `session` without SQLAlchemy's cost.

        `parameters` as psycopg2 takes them (`%s`, `%(name)s`); a literal percent sign is written `%%` when there are
        any. Flush what `session` holds back before a statement that must see it.
        """
        refuse_end(sql)
        self._note(sql)
        opening = self._opening()
        # PostgreSQL reads a whole message before it runs any of it: a slip in a statement that was never run before
        # must not take the savepoint along.
        if opening and sql not in _seen:
            self.begin()
            opening = ""
        with noticing_outage(self.connection):
            found = self._first(opening, sql, parameters) if opening else rows(self.connection, sql, parameters)
        if len(_seen) < SEEN_LIMIT:
            _seen.add(sql)
        return found

    def _first(self, opening: str, sql: str, parameters: Any) -> list[tuple[Any, ...]]:
        """The handler's first statement, in one message with what opens its part of the transaction."""
        with self.connection.cursor() as cursor:
            message = cursor.mogrify(f"{opening}; {sql}", parameters)  # what the driver refuses is not sent
        try:
            found = rows(self.connection, message)
        except psycopg2.Error:
            _seen.discard(sql)
            # A message that PostgreSQL could not read (`IN ()`) has opened nothing; what can be told of it here is
            # that no transaction is open. In one that was open before, the savepoint's name tells (`undo`).
            if self.connection.get_transaction_status() != TRANSACTION_STATUS_IDLE:
                self._opened()
            raise
        self._opened()
        return found

    def begin(self) -> None:
        """Open the finishing transaction, or this job's part of it, once.

        Holds through an outage as long as there is no transaction that could be lost.
        """
        tries = 0
        while opening := self._opening():
            try:
                with noticing_outage(self.connection):
                    rows(self.connection, opening)
                self._opened()
            except DatabaseAway:
                if self.in_transaction:
                    raise
                self.connection = self._seat.reconnect(tries)
                tries += 1

    @contextmanager
    def apart(self) -> Iterator[JobSession]:
        """A transaction of its own, committed at the end of the block if this attempt still owns the job.

        For work that goes on from a saved cursor. Raises LeaseLost, and nothing of the block stays, when the job is
        not ours; UnrecoverableError when the finishing transaction is open (an atomic job, or `session` was used).
        """
        if self.in_transaction:
            raise UnrecoverableError(
                f"{self._type.name}: the finishing transaction is open, so nothing can be committed apart from it"
            )
        try:
            yield self.session
            self.session.flush()
        except BaseException:
            self.abandon()
            raise
        token = uninterrupted.set(True)
        try:
            with noticing_outage(self.connection):
                rows(self.connection, f"{HELD}; COMMIT; {NOTIFY}", self.fence)
            self.in_transaction = self.savepoint = False
        except DivisionByZero:
            raise LeaseLost(
                f"job {self.job_id}: attempt {self.attempt} no longer owns the job; nothing was written"
            ) from None
        finally:
            self.abandon()
            uninterrupted.reset(token)
        strike()

    def abandon(self) -> None:
        """Roll back the open transaction, if there is one, and let go of the session."""
        self.close()
        if self.in_transaction:
            with suppress(psycopg2.Error):  # a broken session has no transaction any more
                rows(self.connection, "ROLLBACK")
            self.in_transaction = self.savepoint = False

    def _opening(self) -> str:
        """The SQL that must come before the handler's first statement; nothing once it has been sent."""
        if self.savepoint:
            return ""
        if self.in_transaction:
            return f"RELEASE {self._behind}; {self._savepoint}" if self._behind else self._savepoint
        idle_ms = int(self._type.time_limit_s * 1200)
        return f"BEGIN; SET LOCAL idle_in_transaction_session_timeout = {idle_ms}; {self._savepoint}"

    @property
    def _savepoint(self) -> str:
        return f"SAVEPOINT {self.savepoint_name}"

    @property
    def _back(self) -> str:
        return f"ROLLBACK TO SAVEPOINT {self.savepoint_name}"

    def _note(self, sql: str) -> None:
        """Remember a statement that holds for longer than the job, where others share its transaction."""
        self.lasting = self.lasting or lasts(sql)

    def _opened(self) -> None:
        self.in_transaction = self.savepoint = True

    def write_outgoing(self) -> None:
        """Flush the session and insert the children into the finishing transaction."""
        if self.outgoing:
            self.begin()
        if self._session is not None:
            self._session.flush()
            while (nested := self._session.get_nested_transaction()) is not None:
                nested.commit()  # as the commit of a whole session does; closing it would undo what is in it
        if self.outgoing:
            within(lambda sql, values: rows(self.connection, sql, values), self.outgoing)

    def check_transaction(self) -> None:
        """Raise when the handler has left no transaction in which its success could be written.

        UnrecoverableError: it has ended it, by a way that nobody could refuse. TransientError: it has caught an error
        of the database and gone on, but everything that it wrote is undone by it.
        """
        if not self.in_transaction:
            return
        status = self.connection.get_transaction_status()
        if status == TRANSACTION_STATUS_IDLE:
            raise UnrecoverableError("the handler ended the finishing transaction itself")
        if status == TRANSACTION_STATUS_INERROR:
            raise TransientError("the handler went on after an error of the database, without a savepoint of its own")

    def undo(self) -> None:
        """Roll back what the handler wrote; the row lock of an atomic job stays (H13).

        Raises RunAgain when the transaction died with its database session, or never got as far as the savepoint: then
        nothing is left to undo, and what went wrong in the handler is no word about the job.
        """
        self.outgoing.clear()
        self.close()
        if not self.in_transaction:
            return
        if broken(self.connection):
            raise RunAgain("the job's transaction was lost with the database session")
        if self.connection.get_transaction_status() == TRANSACTION_STATUS_IDLE:
            self.in_transaction = self.savepoint = False  # the handler has ended it
        elif self.savepoint:
            try:
                rows(self.connection, self._back)
            except InvalidSavepointSpecification:
                raise RunAgain("the first statement could not be read, nor the savepoint before it") from None

    def close(self) -> None:
        """Let go of the session; the transaction is not touched."""
        if self._session is not None:
            with suppress(SQLAlchemyError, psycopg2.Error):
                self._session.close()
            self._session = None
