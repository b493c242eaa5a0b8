"""Correlation id and trace context from submit to handler, child and span; with OpenTelemetry and without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID, uuid4

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sqlalchemy.orm import Session
from structlog.contextvars import get_contextvars

from app import tracing
from app.adopt import adopt
from app.errors import UnsupportedOption
from app.job_types import find
from app.lease import Keeper
from app.outbox import Debt
from app.seat import Seat
from app.settings import settings
from db import session
from tasks import eager, publisher
from tests.integration.scene import Scene

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GIVEN = f"00-{TRACE}-{SPAN}-01"


@pytest.fixture
def traced(jobs: Any) -> Any:
    """`tests.faults.jobs_traced`, nothing seen yet."""
    assert jobs
    import tests.faults.jobs_traced  # noqa: PLC0415

    tests.faults.jobs_traced.seen.clear()
    return tests.faults.jobs_traced


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """What the tracer provider of this test was told; the global one can be set only once."""
    made, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(made))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    return made


@pytest.fixture
def seat(scene: Scene) -> Iterator[Seat]:
    keeper = Keeper(settings(), "traced", [])
    keeper.start_lease()
    made = Seat(keeper.shared, scene.url)
    yield made
    made.drop()
    keeper.stop()


@contextmanager
def request_span(name: str = "request") -> Iterator[str]:
    """A span of the web request that submits; see `ids`."""
    with trace.get_tracer("web").start_as_current_span(name) as span:
        yield ids(span.get_span_context())


def ids(found: trace.SpanContext | str | None) -> str:
    """Trace and span id of a span, or of a traceparent: what it has but its flags."""
    if isinstance(found, str):
        return found.rpartition("-")[0]
    assert found is not None
    return f"00-{found.trace_id:032x}-{found.span_id:016x}"


def attempts(scene: Scene, seat: Seat, job_id: str) -> None:
    """Run a job and its children to their end in this process, outside of any span."""
    job = scene.row(UUID(job_id))
    eager.attempts(seat, scene.eyes, job["job_id"], job["type"], job["schema_version"])


def child_of(scene: Scene, job_id: str) -> dict[str, Any]:
    return scene.record("SELECT * FROM jobs WHERE parent_id = %s", (job_id,))


def consumers(exporter: InMemorySpanExporter, name: str = "tests.traced") -> list[ReadableSpan]:
    """The consumer spans of a type's attempts."""
    return [span for span in exporter.get_finished_spans() if span.name == f"process {name}"]


def test_every_attempt_is_a_consumer_span_below_the_submitter(
    scene: Scene, seat: Seat, traced: Any, exporter: InMemorySpanExporter
) -> None:
    with request_span() as submitter:
        job = traced.traced.delay(failures=1)
    assert ids(scene.row(UUID(job.id))["trace_context"]) == submitter
    assert ids(scene.ask("SELECT trace_context FROM outbox WHERE job_id = %s", (job.id,))) == submitter
    attempts(scene, seat, job.id)
    first, second = consumers(exporter)
    for span in (first, second):
        assert span.kind is trace.SpanKind.CONSUMER
        assert ids(span.parent) == submitter
        assert span.attributes is not None
        assert span.attributes["messaging.message.id"] == job.id
    outcomes = [(span.attributes or {})["deadsure.outcome"] for span in (first, second)]
    assert outcomes == ["retried", "succeeded"]
    assert (first.status.is_ok, second.status.is_ok) == (False, True)
    assert traced.PRIVATE not in first.to_json(), "a message quotes payloads"
    assert "TransientError" in first.to_json()
    assert ids(child_of(scene, job.id)["trace_context"]) == ids(second.context)
    (child,) = consumers(exporter, "tests.leased_effect")
    assert ids(child.parent) == ids(second.context)


def test_inside_another_consumer_span_the_submitter_is_linked(
    scene: Scene, seat: Seat, traced: Any, exporter: InMemorySpanExporter
) -> None:
    job = traced.traced.apply_async(traceparent=GIVEN)
    with request_span("of another instrumentation") as outer:
        attempts(scene, seat, job.id)
    (span,) = consumers(exporter)
    assert ids(span.parent) == outer
    assert [f"{link.context.trace_id:032x}" for link in span.links] == [TRACE]


