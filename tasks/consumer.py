"""Celery's consumer without what durable jobs must not have, with a look at each message before Celery's own.

Every message ends in one of four ways: a request for the pool, a park (unknown here), an adoption (foreign), or a dead
letter. None is acknowledged away, and none stops the worker.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

from celery import bootsteps
from celery.worker.consumer import Consumer
from celery.worker.consumer.tasks import Tasks
from kombu.message import Message
from psycopg2.extensions import connection as PgConnection
from pydantic import ValidationError

from app.adopt import adopt
from app.errors import DeadsureError
from app.job_types import REGISTRY, JobType, find
from app.journal import JournalWriter, log
from app.metrics import counts
from app.park import Parked, park
from app.parked import keep
from app.settings import settings
from app.tracing import HEADER
from tasks.headers import COPY, EPISODE, JOBS, VERSION
from tasks.inspection import complaint, is_group, is_of_a_job, is_uuid, jobs_of, never_decompress, priority_of, time_of
from tasks.parking import parked
from tasks.services import journal, services
from tasks.settler import Settle

LOGGER = logging.getLogger("deadsure")  # kombu tells it when a settlement cannot be sent
NO_DELAYED_DELIVERY = "celery.worker.consumer.delayed_delivery:DelayedDelivery"


class DurableConsumer(Consumer):
    """No native delayed delivery: later work waits in the database, never as a message."""

    class Blueprint(Consumer.Blueprint):
        """Celery's steps but one."""

        default_steps = tuple(step for step in Consumer.Blueprint.default_steps if step != NO_DELAYED_DELIVERY)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        never_decompress()
        super().__init__(*args, **kwargs)

    def create_task_handler(self, *args: Any, **kwargs: Any) -> Callable[[Message], Any]:
        """Celery's handler behind the inspection; what it still stumbles over is dead-lettered."""
        inner = super().create_task_handler(*args, **kwargs)
        ours_to_retry = self.connection_errors + self.channel_errors

        def on_task_received(message: Message) -> None:
            services().note_consumed(message.delivery_info.get("routing_key"))
            try:
                if not self.intercept(message):
                    inner(message)
            except ours_to_retry:
                raise  # the connection broke: Celery connects again
            except Exception as error:  # noqa: BLE001  # whatever a message can do, the worker lives
                self.dead_letter(message, f"Celery could not take it ({type(error).__name__})")

        return on_task_received

    def intercept(self, message: Message) -> bool:
        """Deal with a message that is not for the pool; False for one that is."""
        wrong = complaint(message.headers, message.body, message.content_type, message.content_encoding)
        if wrong is not None:
            self.dead_letter(message, wrong)
            return True
        name, ours = message.headers["task"], COPY in message.headers
        if ours and (name, message.headers.get(VERSION)) not in REGISTRY:
            self.park(message)
            return True
        durable = any(known == name for known, _ in REGISTRY)
        if durable and not ours:
            version = message.headers.get(VERSION)  # a client may say which one it means
            if version is None or (name, version) in REGISTRY:
                self.adopt(message, find(name, version))
            else:
                self.keep(message, "no such version here")
            return True
        if not durable and name not in self.strategies:
            self.keep(message, "no such task here")
            return True
        return False

    def park(self, message: Message) -> None:
        """Leave a job of an unknown type or version to other workers; quarantined after the grace period."""
        jobs, copy = jobs_of(message.headers), message.headers[COPY]
        episode = message.headers.get(EPISODE) or 0

        def work(connection: PgConnection) -> Settle:
            became = [
                park(
                    connection,
                    job_id,
                    copy,
                    episode,
                    services().keeper.worker_id,
                    settings().park_grace_s,
                    settings().resend_first_s,
                )
                for job_id in jobs
            ]
            for _ in range(became.count(Parked.QUARANTINED)):
                counts.of_type(message.headers["task"]).note_quarantine("unknown_type")
            # Of a coalesced delivery the debts bring the missing dead letters, but a job that is not there has none.
            keep = Parked.LEFT in became and Parked.UNKNOWN not in became
            return Settle.ACK if keep else Settle.REJECT

        counts.MESSAGES.labels("parked").inc()
        services().settler.put(work, partial(self.settle, message), on_bug=Settle.REJECT)

    def adopt(self, message: Message, job_type: JobType) -> None:
        """Make a job of a foreign message, or dead-letter it with the reason."""
        if not job_type.foreign:
            self.keep(message, "the type does not accept foreign messages", only_if_readable=True)
            return
        task_id = message.headers["id"]
        if not is_uuid(task_id):
            self.dead_letter(message, "header id is no UUID")
            return
        args, kwargs, embed = message.payload
        if any((embed or {}).values()):
            self.dead_letter(message, "callbacks, chains and chords are not supported on a durable task")
            return
        terms: dict[str, Any] = {
            "priority": priority_of(message.properties, job_type.priority, amqp=settings().broker_is_amqp),
            **{name: time_of(message.headers.get(name)) for name in ("eta", "expires")},
            "correlation_id": message.properties.get("correlation_id"),
            "traceparent": message.headers.get(HEADER),
        }

        def work(connection: PgConnection) -> Settle:
            try:
                fields = self.app.tasks[job_type.name].fields(args, kwargs)
                job_id = adopt(connection, uuid.UUID(task_id), job_type, fields, **terms)
            except (ValidationError, DeadsureError, TypeError, ValueError) as error:
                # A release with another version of the type may take what this one cannot.
                if self.kept(connection, message, "not valid for the type here", only_if_readable=True):
                    return Settle.ACK
                log.error("message.not_adopted", type=job_type.name, error=type(error).__name__)
                return Settle.REJECT
            counts.MESSAGES.labels("adopted").inc()
            log.info("message.adopted", job_id=str(job_id), task_id=task_id, type=job_type.name)
            return Settle.ACK

        services().settler.put(work, partial(self.settle, message), on_bug=Settle.REJECT)

    def keep(self, message: Message, reason: str, *, only_if_readable: bool = False) -> None:
        """Keep a message without a job for another release; a dead letter where nobody else may read it."""

        def work(connection: PgConnection) -> Settle:
            if self.kept(connection, message, reason, only_if_readable=only_if_readable):
                return Settle.ACK
            return Settle.REJECT

        services().settler.put(work, partial(self.settle, message), on_bug=Settle.REJECT)

    def kept(self, connection: PgConnection, message: Message, reason: str, *, only_if_readable: bool) -> bool:
        """Park the message in the database; False when nobody who lives may read it and that was asked."""
        name, task_id = message.headers["task"], message.headers["id"]
        tried = [known for known in services().keeper.accepts if known.rpartition("@")[0] == name]
        done = keep(
            connection,
            parked(message, self.queue_of(message), reason),
            task_id,
            tried,
            settings().resend_first_s,
            only_if_readable=only_if_readable,
        )
        counts.MESSAGES.labels("parked" if done else "dead_lettered").inc()
        if done:
            log.warning("message.parked", task_id=task_id, type=name, reason=reason)
        else:
            log.error("message.dead_lettered", reason=reason, routing_key=message.delivery_info.get("routing_key"))
        return done

    def queue_of(self, message: Message) -> str:
        """The queue that it came from, by whatever exchange and routing key."""
        tag = message.delivery_info.get("consumer_tag")
        # kombu tells the queue of a consumer by this alone; Redis/Valkey has no tags, and its routing key is the queue.
        for queue, known in self.task_consumer._active_tags.items():  # noqa: SLF001
            if known == tag:
                return str(queue)
        return str(message.delivery_info["routing_key"])

    def dead_letter(self, message: Message, reason: str) -> None:
        """Send the message through the dead-letter exchange (or publish its copy where there is none)."""
        counts.MESSAGES.labels("dead_lettered").inc()
        log.error("message.dead_lettered", reason=reason, routing_key=message.delivery_info.get("routing_key"))
        self.settle(message, Settle.REJECT)

    def settle(self, message: Message, answer: Settle) -> None:
        """Settle a message that never became a request; the event loop sends the frame."""
        if answer is Settle.REJECT and not settings().broker_is_amqp:
            services().publish_dead_letter(message, partial(self.settle, message, Settle.ACK))
            return
        act = message.ack_log_error if answer is Settle.ACK else message.reject_log_error
        self.call_soon(act, LOGGER, self.connection_errors)

    def note_queues(self) -> None:
        """Let the lease say what this worker consumes: others wait for it with what they cannot read."""
        services().keeper.queues = sorted(queue.name for queue in self.task_consumer.queues)

    def add_task_queue(self, *args: Any, **kwargs: Any) -> None:
        """Celery's remote control."""
        super().add_task_queue(*args, **kwargs)
        self.note_queues()

    def cancel_task_queue(self, queue: str) -> None:
        """Celery's remote control."""
        super().cancel_task_queue(queue)
        self.note_queues()

    def on_decode_error(self, message: Message, exc: BaseException) -> None:
        """Celery would acknowledge it away."""
        self.dead_letter(message, f"the body cannot be decoded ({type(exc).__name__})")


