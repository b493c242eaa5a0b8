"""The intake: reads the quarantine queue into `dead_letters`, and stamps the episode each letter belongs to.

It acknowledges after the commit; a crash in between stores nothing twice. Several intakes share the queue. Where the
broker has no dead-letter exchange, `publish_copy` puts the message there, marked as the task layer's. Between its
messages it looks after those that are parked.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import psycopg2
from kombu import Connection, Consumer, Producer
from kombu.message import Message
from psycopg2.extensions import connection as PgConnection

from app.clock import boottime_s, pause_s
from app.dead_letters import DeadLetter, store
from app.journal import log
from app.metrics import counts
from app.settings import Settings
from db.session import connect
from tasks.headers import COPY, EPISODE, JOBS, SOURCE
from tasks.inspection import body_bytes, complaint, is_group, is_uuid, jobs_of, never_decompress
from tasks.parking import Offers
from tasks.topology import DEAD_LETTER_EXCHANGE, QUARANTINE_QUEUE, quarantine_queue

PREFETCH = 50
WAIT_S = 0.5
HEARTBEAT_S = 30


class Intake(threading.Thread):
    """One reader of the quarantine queue, with a broker connection and a database session of its own.

    `declares` is False for a reader that must not heal what it is there to test.
    """

    def __init__(self, settings: Settings, *, declares: bool = True) -> None:
        super().__init__(name="deadsure-intake", daemon=True)
        never_decompress()
        self._settings, self._declares = settings, declares
        self._stopped = threading.Event()
        self.succeeded_at = boottime_s()
        self._database: PgConnection | None = None
        self._offers = Offers(settings)

    def stop(self) -> None:
        """End after the message at hand."""
        self._stopped.set()
        if self.is_alive():
            self.join(timeout=10)

    def run(self) -> None:
        """Read until stopped; connect again when broker or database were away."""
        tries = 0
        while not self._stopped.is_set():
            try:
                with Connection(self._settings.need_broker(), heartbeat=HEARTBEAT_S, connect_timeout=5) as broker:
                    self._read(broker)
                    tries = 0
            except Exception as error:  # noqa: BLE001  # whatever broke, the messages stay in the queue
                log.log(
                    logging.WARNING if tries == 0 else logging.INFO, "intake.interrupted", error=type(error).__name__
                )
                if self._database is not None:
                    self._database.close()
                    self._database = None
                self._stopped.wait(pause_s(tries, 0.2, 5.0))
                tries += 1
        if self._database is not None:
            self._database.close()
        self._offers.close()

    def _read(self, broker: Connection) -> None:
        self._database = connect(self._settings.need_database(), "deadsure intake", statement_timeout_s=30)
        channel = broker.channel()
        channel.auto_decode = False  # the bytes as they were sent
        queue = quarantine_queue(self._settings.broker_is_amqp)(channel)
        if self._declares:
            queue.declare()
        with Consumer(
            channel,
            [queue],
            on_message=self._take,
            on_decode_error=self._take,
            prefetch_count=PREFETCH,
            auto_declare=False,
        ):
            while not self._stopped.is_set():
                if self._declares:  # a probe's intake decides nothing about what waits for others
                    self._offers.look(self._database)
                try:
                    broker.drain_events(timeout=WAIT_S)
                except TimeoutError:
                    broker.heartbeat_check()
                self.succeeded_at = boottime_s()

    def _take(self, message: Message, error: BaseException | None = None) -> None:
        assert self._database is not None
        letter = readable(message, error)
        for job_id in members(message, letter):
            self._store(replace(letter, job_id=job_id))
        message.ack()

    def _store(self, letter: DeadLetter) -> None:
        assert self._database is not None
        try:
            stamped, again = store(self._database, letter, self._settings.evidence_age_s)
        except psycopg2.DataError:
            # Nothing of a message that cannot be stored as it is may be lost: its bytes can always be kept.
            letter = replace(letter, headers={}, properties={}, reason=f"{letter.reason}; headers not storable")
            stamped, again = store(self._database, letter, self._settings.evidence_age_s)
        counts.STORED.inc()
        log.warning(
            "dead_letter.stored",
            job_id=str(letter.job_id) if letter.job_id else None,
            episode=letter.episode,
            stamped=stamped,
            debt_due_again=again,
            reason=letter.reason,
        )


def members(message: Message, letter: DeadLetter) -> Sequence[uuid.UUID | None]:
    """Whose dead letter it is: each job of a coalesced delivery has its own."""
    if letter.job_id is not None and JOBS in message.headers and is_group(message.headers):
        return jobs_of(message.headers)
    return [letter.job_id]


def readable(message: Message, error: BaseException | None) -> DeadLetter:
    """The dead letter of any message: what cannot be read is kept as bytes, with its headers where that goes."""
    try:
        letter = read(message)
    except Exception as unexpected:  # noqa: BLE001  # the intake must outlive every message
        reason = f"cannot be read ({type(unexpected).__name__})"
        return DeadLetter(None, None, None, {}, {}, body_bytes(message.body), reason)
    return letter if error is None else replace(letter, reason=f"cannot be read ({type(error).__name__})")


def read(message: Message) -> DeadLetter:
    """The dead letter of a message from the quarantine queue, readable or not."""
    headers = message.headers if isinstance(message.headers, Mapping) else {}
    ours = COPY in headers and is_uuid(str(headers.get("id")))
    body = message.body
    wrong = complaint(headers, body, message.content_type, message.content_encoding)
    return DeadLetter(
        job_id=uuid.UUID(str(headers["id"])) if ours else None,
        episode=number(headers.get(EPISODE)) if ours else None,
        copy=number(headers.get(COPY)) if ours else None,
        headers=dict(headers),
        properties={
            **{name: value for name, value in message.properties.items() if name != "application_headers"},
            "content_type": message.content_type,
            "content_encoding": message.content_encoding,
        },
        body=body_bytes(body),
        reason=wrong or ("rejected" if ours else "foreign message"),
        source="task layer" if headers.get(SOURCE) else "broker",
    )


def number(value: Any) -> int | None:
    """A small counter from a header; None when it is none."""
    fits = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 15
    return value if fits else None


def publish_copy(broker: Connection, message: Message) -> None:
    """Put a copy into the quarantine queue of a broker that has no dead-letter exchange. Raises its errors."""
    body, content_type, content_encoding = message.body, message.content_type, message.content_encoding
    if not publishable(body):
        body, content_type, content_encoding = body_bytes(body), "application/octet-stream", "binary"
    Producer(broker.default_channel).publish(
        body,
        exchange=DEAD_LETTER_EXCHANGE,
        routing_key=QUARANTINE_QUEUE,
        declare=[quarantine_queue(amqp=False)],
        headers={**message.headers, SOURCE: "task layer"},
        content_type=content_type,
        content_encoding=content_encoding,
        serializer=None,
    )


def publishable(body: Any) -> bool:
    """Whether kombu can publish the body as it came: bytes, or text that is UTF-8."""
    if isinstance(body, str):
        return body.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in body)
    return isinstance(body, bytes)
