"""Atomic jobs that came by one delivery, several to a commit.

    chunk:  BEGIN, lock all -> savepoint, handler, next savepoint, handler, ... -> succeed all, COMMIT

Per job nothing changes: its own attempt, fence, savepoint, decision, retry, quarantine. What fails is rolled back to
its savepoint and gets its arrow in the same commit; the others are untouched. Whatever is wrong with the chunk itself
(a constraint at the commit, the lease, the database) loses the whole transaction, and each of its jobs is attempted
alone, where every such case has its answer.

The race: the process dies in the middle of a chunk. Nothing of it is committed, so nobody is blamed; the broker gives
the delivery back as redelivered, and then each job commits its own claim: only the one that kills its worker is counted
(H8). A chunk grows only as long as it takes `CHUNK_S`, so a slow job waits with few others behind its locks.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NoReturn
from uuid import UUID

import psycopg2
from psycopg2.extensions import TRANSACTION_STATUS_IDLE
from sqlalchemy.exc import SQLAlchemyError

from app import attempt, finish
from app.claim import Delivery, begin_atomic_all, may_begin_atomic
from app.clock import boottime_s
from app.ending import Ending, Outcome, Settlement
from app.errors import LeaseLost
from app.failures import account
from app.job import Job, RunAgain, StoppedEarly, current, uninterrupted, watching
from app.job_types import JobType
from app.journal import log
from app.outbox import give_back
from app.seat import DatabaseAway, Seat, broken
from app.settings import settings
from app.submit import NOTIFY
from app.tracing import attempt as traced
from app.watch import Watch, Watched
from db.pooled import with_pooled

CHUNK_S = 0.02
CHUNK_JOBS = 50  # PostgreSQL keeps 64 subtransactions of a transaction in memory that all can see
GIVEN_BACK = Ending(Settlement.IGNORE, reason="given back before it was started")


@dataclass
class Pace:
    """How many jobs of a type share a commit: doubled while they are quick, cut when they are not.

    `shares` is False once a handler has changed its transaction for those behind it.
    """

    jobs: int = 1
    shares: bool = True

    def note(self, jobs: int, took_s: float) -> None:
        """A chunk of so many jobs took so long."""
        if took_s > CHUNK_S:
            self.jobs = max(1, int(jobs * CHUNK_S / took_s))
        elif jobs >= self.jobs:
            self.jobs = min(CHUNK_JOBS, self.jobs * 2)
        self.jobs = self.jobs if self.shares else 1


_paces: dict[str, Pace] = {}


class Queue:
    """The jobs of one delivery that were not started; taken by the worker's loop, or given back by its watch."""

    def __init__(self, deliveries: Sequence[Delivery]) -> None:
        self._waiting = deque(deliveries)
        self._lock = threading.Lock()

    def take(self, count: int) -> list[Delivery]:
        """The next jobs; none when there are none left."""
        with self._lock:
            return [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]

    def give_back(self) -> None:
        """Let others do what is left; kept are jobs that the database does not know, or all when it does not answer."""
        with self._lock:
            if not self._waiting:
                return
            left = [delivery.job_id for delivery in self._waiting]
            with suppress(psycopg2.Error, SQLAlchemyError):
                unknown = with_pooled(
                    settings().need_database(),
                    settings().submit_timeout_s,
                    lambda connection: give_back(connection, left),
                )
                self._waiting = deque(delivery for delivery in self._waiting if delivery.job_id in unknown)
                log.info("delivery.given_back", jobs=len(left) - len(unknown))


def run(seat: Seat, deliveries: Sequence[Delivery], job_type: JobType, watch: Watch) -> list[Ending]:
    """Attempt all jobs of one delivery; how each of them ended, in order. Raises what `attempt.run` raises.

    Jobs that were given back because another one is slow, or because the worker is leaving, end as skipped.
    """
    queue = Queue(deliveries)
    watched = Watched(job_type.soft_time_limit_s, queue.give_back)
    token = watching.set(watched)
    watch.start(watched)
    try:
        endings = work_through(
            seat,
            queue,
            job_type,
            together=job_type.mode == "atomic" and all(may_begin_atomic(delivery) for delivery in deliveries),
        )
    finally:
        watch.stop(watched)
        watching.reset(token)
    return [endings.get(delivery.job_id, GIVEN_BACK) for delivery in deliveries]


def work_through(seat: Seat, queue: Queue, job_type: JobType, *, together: bool) -> dict[UUID, Ending]:
    """Attempt what is in the queue, chunk by chunk."""
    pace = _paces.setdefault(job_type.name, Pace())
    endings: dict[UUID, Ending] = {}
    while chunk := queue.take(pace.jobs if together else 1):
        if len(chunk) > 1:
            endings |= share(seat, chunk, job_type, pace)
        for delivery in chunk:
            if delivery.job_id not in endings:
                began = time.perf_counter()
                endings[delivery.job_id] = attempt.run(seat, delivery, job_type)
                if len(chunk) == 1:
                    pace.note(1, time.perf_counter() - began)
        if seat.lease.leaving:
            queue.give_back()
    return endings


