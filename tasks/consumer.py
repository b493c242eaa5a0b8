"""Celery's consumer without what durable jobs must not have, with a look at each message before Celery's own.

Every message ends in one of four ways: a request for the pool, a park (type unknown here), an adoption (foreign), or a
dead letter. None is acknowledged away, and none stops the worker.
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
from app.park import park
from app.settings import settings
from app.tracing import HEADER
from tasks.headers import COPY, EPISODE, VERSION
from tasks.inspection import complaint, is_of_a_job, is_uuid, never_decompress, time_of
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
            self.adopt(message, find(name))
            return True
        if not durable and name not in self.strategies:
            self.dead_letter(message, "no such task here")
            return True
        return False

    def park(self, message: Message) -> None:
        """Leave a job of an unknown type or version to other workers; quarantined after the grace period."""
        job_id, copy = uuid.UUID(message.headers["id"]), message.headers[COPY]
        episode = message.headers.get(EPISODE) or 0

        def work(connection: PgConnection) -> Settle:
            over = park(
                connection,
                job_id,
                copy,
                episode,
                services().keeper.worker_id,
                settings().park_grace_s,
                settings().resend_first_s,
            )
            return Settle.REJECT if over else Settle.ACK

        services().settler.put(work, partial(self.settle, message), on_bug=Settle.REJECT)

    def adopt(self, message: Message, job_type: JobType) -> None:
        """Make a job of a foreign message, or dead-letter it with the reason."""
        if not job_type.foreign:
            self.dead_letter(message, "the type does not accept foreign messages")
            return
        task_id = message.headers["id"]
        if not is_uuid(task_id):
            self.dead_letter(message, "header id is no UUID")
            return
        args, kwargs, embed = message.payload
        if any((embed or {}).values()):
            self.dead_letter(message, "callbacks, chains and chords are not supported on a durable task")
            return
        eta, expires = (time_of(message.headers.get(name)) for name in ("eta", "expires"))
        lineage = {
            "correlation_id": message.properties.get("correlation_id"),
            "traceparent": message.headers.get(HEADER),
        }

        def work(connection: PgConnection) -> Settle:
            try:
                fields = self.app.tasks[job_type.name].fields(args, kwargs)
                job_id = adopt(connection, uuid.UUID(task_id), job_type, fields, eta=eta, expires=expires, **lineage)
            except (ValidationError, DeadsureError, TypeError, ValueError) as error:
                log.error("message.not_adopted", type=job_type.name, error=type(error).__name__)
                return Settle.REJECT
            log.info("message.adopted", job_id=str(job_id), task_id=task_id, type=job_type.name)
            return Settle.ACK

        services().settler.put(work, partial(self.settle, message), on_bug=Settle.REJECT)

    def dead_letter(self, message: Message, reason: str) -> None:
        """Send the message through the dead-letter exchange (or publish its copy where there is none)."""
        log.error("message.dead_lettered", reason=reason, routing_key=message.delivery_info.get("routing_key"))
        self.settle(message, Settle.REJECT)

    def settle(self, message: Message, answer: Settle) -> None:
        """Settle a message that never became a request; the event loop sends the frame."""
        if answer is Settle.REJECT and not settings().broker_is_amqp:
            services().publish_dead_letter(message, partial(self.settle, message, Settle.ACK))
            return
        act = message.ack_log_error if answer is Settle.ACK else message.reject_log_error
        self.call_soon(act, LOGGER, self.connection_errors)

    def on_decode_error(self, message: Message, exc: BaseException) -> None:
        """Celery would acknowledge it away."""
        self.dead_letter(message, f"the body cannot be decoded ({type(exc).__name__})")


class NoteSettlements(bootsteps.StartStopStep):
    """Journal `ack_sent` and `reject_sent` where the frame is really written, with its delivery tag."""

    requires = (Tasks,)

    def start(self, parent: Any) -> None:
        """Give the consumer's channel a message class that notes its settlements."""
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
            journal.note(
                uuid.UUID(headers["id"]),
                event,
                copy=headers[COPY],
                delivery_tag=str(self.delivery_tag),
                redelivered=bool(self.delivery_info.get("redelivered")),
                worker_id=services().keeper.worker_id,
                reason=reason,
            )

    return NotingMessage
