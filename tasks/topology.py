"""Exchanges and queues: quorum work queues that dead-letter at least once, and the quarantine queue behind the DLX."""

from __future__ import annotations

from typing import Any

from kombu import Exchange, Queue

EXCHANGE = "jobs"
WORK_QUEUE = "jobs"
DEAD_LETTER_EXCHANGE = "jobs.dlx"
QUARANTINE_QUEUE = "quarantine"

# At-least-once dead-lettering needs reject-publish: a full queue refuses new messages instead of dropping old ones.
WORK_ARGUMENTS: dict[str, Any] = {
    "x-queue-type": "quorum",
    "x-dead-letter-exchange": DEAD_LETTER_EXCHANGE,
    "x-dead-letter-routing-key": QUARANTINE_QUEUE,
    "x-dead-letter-strategy": "at-least-once",
    "x-overflow": "reject-publish",
    "x-delivery-limit": 20,  # a backstop far above our own crash limit: even then the message is dead-lettered
}
QUARANTINE_ARGUMENTS: dict[str, Any] = {"x-queue-type": "quorum", "x-overflow": "reject-publish"}

jobs_exchange = Exchange(EXCHANGE, type="direct", durable=True)
dead_letter_exchange = Exchange(DEAD_LETTER_EXCHANGE, type="direct", durable=True)


def work_queue(name: str, amqp: bool) -> Queue:
    """A work queue, bound under its own name. Redis/Valkey has lists, so it takes no arguments there."""
    return Queue(
        name,
        exchange=jobs_exchange,
        routing_key=name,
        durable=True,
        queue_arguments=WORK_ARGUMENTS if amqp else None,
    )


def quarantine_queue(amqp: bool) -> Queue:
    """The queue behind the dead-letter exchange; a plain list on Redis/Valkey."""
    return Queue(
        QUARANTINE_QUEUE,
        exchange=dead_letter_exchange,
        routing_key=QUARANTINE_QUEUE,
        durable=True,
        queue_arguments=QUARANTINE_ARGUMENTS if amqp else None,
    )


def task_queues(amqp: bool) -> list[Queue]:
    """The queues that a worker consumes by default; `-Q` chooses others, which the job types make known."""
    return [work_queue(WORK_QUEUE, amqp)]
