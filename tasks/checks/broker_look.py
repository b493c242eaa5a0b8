"""What is there in the broker, asked passively: a look must not declare what is missing, and so hide it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from amqp.exceptions import NotFound
from kombu import Connection
from psycopg2.extensions import connection as PgConnection

from app.job_types import JobType
from app.settings import Settings
from tasks.checks.management import Management
from tasks.topology import DEAD_LETTER_EXCHANGE, EXCHANGE, QUARANTINE_QUEUE


@dataclass(frozen=True)
class Seen:
    """A queue as AMQP shows it: messages that nobody has taken, and consumers."""

    ready: int
    consumers: int


@dataclass(frozen=True)
class BrokerLook:
    """What the checks of a RabbitMQ see; `queues` and `exchanges` as they were when the look began.

    `database` is None when it is away, `management` when there is no URL of it.
    """

    settings: Settings
    types: Mapping[tuple[str, int], JobType]
    database: PgConnection | None
    broker: Connection
    management: Management | None
    work_queues: tuple[str, ...]
    queues: Mapping[str, Seen | None]
    exchanges: Mapping[str, bool]

    @property
    def untouched(self) -> bool:
        """Whether neither a worker nor a relay has ever declared anything here."""
        return not any(self.queues.values()) and not any(self.exchanges.values())


def look_at(
    broker: Connection,
    settings: Settings,
    types: Mapping[tuple[str, int], JobType],
    database: PgConnection | None,
    work_queues: list[str],
) -> BrokerLook:
    """Ask for each queue and exchange of ours. Raises the transport's errors."""
    management = None
    if settings.management_url:
        management = Management(settings.management_url, broker.virtual_host or "/")
    return BrokerLook(
        settings,
        types,
        database,
        broker,
        management,
        tuple(work_queues),
        {name: seen(broker, name) for name in (*work_queues, QUARANTINE_QUEUE)},
        {name: exists(broker, name) for name in (EXCHANGE, DEAD_LETTER_EXCHANGE)},
    )


def seen(broker: Connection, queue: str) -> Seen | None:
    """The queue now; None when it is not there."""
    channel = broker.channel()
    try:
        found = channel.queue_declare(queue, passive=True)
    except NotFound:  # the broker has closed the channel
        return None
    channel.close()
    return Seen(int(found.message_count), int(found.consumer_count))


def exists(broker: Connection, exchange: str) -> bool:
    """Whether the exchange is there."""
    channel = broker.channel()
    try:
        channel.exchange_declare(exchange, "direct", passive=True)
    except NotFound:
        return False
    channel.close()
    return True
