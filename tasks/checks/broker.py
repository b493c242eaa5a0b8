"""The checks of the broker in the order in which `deadsure doctor` runs them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kombu import Connection
from kombu.exceptions import OperationalError
from psycopg2.extensions import connection as PgConnection

from app.checks.finding import Finding, Severity, info, ok, run, warning
from app.job_types import JobType, queues
from app.settings import Settings
from db.session import one
from tasks.checks import messages, nodes, policies, probe, redis_messages, redis_server, topology, worker_settings
from tasks.checks.broker_look import BrokerLook, look_at
from tasks.checks.messages import LIVE
from tasks.checks.redis_look import RedisLook

RABBITMQ = (
    *nodes.CHECKS,
    *topology.CHECKS,
    *policies.CHECKS,
    *messages.CHECKS,
    *probe.CHECKS,
)
VALKEY = (*redis_server.CHECKS, *redis_messages.CHECKS)
ALONE = (nodes.version, nodes.alarms, topology.what_amqp_cannot_tell)  # what can be asked of a broker without queues
CONNECT_S, ANSWER_S = 5, 20


def check_broker(
    settings: Settings,
    types: Mapping[tuple[str, int], JobType],
    database: PgConnection | None,
    options: Mapping[str, Any],
    concurrency: int | None = None,
) -> list[Finding]:
    """Everything that the broker can tell, and what it has to do with the database.

    `options` are Celery's `broker_transport_options`; `database` is None when it is away.
    """
    found = run(worker_settings.CHECKS, worker_settings.WorkerLook(settings, options, concurrency))
    timeouts = {"read_timeout": ANSWER_S, "write_timeout": ANSWER_S} if settings.broker_is_amqp else {}
    broker = Connection(settings.need_broker(), connect_timeout=CONNECT_S, transport_options=timeouts)
    try:
        broker.ensure_connection(max_retries=1, timeout=CONNECT_S)
        if settings.broker_is_amqp:
            found += rabbitmq(look_at(broker, settings, types, database, queues()))
        else:
            found += valkey(RedisLook(settings, types, database, broker.default_channel, options, tuple(queues())))
    except (OSError, OperationalError, *broker.connection_errors, *broker.channel_errors) as failed:
        what = f"the broker does not answer as it should ({type(failed).__name__})"
        step = "look at BROKER_URL: host, port, user, virtual host"
        found.append(Finding(Severity.ERROR, "broker.unreachable", what, step, checked=False))
    finally:
        broker.collect(socket_timeout=0.5)  # a broker under alarm would not answer a polite close
    return found


def rabbitmq(look: BrokerLook) -> list[Finding]:
    """The checks of a RabbitMQ."""
    if look.untouched:
        return [untouched(look.database), *run(ALONE, look)]
    return run(RABBITMQ, look)


def valkey(look: RedisLook) -> list[Finding]:
    """The checks of a Redis/Valkey; raises the transport's errors."""
    first = [untouched(look.database)] if look.untouched else []
    no_exchange = ok("dlx.none", "this broker has no dead-letter exchange: the task layer publishes the copies")
    return [*first, *run(VALKEY, look), no_exchange]


def untouched(database: PgConnection | None) -> Finding:
    """What it means that none of our queues is there: a beginning, or another broker than the workers'."""
    row = one(database, LIVE) if database is not None else None
    if row and row[0]:
        return warning(
            "broker.untouched",
            f"{row[0]} workers hold a lease, and this broker has none of their queues",
            "has it lost its disk, or do they have another BROKER_URL? restart them, they declare what is missing",
        )
    return info("broker.untouched", "no worker and no relay has ever started on this broker", "celery -A tasks worker")
