"""Parked messages on their way out of the broker and back into it."""

from __future__ import annotations

from contextlib import suppress

import psycopg2
from kombu import Connection, Producer
from kombu.message import Message
from kombu.utils.json import dumps, loads
from psycopg2.extensions import connection as PgConnection

from app.clock import boottime_s, pause_s
from app.journal import log
from app.parked import Parked, give_up, offer
from app.settings import Settings
from tasks.inspection import body_bytes

PROPERTIES = ("correlation_id", "reply_to", "priority")
PAGE = 100  # messages at one look: whoever looks has other duties


def parked(message: Message, queue: str, reason: str) -> Parked:
    """The message of a queue as a row; raises TypeError or ValueError when its headers cannot be written down.

    Headers that the broker added stay behind: with them RabbitMQ would take the message for a cycle.
    """
    envelope = {
        "headers": {name: value for name, value in message.headers.items() if not name.startswith("x-")},
        "content_type": message.content_type,
        "content_encoding": message.content_encoding,
        **{name: message.properties[name] for name in PROPERTIES if message.properties.get(name) is not None},
    }
    return Parked(message.headers["task"], queue, dumps(envelope), body_bytes(message.body), reason)


class Offers:
    """Offers parked messages again, and gives up those that nobody reads; with a broker connection of its own.

    Of its own, since waiting for a confirm must not take in what other consumers of the connection are to get.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._broker: Connection | None = None
        self._next_at, self._tries = 0.0, 0

    def look(self, database: PgConnection) -> None:
        """One look, at most one each `sweep_s`; raises psycopg2.Error. A broker that is away is asked again later."""
        if boottime_s() < self._next_at:
            return
        self._next_at = boottime_s() + self._settings.sweep_s
        try:
            for _ in range(PAGE):
                buried = give_up(database, self._settings.park_grace_s, self._settings.evidence_age_s)
                if not (buried or offer(database, self.publish)):
                    break
            self._tries = 0
        except psycopg2.Error:
            raise
        except Exception as error:  # noqa: BLE001  # whatever the broker said, the messages are kept
            log.warning("parked.not_offered", error=type(error).__name__, consequence="they stay in the database")
            self.close()
            self._next_at = boottime_s() + pause_s(self._tries, 0.2, 5.0)
            self._tries += 1

    def publish(self, message: Parked) -> None:
        """Put it into its queue again, confirmed; raises the transport's errors."""
        if self._broker is None:
            confirmed = {"confirm_publish": True} if self._settings.broker_is_amqp else {}
            self._broker = Connection(self._settings.need_broker(), connect_timeout=5, transport_options=confirmed)
        envelope = loads(message.envelope)
        Producer(self._broker.default_channel).publish(
            message.body,
            exchange="",
            routing_key=message.queue,
            serializer=None,
            mandatory=True,
            timeout=self._settings.confirm_timeout_s,
            **envelope,
        )
        log.info("message.offered_again", task_id=envelope["headers"].get("id"), type=message.task, queue=message.queue)

    def close(self) -> None:
        """Drop the connection; the next look opens another."""
        if self._broker is not None:
            with suppress(Exception):  # whatever it says, it is dropped
                self._broker.collect(socket_timeout=0.5)
            self._broker = None
