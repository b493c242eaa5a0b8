"""The threads of a worker's main process, and each process' place in the worker."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from typing import Any

import billiard
from kombu import Connection

from app.clock import boottime_s
from app.errors import ConfigurationError
from app.job_types import queues
from app.journal import JournalWriter
from app.lease import Keeper
from app.limit_clock import LimitClocks
from app.metrics.endpoint import Endpoint
from app.seat import Seat
from app.settings import Settings, settings
from app.sweep import Swept
from app.watch import Watch
from tasks.child import take_signals
from tasks.gauges import LoopGauges, WorkerGauges
from tasks.intake import Intake, publish_copy
from tasks.relay import Relay
from tasks.settler import Settle, Settler, broker, database
from tasks.sweeper import SweeperThread


class Services:
    """The threads of one worker's main process. `leaving` is True once the worker was asked to stop."""

    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper
        self.clocks = LimitClocks()
        self.leaving = False
        self.journal = JournalWriter(settings().need_database())
        self.settler = Settler(database(settings().need_database()))
        self.relay: Relay | None = None
        self.intake: Intake | None = None
        self.sweeper: SweeperThread | None = None
        self.consumed_at: dict[str, float] = {}  # by queue; `boottime_s`
        self.processes: Callable[[], int] = lambda: 0
        self.endpoint: Endpoint | None = None
        self.undertaker = Settler(broker(settings().need_broker()))  # waits for the broker: not in the settler's way

    def start(self, with_relay: bool) -> None:
        """Start the threads; the pool has forked."""
        if with_relay:
            self.relay = Relay(settings(), self.journal, queues())
            self.intake = Intake(settings())
        self.sweeper = SweeperThread(settings(), self._on_workers_lost)
        for thread in (
            self.keeper,
            self.journal,
            self.settler,
            self.undertaker,
            self.relay,
            self.intake,
            self.sweeper,
        ):
            if thread is not None:
                thread.start()
        loops = LoopGauges(relay=self.relay, intake=self.intake, sweeper=self.sweeper)
        self.endpoint = Endpoint(settings(), queues(), [WorkerGauges(self), loops])
        self.endpoint.start()

    def consume(self, names: Iterable[str], processes: Callable[[], int]) -> None:
        """Say which queues this worker consumes, and how to learn the size of its pool."""
        self.consumed_at, self.processes = dict.fromkeys(names, boottime_s()), processes

    def note_consumed(self, queue: str | None) -> None:
        """A message of a queue has just come in."""
        if queue in self.consumed_at:
            self.consumed_at[queue] = boottime_s()

    def stop(self) -> None:
        """Stop in the order in which they need each other; the lease last."""
        for thread in (
            self.relay,
            self.intake,
            self.sweeper,
            self.settler,
            self.undertaker,
            self.journal,
            self.keeper,
            self.endpoint,  # until the end: a drain is to be seen
        ):
            if thread is not None:
                thread.stop()

    def publish_dead_letter(self, message: Any, acknowledge: Callable[[], Any]) -> None:
        """Where the broker has no dead-letter exchange: publish the copy, then acknowledge the message."""

        def work(connection: Connection) -> Settle:
            publish_copy(connection, message)
            return Settle.ACK

        self.undertaker.put(work, lambda _answer: acknowledge())

    def _on_workers_lost(self, swept: Swept) -> None:
        if self.relay is not None and keeps_messages(swept, settings()):
            self.relay.note_loss()


def keeps_messages(swept: Swept, settings: Settings) -> bool:
    """Whether the broker will not give back what the lost workers held, for a while at least: evidence of loss.

    Redis/Valkey never does at once. RabbitMQ does when the socket of a dead worker closes; a frozen one keeps its
    messages until the heartbeat ends its connection.
    """
    return swept.silent > 0 or not settings.broker_is_amqp


_present: list[Services] = []
_seats = threading.local()
_watches: list[Watch] = []


def begin_services(keeper: Keeper) -> None:
    """Make this process a worker, before its pool forks."""
    _present[:] = [Services(keeper)]


def end_services() -> None:
    """Stop what runs, if this process is a worker."""
    for present in _present:
        present.stop()


def services() -> Services:
    """The services of this worker; inherited by its children, who use the lease's shared memory only."""
    if not _present:
        raise ConfigurationError("durable jobs run in a worker: celery -A tasks worker")
    return _present[0]


def journal() -> JournalWriter:
    """The main process' journal writer."""
    return services().journal


def watch() -> Watch:
    """What looks at the jobs of this process' coalesced deliveries."""
    if not _watches or _watches[0].pid != os.getpid():
        _watches[:] = [Watch(may_tell=billiard.current_process().name != "MainProcess")]
    return _watches[0]


def seat() -> Seat:
    """This process' (and thread's) place in the worker."""
    found: Seat | None = getattr(_seats, "seat", None)
    if found is None or found.pid != os.getpid():
        clock = services().clocks.child(getattr(billiard.current_process(), "index", -1), os.getpid())
        found = Seat(services().keeper.shared, settings().need_database(), clock)
        _seats.seat = found
        take_signals(found.lease)
    return found
