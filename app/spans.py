"""OpenTelemetry, where the extra `otel` is installed: imported by `app.tracing` alone, which works without it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.trace import Link, ProxyTracerProvider, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

PROPAGATOR = TraceContextTextMapPropagator()
HEADER = "traceparent"


def active() -> bool:
    """Whether the program has set up a tracer provider; without one there is nothing to record."""
    return not isinstance(trace.get_tracer_provider(), ProxyTracerProvider)


def current() -> str | None:
    """The present span as a `traceparent`; None outside of any span."""
    if not trace.get_current_span().get_span_context().is_valid:
        return None
    carrier: dict[str, str] = {}
    PROPAGATOR.inject(carrier)
    return carrier.get(HEADER)


class Attempt:
    """The consumer span of one attempt; `end` tells it how the attempt ended."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    def end(self, outcome: str, error: str | None) -> None:
        """Note the outcome; `error` is a safe reason, never a message, since messages quote payloads."""
        self._span.set_attribute("deadsure.outcome", outcome)
        if error is not None:
            self._span.set_attribute("error.type", error)
            self._span.set_status(Status(StatusCode.ERROR, error))


@contextmanager
def attempt(name: str, submitter: str | None, attributes: Mapping[str, str | int]) -> Iterator[Attempt]:
    """A consumer span, child of the submitter's; inside a span of other instrumentation its child, with a link."""
    sent = PROPAGATOR.extract({HEADER: submitter} if submitter else {})
    outer = trace.get_current_span().get_span_context()
    origin = trace.get_current_span(sent).get_span_context()
    links = [Link(origin)] if outer.is_valid and origin.is_valid else []
    with trace.get_tracer("deadsure").start_as_current_span(
        f"process {name}",
        None if outer.is_valid else sent,
        SpanKind.CONSUMER,
        attributes,
        links,
        record_exception=False,
        set_status_on_exception=False,
    ) as span:
        yield Attempt(span)