class NoteSettlements(bootsteps.StartStopStep):
    """Journal `ack_sent` and `reject_sent` where the frame is really written, with its delivery tag."""

    requires = (Tasks,)

    def start(self, parent: Any) -> None:
        """Give the consumer's channel a message class that notes its settlements."""
        parent.note_queues()
        channel = parent.task_consumer.channel
        channel.Message = noting(type(channel).Message, journal())


def noting(kind: type, journal: JournalWriter) -> type:
    """A subclass of the transport's message class whose settlements are journaled once they were sent."""

    class NotingMessage(kind):
        """A message that notes what was sent about it."""

        def ack(self, multiple: bool = False) -> None:
            super().ack(multiple=multiple)
            self.note("ack_sent")

        def reject(self, requeue: bool = False) -> None:
            super().reject(requeue=requeue)
            self.note("reject_sent", "requeued" if requeue else None)

        def requeue(self) -> None:
            super().requeue()
            self.note("reject_sent", "requeued")

        def note(self, event: str, reason: str | None = None) -> None:
            """Only messages of jobs have a journal."""
            headers = self.headers
            if not is_of_a_job(headers):
                return
            for job_id in jobs_of(headers) if JOBS in headers and is_group(headers) else [uuid.UUID(headers["id"])]:
                journal.note(
                    job_id,
                    event,
                    copy=headers[COPY],
                    delivery_tag=str(self.delivery_tag),
                    redelivered=bool(self.delivery_info.get("redelivered")),
                    worker_id=services().keeper.worker_id,
                    reason=reason,
                )

    return NotingMessage
