"""The story of one attempt: delivery, claim, handler, finish; the only file that calls the arrows together.

    delivery -> claim refused  -> acknowledge (or reject, when a quarantined job still lacks its dead letter)
             -> claimed -> handler -> succeed     -> acknowledge
                                   -> retry       -> acknowledge; the debt brings it back
                                   -> quarantine  -> reject, through the dead-letter exchange
                                   -> lost        -> acknowledge; nothing was written
    database away, anywhere: hold the delivery, come back, find out what was written, carry on. Never blame the job.

Nothing is acknowledged here: `run` returns what is to be done with the delivery once the result is durable.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from uuid import UUID

import psycopg2
from psycopg2.extensions import connection as PgConnection
from sqlalchemy.exc import DBAPIError

from app import finish
from app.cancel import cancel
from app.claim import (
    Claimed,
    Delivery,
    Refusal,
    begin_atomic,
    claim,
    look,
    may_begin_atomic,
    received,
)
from app.clock import boottime_s, pause_s
from app.ending import Ending, Outcome, Settlement
from app.errors import LeaseLost, TransientError
from app.failures import Decision, History, account, decide
from app.job import Job, RunAgain, StoppedEarly, current, put_off, uninterrupted, watching
from app.job_types import JobType, find
from app.journal import log
from app.json_text import to_json
from app.release import give_back, release
from app.seat import DatabaseAway, Seat, broken, noticing_outage
from app.settings import settings
from app.submit import NOTIFY
from app.sweep import expire_redelivered
from app.tracing import attempt as traced
from db.session import rows

Handler = Callable[["Job", Any], Any]
LOCKED_LOOKS_S = (0.02, 0.03, 0.05)
LOCKED_LOOKS_REDELIVERED_S = (*LOCKED_LOOKS_S, 0.2, 0.3, 0.5, 0.9)

# An attempt whose session broke while the database answers is run again so often before it counts as a failure.
RERUNS = 3
EXIT_OUT_OF_MEMORY = 71
HANDLERS: dict[tuple[str, int], Handler] = {}


def run(seat: Seat, delivery: Delivery, job_type: JobType) -> Ending:
    """One delivery from claim to durable result; returns how it is to be settled. Holds through database outages.

    Raises nothing but SystemExit and KeyboardInterrupt of the handler: they end the process.
    """
    token = uninterrupted.set(True)
    try:
        return hold(seat, delivery, job_type)
    except BaseException:
        seat.drop()  # no open transaction may stay behind it
        raise
    finally:
        uninterrupted.reset(token)


def hold(seat: Seat, delivery: Delivery, job_type: JobType) -> Ending:
    """Try the delivery until it has an ending.

    An error that is neither the handler's nor an outage (a read-only or full database, a bug of ours) is held too:
    the job would stay `running` for as long as this worker lives if its delivery were given up.
    """
    tries = reruns = 0
    while True:
        try:
            ending = once(seat, delivery, job_type, first_try=tries == 0, spoilt=reruns >= RERUNS)
            if ending is not None:
                return ending
        except (DatabaseAway, RunAgain) as outage:
            seat.clock.wait()
            if tries == 0:
                log.warning(
                    "database.away" if isinstance(outage, DatabaseAway) else "attempt.again",
                    job_id=str(delivery.job_id),
                    error=str(outage),
                    consequence="nothing was written; the delivery is held until the database is back",
                )
            seat.drop()
            reruns += isinstance(outage, RunAgain) and seat.reachable()
        except Exception as error:  # noqa: BLE001
            seat.clock.wait()
            log.error(
                "attempt.broken",
                job_id=str(delivery.job_id),
                reason=account(error).reason,
                consequence="the delivery is held and tried again",
            )
            seat.drop()
            reruns += 1
        time.sleep(pause_s(tries))
        tries += 1


def once(seat: Seat, delivery: Delivery, job_type: JobType, *, first_try: bool, spoilt: bool = False) -> Ending | None:
    """Try the delivery once; None: this worker has no lease at the moment, try again.

    `spoilt`: the handler breaks its own session each time, so a failure is counted instead of another run.
    """
    connection = seat.connection()
    worker_id = seat.worker_id
    with noticing_outage(connection):
        if not first_try:
            release(connection, delivery.job_id, worker_id, seat.pid, "the database was away")
        claimed, expired = win(connection, seat.pid, delivery, job_type, worker_id, first_try)
        if claimed is Refusal.NO_LEASE:
            return None
        if isinstance(claimed, Refusal):
            if claimed is Refusal.EXPIRED:
                cancel(connection, delivery.job_id, cause="expired", reason=claimed.value)
            received(connection, delivery, worker_id, claimed)
            reject = claimed in (Refusal.QUARANTINED, Refusal.UNKNOWN)
            settlement = Settlement.QUARANTINED if reject else Settlement.IGNORE
            return Ending(settlement, reason=claimed.value, expired=expired)
    began = boottime_s()
    ending = work(seat, delivery, claimed, worker_id, job_type, spoilt)
    return replace(ending, waited_s=claimed.waited_s, ran_s=boottime_s() - began, expired=expired)


def win(
    connection: PgConnection, pid: int, delivery: Delivery, job_type: JobType, worker_id: UUID, first_try: bool
) -> tuple[Claimed | Refusal, bool]:
    """Claim the job, or say why not: a lock is looked at again shortly before it is believed.

    True when the job was taken from an owner that a redelivery proved dead.
    """
    expired = False
    looks = LOCKED_LOOKS_REDELIVERED_S if delivery.redelivered else LOCKED_LOOKS_S
    for number, wait_s in enumerate((*looks, None)):
        claimed = None
        if first_try and job_type.mode == "atomic" and may_begin_atomic(delivery):
            claimed = begin_atomic(connection, delivery, worker_id)
        if claimed is None:
            claimed = claim(connection, delivery, worker_id, pid)
        if claimed is not None:
            return claimed, expired
        refusal = look(connection, delivery, worker_id)
        if refusal is Refusal.OWNED and delivery.redelivered and delivery.redelivered_known:
            # The owner's session ends a moment after the broker gave its message back.
            gone = expire_redelivered(connection, delivery.job_id)
            expired = expired or gone
            again = gone or number < len(LOCKED_LOOKS_S)
        else:
            again = refusal is Refusal.LOCKED
        if not again or wait_s is None:
            return refusal, expired
        time.sleep(wait_s)
    raise AssertionError("unreachable")


def work(seat: Seat, delivery: Delivery, claimed: Claimed, worker_id: UUID, job_type: JobType, spoilt: bool) -> Ending:
    """Run the handler and write the arrow that its outcome calls for."""
    holder = finish.Holder(claimed, delivery, worker_id)
    job = Job(seat, claimed, worker_id, job_type)
    token = current.set(job)
    trace = traced(claimed.type, job.job_id, job.attempt, job.correlation_id, job.trace_context, queue=job_type.queue)
    try:
        with trace as span:
            ending = keep(seat, holder, job, job_type, spoilt)
            span.end(ending.outcome, ending.reason if ending.failure else None)
            return ending
    finally:
        current.reset(token)
        job.close()


def keep(seat: Seat, holder: finish.Holder, job: Job, job_type: JobType, spoilt: bool) -> Ending:
    """The attempt, or the end of one whose job belongs to another by now."""
    try:
        if spoilt:
            broke = TransientError("the database session broke under the handler each time, and the database answers")
            return fail(seat, holder, job, job_type, broke)
        return attempt(seat, holder, job, job_type)
    except LeaseLost as lost:
        log.error("job.lost", job_id=str(job.job_id), attempt=job.attempt, reason=str(lost))
        seat.drop()
        return Ending(Settlement.IGNORE, reason="lost to another attempt", outcome=Outcome.LOST)


def attempt(seat: Seat, holder: finish.Holder, job: Job, job_type: JobType) -> Ending:
    """The handler, then its arrow. Raises LeaseLost, RunAgain, DatabaseAway; every other error becomes a decision."""
    try:
        stored = effect(seat, job, holder.claimed)
    except (LeaseLost, RunAgain, DatabaseAway, SystemExit, KeyboardInterrupt):
        raise
    except StoppedEarly:
        return stop_early(seat, holder, job)
    except BaseException as error:  # noqa: BLE001  # CancelledError and the panics of extensions too
        return fail(seat, holder, job, job_type, error)
    try:
        write(seat, holder, job, lambda on: succeed(on, holder, job, stored))
    except (LeaseLost, RunAgain):
        raise
    except Exception as error:  # noqa: BLE001  # a constraint of the user's, or a time limit in mid-commit
        if not written(job, holder):
            return fail(seat, holder, job, job_type, error)
    return Ending(Settlement.SUCCEEDED, result_key=job.result_key, outcome=Outcome.SUCCEEDED)


def effect(seat: Seat, job: Job, claimed: Claimed) -> str | None:
    """Run the handler and write its children; the JSON text of what it returned."""
    wanted = find(claimed.type, claimed.version)
    job.payload = wanted.parse(claimed.payload)
    stored = storable(job, handle(seat, job, HANDLERS[wanted.name, wanted.version]))
    job.check_transaction()
    job.write_outgoing()
    return stored


def handle(seat: Seat, job: Job, handler: Handler) -> Any:
    """Call the handler: the only place where a soft time limit may strike.

    A process that the handler forked and that comes back here, however, shares our sockets: it must not write.
    """
    seat.clock.start()
    put_off.clear()
    token, watched = uninterrupted.set(False), watching.get()
    if watched is not None:
        watched.begin()
    try:
        return handler(job, job.payload)
    finally:
        if os.getpid() != seat.pid:
            os._exit(0)
        uninterrupted.reset(token)
        if watched is not None:
            watched.end()


def written(job: Job, holder: finish.Holder) -> bool:
    """Whether an arrow that was interrupted had been committed nevertheless."""
    with noticing_outage(job.connection):
        try:
            return finish.outcome(job.connection, holder) == "ours"
        except psycopg2.errors.InFailedSqlTransaction:
            return False


def stop_early(seat: Seat, holder: finish.Holder, job: Job) -> Ending:
    """Release the job of a handler that stopped when asked; an atomic one is rolled back and stays in the queue."""
    asked = "the handler stopped when it was asked to"
    job.undo()
    if holder.claimed.committed:
        if job.in_transaction:
            rows(job.connection, "ROLLBACK")
        release(job.connection, job.job_id, seat.worker_id, seat.pid, asked)
    else:
        give_back(job.connection, holder, asked)
    job.in_transaction = False
    return Ending(Settlement.IGNORE, reason="released", outcome=Outcome.RELEASED)


def fail(seat: Seat, holder: finish.Holder, job: Job, job_type: JobType, error: BaseException) -> Ending:
    """Undo what the handler wrote and write `retry` or `quarantine`; an outage of ours is no failure of the job."""
    decision = judge(holder, job, job_type, error)
    write(seat, holder, job, lambda on: record(on, holder, job, decision))
    return failed(decision)


def judge(holder: finish.Holder, job: Job, job_type: JobType, error: BaseException) -> Decision:
    """Undo what the handler wrote and decide what its error means. Raises RunAgain for an outage of ours."""
    if isinstance(error, DBAPIError | psycopg2.Error) and broken(job.connection):
        raise RunAgain("the database went away under the handler")
    if isinstance(error, MemoryError):
        # What a process does after it ran out of memory cannot be trusted: it ends, and the crash is counted.
        log.error("job.out_of_memory", job_id=str(job.job_id), type=job_type.name, attempt=job.attempt)
        os._exit(EXIT_OUT_OF_MEMORY)
    job.undo()
    claimed = holder.claimed
    history = History(claimed.failures, claimed.max_failures, claimed.age_s, claimed.last_delay_s)
    decision = decide(error, history, job_type.retry, job_type.classify, uncertain_may_retry=job.may_repeat)
    log.warning(
        "job.failed",
        job_id=str(job.job_id),
        type=job_type.name,
        attempt=job.attempt,
        failure=decision.failure,
        cause=decision.cause,
        reason=decision.reason,
        retry_in_s=decision.delay_s,
    )
    return decision


def failed(decision: Decision) -> Ending:
    """The ending that a recorded decision makes."""
    ending = Ending(Settlement.QUARANTINED, reason=decision.reason, failure=decision.failure, cause=decision.cause)
    if decision.delay_s is None:
        return replace(ending, outcome=Outcome.QUARANTINED)
    return replace(ending, settlement=Settlement.RETRIED, outcome=Outcome.RETRIED, delay_s=decision.delay_s)


def succeed(on: PgConnection, holder: finish.Holder, job: Job, result: str | None) -> None:
    """The arrow of a handler that returned."""
    wake = NOTIFY if job.outgoing else ""
    finish.succeed(on, holder, job.result_key, result, job.in_transaction, wake)


def record(on: PgConnection, holder: finish.Holder, job: Job, decision: Decision) -> None:
    """The arrow of a decision about a handler that failed."""
    cause, reason = decision.cause, decision.reason
    if decision.delay_s is not None:
        finish.retry(on, holder, decision.delay_s, cause, reason, in_transaction=job.in_transaction)
    else:
        finish.quarantine(
            on,
            holder,
            cause,
            reason,
            decision.fingerprint,
            failure=decision.failure,
            frames=decision.frames,
            offer_s=settings().resend_first_s,
            in_transaction=job.in_transaction,
        )


def write(seat: Seat, holder: finish.Holder, job: Job, arrow: Callable[[PgConnection], None]) -> None:
    """Write an arrow through outages: after a lost answer, read the row to learn whether it was written.

    Raises LeaseLost when the job belongs to another, RunAgain when the transaction with the handler's work is gone.
    """
    connection, tries = job.connection, 0
    while True:
        try:
            with noticing_outage(connection):
                if tries:
                    state = finish.outcome(connection, holder)
                    if state == "ours":
                        return
                    if state == "other":
                        raise LeaseLost(f"job {job.job_id}: another attempt owns the job")
                    if job.in_transaction:
                        raise RunAgain("the finishing transaction was lost with the database session")
                arrow(connection)
                return
        except DatabaseAway:
            connection = seat.reconnect(tries)
            tries += 1


def storable(job: Job, result: Any) -> str | None:
    """The return value as JSON text, or None: an effect is never undone for its handler's return value."""
    if result is None:
        return None
    try:
        return to_json(result)
    except (TypeError, ValueError, RecursionError) as error:
        log.warning(
            "result.dropped",
            job_id=str(job.job_id),
            reason=f"the handler returned a {type(result).__name__} that is not JSON ({error}); null is stored",
        )
        return None