def test_log_lines_of_a_handler_carry_its_ids_and_no_others_do(scene: Scene, seat: Seat, traced: Any) -> None:
    job = traced.traced.apply_async(
        kwargs={"failures": 1}, correlation_id="order 7", headers={"traceparent": GIVEN, "tracestate": "a=b"}
    )
    attempts(scene, seat, job.id)
    expected = {"job_id": job.id, "correlation_id": "order 7", "trace_id": TRACE}
    assert traced.seen == [{**expected, "attempt": 1}, {**expected, "attempt": 2}]
    assert get_contextvars() == {}
    child = child_of(scene, job.id)
    assert (child["correlation_id"], child["trace_context"]) == ("order 7", GIVEN)


def test_it_works_without_opentelemetry(
    scene: Scene, seat: Seat, traced: Any, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "INSTALLED", False)
    with request_span():
        plain, given = traced.traced.delay(), traced.traced.apply_async(traceparent=GIVEN)
    for job in (plain, given):
        attempts(scene, seat, job.id)
    assert [seen.get("trace_id") for seen in traced.seen] == [None, TRACE]
    assert [seen["correlation_id"] for seen in traced.seen] == [plain.id, given.id]
    assert child_of(scene, given.id)["trace_context"] == GIVEN
    assert consumers(exporter) == []


def test_a_span_goes_with_jobs_of_the_callers_transaction(
    scene: Scene, traced: Any, exporter: InMemorySpanExporter
) -> None:
    assert exporter is not None
    with Session(session.engine(scene.url)) as business, request_span() as submitter:
        one = traced.traced.submit(business)
        many = traced.traced.submit_many(business, [{}, {}])
        business.commit()
    assert {ids(scene.row(made.job_id)["trace_context"]) for made in (one, *many)} == {submitter}


def test_a_foreign_message_brings_its_own(scene: Scene, jobs: Any) -> None:
    assert jobs
    lineage: dict[str, Any] = {"correlation_id": "their request", "traceparent": GIVEN}
    adopted = adopt(scene.eyes, uuid4(), find("tests.leased_effect"), {"n": 1}, **lineage)
    assert scene.row(adopted)["trace_context"] == GIVEN
    assert scene.row(adopted)["correlation_id"] == "their request"
    nonsense: dict[str, Any] = {"correlation_id": "x\n" * 9, "traceparent": {"a": 1}}
    bare = adopt(scene.eyes, uuid4(), find("tests.leased_effect"), {"n": 1}, **nonsense)
    assert (scene.row(bare)["trace_context"], scene.row(bare)["correlation_id"]) == (None, str(bare))


def test_the_message_carries_it() -> None:
    debt = Debt(uuid4(), "wake", "tests.traced", 1, 0, "order 7", GIVEN, 1, 1)
    assert publisher.headers([debt])["traceparent"] == GIVEN


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        f"00-{TRACE}-{SPAN}",
        f"01-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"{GIVEN}\n",
    ],
)
def test_a_wrong_traceparent_is_refused_as_an_option_and_left_out_as_a_header(
    scene: Scene, traced: Any, wrong: str
) -> None:
    if wrong:
        with pytest.raises(ValueError, match="traceparent"):
            traced.traced.apply_async(traceparent=wrong)
    job = traced.traced.apply_async(headers={"traceparent": wrong})
    assert scene.row(UUID(job.id))["trace_context"] is None


def test_other_headers_and_unprintable_correlation_ids_are_refused(scene: Scene, traced: Any) -> None:
    with pytest.raises(UnsupportedOption, match="headers"):
        traced.traced.apply_async(headers={"x-own": "1"})
    with pytest.raises(ValueError, match="correlation_id"):
        traced.traced.apply_async(correlation_id="two\nlines")
    assert scene.ask("SELECT count(*) FROM jobs") == 0
