"""Publishing with proof: pipelined confirms matched by delivery tag, returned messages told apart from kept ones.

py-amqp's own `confirm_publish` waits for *a* confirm, so after a timeout a late one can confirm the next message.
Here each tag is matched, and after any error the whole connection is dropped: its tags mean nothing any more.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import amqp
from amqp.exceptions import NotFound
from kombu import Connection, Producer
from kombu.exceptions import ChannelError

from app.errors import DeadsureError
from app.outbox import Debt
from app.tracing import HEADER
from tasks.headers import COPY, EPISODE, JOBS, VERSION
from tasks.inspection import BODY
from tasks.topology import EXCHANGE, quarantine_queue, work_queue

HEARTBEAT_S = 30
READ_S = 0.001
LAST_ON_REDIS = 9  # kombu's Redis transport serves priority 0 first


class PublishError(DeadsureError):
    """The broker did not confirm in time, or refused; the debts stay, the connection is dropped."""


@dataclass
class Outcome:
    """What the broker said of one batch: kept for certain, returned without a queue, or refused (queue full)."""

    confirmed: list[Debt] = field(default_factory=list)
    returned: list[tuple[UUID, str]] = field(default_factory=list)
    refused: list[Debt] = field(default_factory=list)


def headers(group: Sequence[Debt]) -> dict[str, Any]:
    """Celery's protocol 2 headers of a wake-up call. The message has no payload, so it can leak none."""
    debt = group[0]
    job_id = str(debt.job_id)
    found: dict[str, Any] = {
        "lang": "py",
        "task": debt.type,
        "id": job_id,
        "root_id": job_id,
        "parent_id": None,
        "group": None,
        "retries": 0,
        "eta": None,
        "expires": None,
        "timelimit": [None, None],
        "argsrepr": "()",
        "kwargsrepr": "{}",
        "origin": "deadsure",
        "ignore_result": True,
        COPY: debt.copy,
        EPISODE: debt.episode,
        VERSION: debt.version,
        "occurred_at": datetime.now(UTC).isoformat(timespec="milliseconds"),
    }
    if debt.trace_context:
        found[HEADER] = debt.trace_context
    if len(group) > 1:
        found[JOBS] = [str(member.job_id) for member in group]
    return found


