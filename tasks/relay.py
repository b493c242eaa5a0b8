"""The relay: takes due debts, publishes them, and decides nothing else.

Loop: take (committed) -> publish with confirms -> journal. It sleeps on LISTEN, the broker's socket and a poll, so an
idle system costs one look every `poll_s`, and a new job wakes it at once. Any number of relays work side by side.
Outages of database or broker end in a jittered pause and a new connection, never in a busy loop.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import psycopg2
from amqp.exceptions import PreconditionFailed
from psycopg2.extensions import connection as PgConnection

from app import outbox
from app.clock import boottime_s, pause_s
from app.coalesce import groups
from app.job_types import REGISTRY
from app.journal import JournalWriter, log
from app.metrics import counts
from app.settings import Settings
from db.session import connect, rows
from tasks.publisher import Publisher, PublishError

FULL_PAUSE_FIRST_S = 0.01
# A window that was refilled lately may be empty sooner than a doubling pause is over: workers would wait for it.
FULL_PAUSE_BUSY_S, BUSY_S = 0.1, 1.0


def jobs_per_delivery(name: str, version: int) -> int:
    """How many jobs of a type one delivery may carry; a type that only others know travels alone."""
    known = REGISTRY.get((name, version))
    return known.jobs_per_delivery if known is not None else 1


def one_by_one(_name: str, _version: int) -> int:
    """Where redelivered messages cannot be told, jobs that share a delivery could share no commit."""
    return 1


def limit(publisher: Publisher) -> Callable[[str, int], int]:
    """How many jobs may share a message of this broker."""
    return jobs_per_delivery if publisher.amqp else one_by_one


class Relay(threading.Thread):
    """One relay with a database session and a broker connection of its own."""

    def __init__(self, settings: Settings, journal: JournalWriter, queues: Sequence[str]) -> None:
        super().__init__(name="deadsure-relay", daemon=True)
        self._settings, self._journal, self._queues = settings, journal, queues
        self._database: PgConnection | None = None
        self._publisher: Publisher | None = None
        self._connected_before = False
        self._loss = threading.Event()
        self._reader, self._writer = socket.socketpair()
        self._going = True
        self._tries = 0
        self.succeeded_at = boottime_s()

    def note_loss(self) -> None:
        """Evidence from outside that messages were lost (a dead worker on a broker that does not give them back)."""
        self._loss.set()
        self._writer.send(b"w")

    def stop(self) -> None:
        """End after the batch at hand."""
        self._going = False
        self._writer.send(b"w")
        if self.is_alive():
            self.join(timeout=self._settings.confirm_timeout_s + 5)

    def run(self) -> None:
        """Pay debts until stopped."""
        while self._going:
            try:
                self._connect()
                self._work()
            except PreconditionFailed as error:
                log.error(
                    "relay.queue_differs",
                    detail=str(error.reply_text),
                    consequence="nothing is published; a queue's arguments cannot change in place",
                    next_step="delete the queue (rabbitmqctl delete_queue NAME): its jobs are in the database, "
                    "and are sent again to the new one",
                )
                self._pause(database=False)
            except Exception as error:  # noqa: BLE001  # whatever broke, the relay comes back
                counts.INTERRUPTED.inc()
                log.log(
                    logging.WARNING if self._tries == 0 else logging.INFO,
                    "relay.interrupted",
                    error=type(error).__name__,
                    detail=str(error) if isinstance(error, PublishError) else None,
                    consequence="debts wait in the database; connecting again",
                )
                self._pause(database=isinstance(error, psycopg2.Error))
        self._drop(database=True, broker=True)

    def _pause(self, *, database: bool) -> None:
        """Drop the connection that broke and wait, longer each time in a row.

        An outage of the database is none of the broker's: connecting again there would look like a loss of messages.
        """
        self._drop(database=database, broker=not database)
        self._sleep(pause_s(self._tries, 0.1, 5.0))
        self._tries += 1

    def _connect(self) -> None:
        if self._database is None or self._database.closed:
            self._database = connect(self._settings.need_database(), "deadsure relay", statement_timeout_s=30)
            rows(self._database, outbox.LISTEN)  # before the first poll: no job falls in between
        if self._publisher is None:
            publisher = Publisher(self._settings.need_broker(), self._queues, self._settings.confirm_timeout_s)
            self._publisher = publisher
            publisher.open()
            self._look_for_loss(publisher)
            self._connected_before = True

    def _look_for_loss(self, publisher: Publisher) -> None:
        """A queue made anew, or one with fewer messages than debts after a lost connection, has lost messages."""
        assert self._database is not None
        for queue in self._queues:
            lost = queue in publisher.created or (
                self._connected_before
                and publisher.depth(queue) < outbox.unpaid_messages(self._database, queue, limit(publisher))
            )
            if lost:
                log.warning("relay.loss_noticed", queue=queue, recreated=queue in publisher.created)
                self._note_loss(queue)

    def _note_loss(self, queue: str) -> None:
        """Make the debts due whose message is not to be seen."""
        assert self._database is not None
        assert self._publisher is not None
        outbox.note_loss(self._database, queue, self._settings.evidence_age_s, self._publisher.waiting(queue))

    def _work(self) -> None:
        """Pay until there is an error."""
        assert self._database is not None
        assert self._publisher is not None
        pause, moved_at = FULL_PAUSE_FIRST_S, boottime_s()
        while self._going:
            if self._loss.is_set():
                self._loss.clear()
                for queue in self._queues:
                    self._note_loss(queue)
            self._database.notifies.clear()
            moved = sum(self._pay(queue) for queue in self._queues)
            self._tries, self.succeeded_at = 0, boottime_s()
            if moved >= self._settings.batch:
                continue
            wait_s = self._wait_s()
            if moved:
                pause, moved_at = FULL_PAUSE_FIRST_S, boottime_s()
            if wait_s <= 0:
                # Overdue debts that could not be taken: the window is full, or another relay holds them.
                busy = boottime_s() - moved_at < BUSY_S
                longest_s = min(FULL_PAUSE_BUSY_S, self._settings.poll_s) if busy else self._settings.poll_s
                wait_s, pause = pause, min(pause * 2, longest_s)
            self._publisher.idle(readable=self._sleep(wait_s))

    def _pay(self, queue: str) -> int:
        assert self._database is not None
        assert self._publisher is not None
        debts = outbox.take(self._database, queue, self._settings)
        if not debts:
            return 0
        outcome = self._publisher.publish(queue, groups(debts, limit(self._publisher)))
        for debt in outcome.confirmed:
            self._journal.note(debt.job_id, "published", copy=debt.copy)
            counts.SENT_AS[sent_as(debt)].inc()
        if outcome.returned:
            log.error(
                "relay.unroutable",
                queue=queue,
                jobs=len(outcome.returned),
                reason=outcome.returned[0][1],
                consequence="the jobs wait; the queue is declared again",
            )
            outbox.note_returned(self._database, outcome.returned, self._settings.evidence_age_s)
            raise PublishError(f"queue {queue!r} is not there")
        if outcome.refused:
            raise PublishError(f"the broker refused {len(outcome.refused)} messages")
        return len(debts)

    def _wait_s(self) -> float:
        """Seconds until the next debt is due, at most `poll_s`."""
        assert self._database is not None
        due = [outbox.next_due_s(self._database, queue) for queue in self._queues]
        return min([self._settings.poll_s, *[s for s in due if s is not None]])

    def _sleep(self, seconds: float) -> bool:
        """Wait for a NOTIFY, a sign of the broker, `stop`, or the time; True when the broker's socket is readable.

        A NOTIFY that came in with the answer of a query is in `notifies` already: the socket will not show it again.
        """
        if self._database is not None and self._database.notifies:
            return False
        watched: list[Any] = [self._reader]
        if self._database is not None and not self._database.closed:
            watched.append(self._database)
        number = self._publisher.fileno() if self._publisher is not None else None
        if number is not None:
            watched.append(number)
        ready, _, _ = select.select(watched, [], [], seconds)
        if self._reader in ready:
            self._reader.recv(64)
        if self._database is not None and self._database in ready:
            self._database.poll()
        return number in ready

    def _drop(self, *, database: bool, broker: bool) -> None:
        if broker and self._publisher is not None:
            self._publisher.close()
            self._publisher = None
        if database and self._database is not None:
            self._database.close()
            self._database = None


def sent_as(debt: outbox.Debt) -> str:
    """What a message was, as the metrics count it."""
    if debt.kind == "trace":
        return "trace"
    return "first" if debt.copy == 1 else "resend"
