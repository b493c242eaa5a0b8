"""Queues, exchanges and bindings against what this release declares."""

from __future__ import annotations

from collections.abc import Iterator

from amqp.exceptions import PreconditionFailed
from kombu import Queue

from app.checks.finding import Finding, error, info, ok, warning
from tasks.checks.broker_look import BrokerLook
from tasks.checks.management import difference
from tasks.topology import (
    DEAD_LETTER_EXCHANGE,
    EXCHANGE,
    QUARANTINE_ARGUMENTS,
    QUARANTINE_QUEUE,
    WORK_ARGUMENTS,
    quarantine_queue,
    work_queue,
)

DECLARE = "start a worker or `deadsure relay`: each declares it when it connects"
DELETE = "stop the workers and delete it (rabbitmqctl delete_queue {0}): its jobs are in the database"
EMPTY_FIRST = "wait until the intake has emptied it, stop the workers and delete it (rabbitmqctl delete_queue {0})"
# What each argument is for, and the code under which its absence is reported.
CODES = {
    "x-queue-type": ("queue.type", "only a quorum queue is replicated, and counts deliveries"),
    "x-dead-letter-exchange": ("queue.dead_letter_exchange", "rejected messages would vanish"),
    "x-dead-letter-routing-key": ("queue.dead_letter_exchange", "rejected messages would not reach the quarantine"),
    "x-dead-letter-strategy": ("queue.dead_letter_strategy", "a dead letter may be lost on its way"),
    "x-overflow": ("queue.overflow", "a full queue would drop messages instead of refusing them"),
    "x-delivery-limit": ("queue.delivery_limit", "the backstop against a message that kills its workers"),
}


def queues_exist(look: BrokerLook) -> Iterator[Finding]:
    """Work queues that are not there."""
    absent = [name for name in look.work_queues if look.queues[name] is None]
    for name in absent:
        yield warning("queue.missing", f"queue {name} is missing", f"{DECLARE}; its jobs are in the database")
    if not absent:
        yield ok("queue.missing", f"the work queues are there: {', '.join(look.work_queues)}")


def arguments(look: BrokerLook) -> Iterator[Finding]:
    """Arguments of the queues: named one by one by the management API, as a whole by AMQP."""
    wrong = False
    for name, wanted in ((n, WORK_ARGUMENTS) for n in look.work_queues):
        for finding in compare(look, name, wanted, work_queue(name, amqp=True), DELETE):
            wrong = True
            yield finding
    for finding in compare(look, QUARANTINE_QUEUE, QUARANTINE_ARGUMENTS, quarantine_queue(amqp=True), EMPTY_FIRST):
        wrong = True
        yield finding
    if not wrong:
        yield ok("queue.arguments", "the queues that are there have the arguments that this release declares")


def compare(look: BrokerLook, name: str, wanted: dict[str, object], queue: Queue, cure: str) -> Iterator[Finding]:
    """What is wrong with one queue."""
    if look.queues[name] is None:
        return
    if look.management is not None:
        there = look.management.queue(name)
        args = {"x-queue-type": there.get("type", "classic"), **there["arguments"]}
        for argument, value in difference(wanted, args).items():
            code, why = CODES[argument]
            what = f"queue {name} has {argument} = {value}, this release declares {wanted[argument]}: {why}"
            yield error(code, what, cure.format(name))
        if not there["durable"]:
            yield error("queue.type", f"queue {name} is not durable: a restart deletes it", cure.format(name))
        return
    channel = look.broker.channel()
    try:
        # An existing queue is compared, not made: it was there a moment ago.
        queue(channel).queue_declare()
    except PreconditionFailed as refused:
        yield error(
            "queue.arguments",
            f"a queue has other arguments than this release declares: {refused.reply_text}",
            cure.format(name),
        )
        return
    channel.close()


def work_bindings(look: BrokerLook) -> Iterator[Finding]:
    """The way from the exchange into the work queues."""
    if not look.exchanges[EXCHANGE]:
        yield error("exchange.missing", f"exchange {EXCHANGE} is missing: nothing can be published", DECLARE)
        return
    if look.management is None:
        return
    for name in look.work_queues:
        if look.queues[name] is not None and not look.management.bound(EXCHANGE, name, name):
            yield error("queue.unbound", f"queue {name} is not bound to the exchange {EXCHANGE}", DECLARE)


def dead_letter_route(look: BrokerLook) -> Iterator[Finding]:
    """The way from a reject into the queue `quarantine`."""
    if not look.exchanges[DEAD_LETTER_EXCHANGE]:
        what = f"exchange {DEAD_LETTER_EXCHANGE} is missing: rejected messages are held in their queue, or vanish"
        yield error("dlx.missing", what, DECLARE)
        return
    if look.queues[QUARANTINE_QUEUE] is None:
        yield error("dlx.queue_missing", f"queue {QUARANTINE_QUEUE} is missing: dead letters go nowhere", DECLARE)
        return
    if look.management is None:
        return  # the probe tells
    if not look.management.bound(DEAD_LETTER_EXCHANGE, QUARANTINE_QUEUE, QUARANTINE_QUEUE):
        what = f"queue {QUARANTINE_QUEUE} is not bound to the exchange {DEAD_LETTER_EXCHANGE}: dead letters go nowhere"
        yield error("dlx.unbound", what, DECLARE)
    else:
        yield ok("dlx.bound", f"{DEAD_LETTER_EXCHANGE} leads to the queue {QUARANTINE_QUEUE}")


def what_amqp_cannot_tell(look: BrokerLook) -> Iterator[Finding]:
    """Without the management API some things stay unseen; say so."""
    if look.management is None:
        yield info(
            "management.unset",
            "without RABBITMQ_MANAGEMENT_URL policies, bindings, alarms, cluster members, consumer_timeout and "
            "unacknowledged messages were not looked at",
            "RABBITMQ_MANAGEMENT_URL=http://user:password@host:15672 deadsure doctor",
        )


CHECKS = (queues_exist, arguments, work_bindings, dead_letter_route, what_amqp_cannot_tell)
