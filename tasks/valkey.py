"""kombu's Redis transport, made to outlive list entries that are no messages.

Anybody can push anything into a list. kombu pops an entry, stumbles over it in the event loop, and the worker ends with
the entry in nobody's hands. Here an entry that kombu could not deliver, or could not give back later, is put into an
envelope of its own before kombu reads it: a message whose body is the entry's bytes. From there on it is recorded as
unacknowledged and dead-lettered like any other message that nobody can read.
"""

from __future__ import annotations

import base64
import uuid
from typing import Any

from kombu.transport import redis
from kombu.utils.encoding import bytes_to_str
from kombu.utils.json import dumps, loads

from app.journal import log
from tasks.headers import NO_ENVELOPE
from tasks.topology import DEAD_LETTER_EXCHANGE, EXCHANGE


class Channel(redis.Channel):
    """A channel that reads whatever stands in its lists."""

    def _get_client(self) -> Any:
        kind = super()._get_client()  # type: ignore[no-untyped-call]  # kombu has no types here

        def client(**options: Any) -> Any:
            made = kind(**options)
            read = made.parse_response

            def parse_response(connection: Any, command_name: str, **more: Any) -> Any:
                answer = read(connection, command_name, **more)
                if command_name != "BRPOP" or not answer:
                    return answer
                key, entry = answer
                return key, deliverable(entry, bytes_to_str(key).rsplit(self.sep, 1)[0])

            made.parse_response = parse_response
            return made

        return client

    def _receive_one(self, c: Any) -> Any:
        try:
            return super()._receive_one(c)  # type: ignore[no-untyped-call]  # kombu has no types here
        except RecursionError:
            return self.dropped()

    def _deliver_fanout_message(self, message: Any, exchange: str) -> Any:
        """Remote control: who sends a command waits for its answer, so what cannot be read may go."""
        if not is_envelope(message):
            return self.dropped()
        return super()._deliver_fanout_message(message, exchange)  # type: ignore[no-untyped-call]  # as above

    def dropped(self) -> bool:
        """Say so, without what it was."""
        log.error("control.unreadable", consequence="it is dropped")
        return True


class Transport(redis.Transport):
    """kombu's, with this channel."""

    Channel = Channel


def deliverable(entry: bytes, queue: str) -> bytes:
    """The entry of a list as kombu can read it: itself, or a message that carries its bytes."""
    try:
        message = loads(bytes_to_str(entry))
    except Exception:  # noqa: BLE001  # an entry may hold anything, and fail to be read in any way
        message = None
    if not is_envelope(message):
        message = {
            "body": base64.b64encode(entry).decode(),
            "content-type": "application/octet-stream",
            "content-encoding": "binary",
            "headers": {NO_ENVELOPE: True},
            "properties": {"body_encoding": "base64", "delivery_tag": str(uuid.uuid4()), "priority": 0},
        }
    elif comes_back(message["properties"]["delivery_info"], queue):
        return entry
    # By the default exchange: when it is given back, it goes into the list that it came from.
    message["properties"]["delivery_info"] = {"exchange": "", "routing_key": queue}
    return str(dumps(message)).encode()


def comes_back(where: dict[str, Any], queue: str) -> bool:
    """Whether a message with this origin is given back to `queue`; kombu drops one that no binding leads anywhere."""
    return where["routing_key"] == queue and where["exchange"] in ("", EXCHANGE, DEAD_LETTER_EXCHANGE)


def is_envelope(message: Any) -> bool:
    """Whether kombu can make a message of it, record it, and give it back."""
    if not (isinstance(message, dict) and isinstance(message.get("headers"), dict)):
        return False
    properties = message.get("properties")
    if not isinstance(properties, dict):
        return False
    where = properties.get("delivery_info")
    return (
        isinstance(where, dict)
        and all(isinstance(where.get(name), str) for name in ("exchange", "routing_key"))
        and isinstance(properties.get("delivery_tag"), str)
        and isinstance(properties.get("priority"), int | None)
        and all(isinstance(properties.get(name), str | None) for name in ("correlation_id", "reply_to"))
        and is_body(message.get("body"), properties.get("body_encoding"))
    )


def is_body(body: Any, encoding: Any) -> bool:
    """Whether kombu can decode the body."""
    if not isinstance(body, str):
        return False
    if encoding != "base64":
        return encoding in (None, "utf-8")
    try:
        base64.b64decode(body, validate=True)
    except ValueError:
        return False
    return True
