"""The trace context of a job: W3C `traceparent`, from submit through outbox and message to the handler's log lines.

It travels with or without OpenTelemetry. With the extra `otel`, and a tracer provider set up by the program, a submit
takes the present span, and every attempt is a consumer span below the submitter's. Baggage and `tracestate` stay
behind: they are free text, and a job's row is no place for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol
from uuid import UUID

from structlog.contextvars import bind_contextvars, reset_contextvars

try:
    from app import spans
except ImportError:  # the extra is not there
    INSTALLED = False
else:
    INSTALLED = True

HEADER = "traceparent"
# https://www.w3.org/TR/trace-context/#traceparent-header, version 00
FORM = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


class Span(Protocol):
    """The part of a span that an attempt tells."""

    def end(self, outcome: str, error: str | None) -> None:
        """Note how the attempt ended."""


class NoSpan:
    """Where nobody traces."""

    def end(self, outcome: str, error: str | None) -> None:
        """Nothing to note."""


NOWHERE = NoSpan()


def is_traceparent(value: object) -> bool:
    """Whether `value` is a W3C traceparent of version 00."""
    return isinstance(value, str) and FORM.fullmatch(value) is not None


def trace_id(traceparent: str | None) -> str | None:
    """The trace id in a traceparent: 32 hexadecimal digits."""
    found = FORM.fullmatch(traceparent or "")
    return found[1] if found else None


def present() -> str | None:
    """The traceparent of the span that is open here; None without OpenTelemetry or outside of any span."""
    return spans.current() if INSTALLED else None


def of_child(traceparent: str | None) -> str | None:
    """The trace context of a job that a handler submits: the span of its attempt, or the context of its own job."""
    return present() or traceparent


@contextmanager
def attempt(
    name: str, job_id: UUID, number: int, correlation_id: str, traceparent: str | None, queue: str
) -> Iterator[Span]:
    """One attempt of a job: its ids in every log line written meanwhile, and its consumer span where one is wanted."""
    known: dict[str, str | int] = {"job_id": str(job_id), "attempt": number, "correlation_id": correlation_id}
    if INSTALLED and spans.active():
        with spans.attempt(name, traceparent, attributes(name, queue, known)) as span:
            tokens = bind_contextvars(**known, trace_id=trace_id(spans.current()))
            try:
                yield span
            finally:
                reset_contextvars(**tokens)
        return
    found = trace_id(traceparent) if traceparent else None
    tokens = bind_contextvars(**known, trace_id=found) if found else bind_contextvars(**known)
    try:
        yield NOWHERE
    finally:
        reset_contextvars(**tokens)


def attributes(name: str, queue: str, known: Mapping[str, str | int]) -> dict[str, str | int]:
    """What an attempt's span says, by OpenTelemetry's conventions for messaging."""
    return {
        "messaging.system": "deadsure",
        "messaging.operation.type": "process",
        "messaging.destination.name": queue,
        "messaging.message.id": known["job_id"],
        "messaging.message.conversation_id": known["correlation_id"],
        "deadsure.type": name,
        "deadsure.attempt": known["attempt"],
    }