class Publisher:
    """One broker connection for publishing; made new after any error."""

    def __init__(self, url: str, queues: Sequence[str], confirm_timeout_s: float) -> None:
        self._queues, self._timeout_s = queues, confirm_timeout_s
        self._connection = Connection(url, heartbeat=HEARTBEAT_S, connect_timeout=5)
        self.amqp = self._connection.transport.driver_type == "amqp"
        self._pending: dict[int, Sequence[Debt]] = {}
        self._outcome = Outcome()
        self._tag = 0
        self.depths: dict[str, int] = {}
        self.created: list[str] = []
        self.errors: tuple[type[BaseException], ...] = (
            *self._connection.connection_errors,
            *self._connection.channel_errors,
            OSError,
        )

    def open(self) -> None:
        """Connect, declare the topology; `created` names queues that were missing. Raises the transport's errors."""
        self._connection.connect()
        for name in self._queues:
            self._declare(name)
        if self.amqp:
            quarantine_queue(self.amqp)(self._connection.default_channel).declare()
            self._channel = self._connection.channel()
            self._channel.confirm_select()
            self._channel.events["basic_ack"].add(self._on_ack)
            self._channel.events["basic_nack"].add(self._on_nack)
            self._channel.events["basic_return"].add(self._on_return)
        else:
            self._producer = Producer(self._connection.channel())
            self._run_id = self._read_run_id()

    def publish(self, queue: str, groups: Sequence[Sequence[Debt]]) -> Outcome:
        """Publish a message for each group and wait for every confirm.

        Raises PublishError or the transport's errors: then drop this object.
        """
        self._outcome = Outcome()
        if not self.amqp:
            for group in groups:
                debt = group[0]
                self._producer.publish(
                    BODY,
                    exchange=EXCHANGE,
                    routing_key=queue,
                    content_type="application/json",
                    content_encoding="utf-8",
                    headers=headers(group),
                    correlation_id=debt.correlation_id,
                    priority=LAST_ON_REDIS - debt.priority,
                )
                self._outcome.confirmed += group
            return self._outcome
        deadline = time.monotonic() + self._timeout_s
        for group in groups:
            debt = group[0]
            self._tag += 1
            self._pending[self._tag] = group
            self._channel.basic_publish(
                amqp.Message(
                    BODY,
                    content_type="application/json",
                    content_encoding="utf-8",
                    delivery_mode=2,
                    priority=debt.priority,
                    correlation_id=debt.correlation_id,
                    message_id=str(debt.job_id),
                    application_headers=headers(group),
                ),
                exchange=EXCHANGE,
                routing_key=queue,
                mandatory=True,
                timeout=self._timeout_s,
            )
        while self._pending:
            left = deadline - time.monotonic()
            if left <= 0:
                raise PublishError(f"{len(self._pending)} messages were not confirmed in time")
            try:
                self._connection.drain_events(timeout=left)
            except TimeoutError:
                continue
        return self._outcome

    def fileno(self) -> int | None:
        """The socket to watch while idle; None where the transport has none to watch."""
        if not self.amqp:
            return None
        sock: socket.socket = self._connection.connection.sock
        return sock.fileno()

    def idle(self, *, readable: bool) -> None:
        """Read what the broker sent and keep the heartbeat; raises the transport's errors when it is gone."""
        if self.amqp:
            if readable:
                with suppress(TimeoutError):
                    self._connection.drain_events(timeout=READ_S)
            self._connection.heartbeat_check()
        elif self._read_run_id() != self._run_id:
            raise PublishError("the broker has restarted and may have lost its messages")

    def _read_run_id(self) -> str | None:
        """Redis/Valkey's name for this run of the server: its client connects again without a word after a restart."""
        from redis.exceptions import ResponseError  # noqa: PLC0415  # a fifth of a second that RabbitMQ does not need

        try:
            found: str = self._producer.channel.client.info("server")["run_id"]
        except ResponseError:  # a server that forbids INFO: resends then come by their gap alone
            return None
        return found

    def depth(self, queue: str) -> int:
        """Messages that are ready in a queue; 0 when it is not there."""
        return self.depths.get(queue, 0)

    def waiting(self, queue: str) -> set[UUID]:
        """Jobs whose message can be seen in the queue; only Redis/Valkey shows its queues."""
        if self.amqp:
            return set()
        channel = self._producer.channel
        # kombu keeps one list for each priority step and names it by this method alone.
        lists = [channel._q_for_pri(queue, step) for step in channel.priority_steps]  # noqa: SLF001
        found = set()
        for name in lists:
            for entry in channel.client.lrange(name, 0, -1):
                with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):  # no message
                    found.add(UUID(json.loads(entry)["headers"]["id"]))
        return found

    def close(self) -> None:
        """Drop the connection without waiting for a broker that may be gone."""
        with suppress(Exception):  # whatever it says, it is dropped
            self._connection.collect(socket_timeout=0.5)

    def _declare(self, name: str) -> None:
        queue = work_queue(name, self.amqp)
        channel = self._connection.channel()
        try:
            found = queue(channel).queue_declare(passive=True)
            self.depths[name] = int(found.message_count)
        except (NotFound, ChannelError):
            self.depths[name] = 0
            if self.amqp:
                self.created.append(name)
            channel = self._connection.channel()  # the broker has closed the one that asked
        queue(channel).declare()
        channel.close()

    def _settled(self, tag: int, multiple: bool) -> list[Debt]:
        if not multiple:
            return list(self._pending.pop(tag, ()))
        tags = [known for known in self._pending if known <= tag]
        return [debt for known in tags for debt in self._pending.pop(known)]

    def _on_ack(self, delivery_tag: int, multiple: bool) -> None:
        returned = {job_id for job_id, _ in self._outcome.returned}
        self._outcome.confirmed += [
            debt for debt in self._settled(delivery_tag, multiple) if debt.job_id not in returned
        ]

    def _on_nack(self, delivery_tag: int, multiple: bool) -> None:
        self._outcome.refused += self._settled(delivery_tag, multiple)

    def _on_return(self, error: Any, exchange: str, routing_key: str, message: Any) -> None:
        reason = f"{getattr(error, 'reply_text', 'returned')}: exchange {exchange!r}, routing key {routing_key!r}"
        members = message.headers.get(JOBS) or [message.headers["id"]]
        self._outcome.returned += [(UUID(job_id), reason) for job_id in members]