def share(seat: Seat, chunk: Sequence[Delivery], job_type: JobType, pace: Pace) -> dict[UUID, Ending]:
    """Attempt the jobs of a chunk in one commit; the endings of those that have one, none when it was lost."""
    began = time.perf_counter()
    token = uninterrupted.set(True)
    shared: Chunk | None = None
    try:
        shared = Chunk(seat, job_type, pace)
        endings = shared.run(chunk)
    except Exception as error:  # noqa: BLE001  # whatever it is, alone each job has its own answer to it
        if shared is not None and shared.stands():
            return shared.sent
        log.warning(
            "chunk.lost",
            type=job_type.name,
            jobs=len(chunk),
            reason=account(error)[0],
            consequence="nothing of it is written; each job is attempted alone",
        )
        seat.drop()
        return {}
    except BaseException:
        seat.drop()  # no open transaction may stay behind it
        raise
    finally:
        uninterrupted.reset(token)
    pace.note(len(chunk), time.perf_counter() - began)
    return endings


class Chunk:
    """One transaction, and the jobs in it."""

    def __init__(self, seat: Seat, job_type: JobType, pace: Pace) -> None:
        self._seat, self._type, self._pace = seat, job_type, pace
        self._connection, self._worker_id = seat.connection(), seat.worker_id
        self._done: list[tuple[UUID, str, str | None]] = []
        self._savepoint, self._children = "", False
        self.sent: dict[UUID, Ending] = {}
        self._proof: finish.Holder | None = None

    def run(self, deliveries: Sequence[Delivery]) -> dict[UUID, Ending]:
        """Lock, run, commit. A job without an ending is to be attempted alone."""
        held = begin_atomic_all(self._connection, deliveries, self._worker_id)
        if not held:
            return {}
        endings = {}
        for delivery in deliveries:
            if (claimed := held.get(delivery.job_id)) is not None:
                holder = finish.Holder(claimed, delivery, self._worker_id, commits=False)
                with suppress(StoppedEarly):
                    endings[delivery.job_id] = self.one(holder)
                    self._proof = holder
        tag, self.sent = deliveries[0].delivery_tag, endings
        finish.succeed_all(self._connection, self._done, tag, self._worker_id, NOTIFY if self._children else "")
        return endings

    def stands(self) -> bool:
        """Whether the session broke after the commit had been sent, and it stands: all arrows of it, or none."""
        if not self.sent or self._proof is None or not broken(self._connection):
            return False
        try:
            return finish.outcome(self._seat.reconnect(0), self._proof) == "ours"
        except (psycopg2.Error, DatabaseAway):
            return False  # then each job learns it alone

    def one(self, holder: finish.Holder) -> Ending:
        """One job: its handler behind a savepoint; the arrow of a failure at once, that of a success at the end."""
        claimed = holder.claimed
        job = Job(self._seat, claimed, self._worker_id, self._type, behind=self._savepoint)
        token = current.set(job)
        trace = traced(
            claimed.type, job.job_id, job.attempt, job.correlation_id, job.trace_context, queue=self._type.queue
        )
        began = boottime_s()
        try:
            with trace as span:
                ending = replace(self.ending(holder, job), waited_s=claimed.waited_s, ran_s=boottime_s() - began)
                span.end(ending.outcome, ending.reason if ending.failure else None)
                return ending
        finally:
            current.reset(token)
            self._savepoint = job.savepoint_name if job.savepoint else self._savepoint
            job.close()

    def ending(self, holder: finish.Holder, job: Job) -> Ending:
        """Run the handler; decide what its error means. Raises StoppedEarly with nothing of the job left."""
        try:
            stored = attempt.effect(self._seat, job, holder.claimed)
        except (LeaseLost, RunAgain, DatabaseAway, SystemExit, KeyboardInterrupt):
            raise
        except (StoppedEarly, psycopg2.Error, SQLAlchemyError) as error:
            # A deadlock, a timeout, a name that is taken: what the others hold in this transaction may be the cause.
            self.step_back(job, error)
        except BaseException as error:  # noqa: BLE001  # CancelledError and the panics of extensions too
            self.still_open()
            decision = attempt.judge(holder, job, self._type, error)
            attempt.record(self._connection, holder, job, decision)
            return attempt.failed(decision)
        if job.lasting:
            self._pace.shares = False
            self.step_back(job, StoppedEarly("it changes the transaction for those behind it"))
        self._done.append((job.job_id, job.result_key, stored))
        self._children = self._children or bool(job.outgoing)
        return Ending(Settlement.SUCCEEDED, result_key=job.result_key, outcome=Outcome.SUCCEEDED)

    def still_open(self) -> None:
        """Raise RunAgain when a handler has ended the transaction of all, by a way that nobody could refuse."""
        if self._connection.get_transaction_status() == TRANSACTION_STATUS_IDLE:
            raise RunAgain("a handler ended the transaction")

    def step_back(self, job: Job, error: BaseException) -> NoReturn:
        """Leave nothing of the job in this transaction: it is attempted alone."""
        self.still_open()
        job.undo()
        raise StoppedEarly("to be attempted alone") from error
