"""What the broker says about one queue. It only looks: nothing is declared, consumed or changed.

RabbitMQ tells depth and consumers by a passive declare; what it holds unacknowledged, and the queue's bindings, only
through the management API, which is asked when RABBITMQ_MANAGEMENT_URL is set. Redis/Valkey shows its lists.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, unquote, urlsplit

import httpx
from amqp.exceptions import AMQPError, NotFound
from kombu import Connection
from kombu.exceptions import KombuError

from app.diagnose.facts import Broker
from app.errors import ConfigurationError
from app.settings import Settings
from tasks.topology import EXCHANGE, QUARANTINE_QUEUE

CONNECT_S, API_S = 3.0, 3.0
AT_ONCE = {"max_retries": 1, "interval_start": 0, "interval_step": 0}  # kombu's own pause is two seconds


def broker_facts(settings: Settings, queue: str) -> Broker:
    """What is known of `queue`; an unreachable broker is a fact too."""
    kind = "rabbitmq" if settings.broker_is_amqp else "redis"
    try:
        url = settings.need_broker()
    except ConfigurationError as error:
        return Broker(kind, reachable=True, notes=(f"not asked: {error}",))
    words = ("socket_connect_timeout", "socket_timeout") if kind == "redis" else ("read_timeout", "write_timeout")
    options = dict.fromkeys(words, CONNECT_S)
    broker = Connection(url, connect_timeout=CONNECT_S, transport_options={**AT_ONCE, **options})
    errors = (OSError, KombuError, *broker.connection_errors, *broker.channel_errors)
    try:
        if not settings.broker_is_amqp:
            return redis_facts(broker, queue)
        broker.ensure_connection(**AT_ONCE)
        return amqp_facts(broker, queue, settings)
    except errors as error:
        return Broker(kind, reachable=False, notes=(f"it does not answer ({type(error.__cause__ or error).__name__})",))
    finally:
        broker.collect(socket_timeout=CONNECT_S)


def amqp_facts(broker: Connection, queue: str, settings: Settings) -> Broker:
    """Depth and consumers of RabbitMQ's queue; raises the transport's errors."""
    notes: list[str] = []
    found = passive(broker, queue, notes)
    quarantine = passive(broker, QUARANTINE_QUEUE, notes)
    managed: dict[str, Any] = {}
    if not settings.management_url:
        notes.append("bindings and unacknowledged messages were not asked for: RABBITMQ_MANAGEMENT_URL is not set")
    elif found:
        managed = management(settings, queue, notes)
    return Broker(
        "rabbitmq",
        reachable=True,
        exists=None if found is None else bool(found),
        ready=found[0] if found else None,
        consumers=found[1] if found else None,
        unacknowledged=managed.get("unacknowledged"),
        bound=managed.get("bound"),
        quarantine_exists=None if quarantine is None else bool(quarantine),
        notes=tuple(notes),
    )


def passive(broker: Connection, queue: str, notes: list[str]) -> tuple[int, int] | tuple[()] | None:
    """(ready messages, consumers); empty when the queue is not there, None when the broker does not say."""
    channel = broker.channel()  # a refused declare closes its channel, so each has its own
    try:
        answer = channel.queue_declare(queue, passive=True)
    except NotFound:
        return ()
    except AMQPError as error:
        notes.append(f"queue {queue!r}: {type(error).__name__}")
        return None
    channel.close()
    return int(answer.message_count), int(answer.consumer_count)


def management(settings: Settings, queue: str, notes: list[str]) -> dict[str, Any]:
    """Unacknowledged messages and the binding, as the management API has counted them last."""
    parts = urlsplit(settings.management_url)
    host = f"{parts.scheme}://{parts.hostname}:{parts.port}" if parts.port else f"{parts.scheme}://{parts.hostname}"
    name = unquote(urlsplit(settings.broker_url).path[1:]) or "/"
    path = f"{host}{parts.path.rstrip('/')}/api/queues/{quote(name, safe='')}/{quote(queue, safe='')}"
    try:
        with httpx.Client(auth=(unquote(parts.username or ""), unquote(parts.password or "")), timeout=API_S) as client:
            counted, bindings = client.get(path), client.get(f"{path}/bindings")
        counted.raise_for_status()
        bindings.raise_for_status()
        bound = any(one["source"] == EXCHANGE and one["routing_key"] == queue for one in bindings.json())
        return {"unacknowledged": counted.json().get("messages_unacknowledged"), "bound": bound}
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        notes.append(f"the management API does not answer ({type(error).__name__})")
        return {}


def redis_facts(broker: Connection, queue: str) -> Broker:
    """Length of the queue's lists; raises the client's errors."""
    channel: Any = broker.default_channel
    # kombu keeps one list for each priority step and names it by this method alone.
    ready = sum(channel.client.llen(channel._q_for_pri(queue, step)) for step in channel.priority_steps)  # noqa: SLF001
    held = int(channel.client.hlen(channel.unacked_key))
    return Broker(
        "redis",
        reachable=True,
        ready=int(ready),
        unacknowledged=held,
        notes=("Redis/Valkey does not tell who consumes; unacknowledged messages are those of all queues",),
    )
