"""Celery's consumer without what durable jobs must not have, and with acknowledgements that leave a trace."""

from __future__ import annotations

import uuid
from typing import Any

from celery import bootsteps
from celery.worker.consumer import Consumer
from celery.worker.consumer.tasks import Tasks

from app.journal import JournalWriter
from tasks.headers import COPY
from tasks.services import journal, services

NO_DELAYED_DELIVERY = "celery.worker.consumer.delayed_delivery:DelayedDelivery"


class DurableConsumer(Consumer):
    """No native delayed delivery: later work waits in the database, never as a message."""

    class Blueprint(Consumer.Blueprint):
        """Celery's steps but one."""

        default_steps = tuple(step for step in Consumer.Blueprint.default_steps if step != NO_DELAYED_DELIVERY)


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
            if COPY not in headers:
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
