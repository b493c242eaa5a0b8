"""A real message through the dead-letter exchange into `dead_letters`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator

from amqp import Message
from kombu import Queue
from psycopg2.extensions import connection as PgConnection

from app.checks.finding import Finding, error, ok, unchecked
from db.session import one, rows
from tasks.checks.broker_look import BrokerLook
from tasks.intake import Intake
from tasks.topology import DEAD_LETTER_EXCHANGE, QUARANTINE_QUEUE

PROBE_S = 10.0
LOOK_S = 0.1
ARRIVED = (
    "SELECT dead_letter_id FROM dead_letters WHERE received_at > clock_timestamp() - interval '1 min' AND body = %s"
)
FORGET = "DELETE FROM dead_letters WHERE dead_letter_id = %s"
WRITABLE = "SELECT NOT pg_is_in_recovery()"


class Blocked(Exception):
    """The broker has raised an alarm and reads nothing more from whoever publishes."""


def refuse(reason: str) -> None:
    """Called by the client when the broker says that it is blocked."""
    raise Blocked(reason)


def probe(look: BrokerLook) -> Iterator[Finding]:
    """Send, reject, and wait until the intake has stored it; what is missing is not declared by the way."""
    if look.queues[QUARANTINE_QUEUE] is None or not look.exchanges[DEAD_LETTER_EXCHANGE]:
        return  # reported, and a message would be lost
    writable = one(look.database, WRITABLE) if look.database is not None else None
    if look.database is None or writable != (True,):
        yield unchecked("dlx.probe", "no probe was sent: the database cannot store it", "look at DATABASE_URL")
        return
    try:
        yield send(look, look.database)
    except Blocked as reason:
        yield error(
            "broker.blocked",
            f"the broker takes no messages ({reason}): jobs wait in the database",
            "rabbitmq-diagnostics alarms; give it memory or disk",
        )


def send(look: BrokerLook, database: PgConnection) -> Finding:
    """The probe itself; raises the transport's errors."""
    look.broker.connection.on_blocked = refuse
    mark = f"probe {uuid.uuid4()}".encode()
    channel = look.broker.channel()
    queue = Queue(
        f"deadsure.probe.{uuid.uuid4()}",
        exclusive=True,
        auto_delete=True,
        queue_arguments={
            "x-dead-letter-exchange": DEAD_LETTER_EXCHANGE,
            "x-dead-letter-routing-key": QUARANTINE_QUEUE,
        },
    )(channel)
    queue.queue_declare()
    channel.basic_publish(Message(mark, content_type="text/plain"), exchange="", routing_key=queue.name)
    message = None
    until = time.monotonic() + PROBE_S
    while message is None and time.monotonic() < until:
        message = queue.get()
    if message is None:
        return error("dlx.probe", "the broker does not deliver", "look at its alarms and its log")
    message.reject()
    intake = Intake(look.settings, declares=False)
    intake.start()  # the probe must not depend on a worker's
    try:
        while time.monotonic() < until:
            row = one(database, ARRIVED, (mark,))
            if row is not None:
                rows(database, FORGET, (row[0],))
                return ok("dlx.probe", "a probe went through the dead-letter exchange into dead_letters")
            time.sleep(LOOK_S)
    finally:
        intake.stop()
    return error(
        "dlx.probe",
        f"a probe through the exchange {DEAD_LETTER_EXCHANGE} did not arrive within {PROBE_S:g} s",
        f"is the queue {QUARANTINE_QUEUE} bound to it? a worker's start declares both",
    )


CHECKS = (probe,)
