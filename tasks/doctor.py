"""`deadsure doctor`: configuration, schema, topology, and a real probe through the dead-letter exchange."""

from __future__ import annotations

import time
import uuid
from contextlib import closing

import click
from amqp import Message
from amqp.exceptions import PreconditionFailed
from kombu import Connection, Queue
from psycopg2.extensions import connection as PgConnection

from app.cli.main import database
from app.cli.output import json_option, print_json, print_table, reporting_errors
from app.health import Finding, Severity, progress, traces, unknown_types
from app.job_types import REGISTRY, queues
from app.journal import configure_logging
from app.settings import settings
from db.migrate import check
from db.session import one, rows
from tasks.intake import Intake
from tasks.publisher import Publisher
from tasks.topology import DEAD_LETTER_EXCHANGE, QUARANTINE_QUEUE

PROBE_S = 10.0
LOOK_S = 0.1
TRACE_AGE_S = 120.0
ARRIVED = (
    "SELECT dead_letter_id FROM dead_letters WHERE received_at > clock_timestamp() - interval '1 min' AND body = %s"
)
FORGET = "DELETE FROM dead_letters WHERE dead_letter_id = %s"


@click.command("doctor")
@click.option("--pre-deploy", is_flag=True, help="Only: waiting jobs that the installed code cannot handle.")
@json_option
@reporting_errors
def doctor(pre_deploy: bool, as_json: bool) -> None:
    """Look for what is wrong or missing; exit code 1 when something is."""
    configure_logging(settings().log, "ERROR")  # to stderr; the intake of the probe would log into the answer
    with database() as connection:
        check(connection)
        findings = unknown_types(connection, REGISTRY)
        if not pre_deploy:
            findings += [Finding(Severity.OK, "the schema fits this release")]
            findings += [traces(connection, TRACE_AGE_S), *progress(connection, settings().resend_first_s)]
            # The probe first: looking at the queues declares what is missing, and would hide it.
            findings.append(probe(connection) if settings().broker_is_amqp else NO_EXCHANGE)
            findings += topology()
    if as_json:
        print_json([{"severity": f.severity, "what": f.what, "next_step": f.next_step} for f in findings])
    else:
        print_table("doctor", ("severity", "what", "next step"), [(f.severity, f.what, f.next_step) for f in findings])
    if any(finding.severity is Severity.ERROR for finding in findings):
        raise SystemExit(1)


NO_EXCHANGE = Finding(
    Severity.OK, "this broker has no dead-letter exchange: the task layer publishes the copies, and says so"
)


def topology() -> list[Finding]:
    """Whether the queues can be declared as this release wants them."""
    publisher = Publisher(settings().need_broker(), queues(), settings().confirm_timeout_s)
    try:
        publisher.open()
    except PreconditionFailed as error:
        return [
            Finding(
                Severity.ERROR,
                f"a queue has other arguments than this release declares: {error.reply_text}",
                "stop the workers and delete it (rabbitmqctl delete_queue NAME): its jobs are in the database",
            )
        ]
    except publisher.errors as error:
        return [Finding(Severity.ERROR, f"the broker does not answer ({type(error).__name__})", "look at BROKER_URL")]
    finally:
        publisher.close()
    made = [Finding(Severity.WARNING, f"queue {name} was missing; it is declared now") for name in publisher.created]
    return made or [Finding(Severity.OK, "the work queues are as declared")]


def probe(connection: PgConnection) -> Finding:
    """Send a message through the dead-letter exchange and wait until the intake has stored it."""
    with closing(Connection(settings().need_broker(), connect_timeout=5)) as broker:
        try:
            return send_probe(connection, broker)
        except (OSError, *broker.connection_errors, *broker.channel_errors) as error:
            return Finding(Severity.ERROR, f"no probe could be sent ({type(error).__name__})", "look at BROKER_URL")


def send_probe(connection: PgConnection, broker: Connection) -> Finding:
    """`probe` on an open connection; raises the transport's errors."""
    mark = f"probe {uuid.uuid4()}".encode()
    channel = broker.channel()
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
        return Finding(Severity.ERROR, "the broker does not deliver", "look at its alarms and its log")
    message.reject()
    intake = Intake(settings())
    intake.start()  # the probe must not depend on a worker's
    try:
        while time.monotonic() < until:
            row = one(connection, ARRIVED, (mark,))
            if row is not None:
                rows(connection, FORGET, (row[0],))
                return Finding(Severity.OK, "a probe went through the dead-letter exchange into dead_letters")
            time.sleep(LOOK_S)
    finally:
        intake.stop()
    return Finding(
        Severity.ERROR,
        f"a probe through the exchange {DEAD_LETTER_EXCHANGE} did not arrive within {PROBE_S:g} s",
        f"is the queue {QUARANTINE_QUEUE} bound to it? a worker's start declares both",
    )
