"""Celery's own options on durable tasks: honoured, or refused where they are used with nothing written."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery import chain, chord, group
from pydantic import ValidationError

from app.errors import PayloadTooLarge, UnsupportedOption
from app.settings import settings
from app.submit import PRIORITIES
from tests.integration.scene import Scene

BERLIN = ZoneInfo("Europe/Berlin")


@pytest.fixture
def task(jobs: Any) -> Any:
    """A durable task without work."""
    return jobs.leased_effect


@pytest.fixture
def edges(jobs: Any) -> Any:
    """`tests.faults.jobs_edges`, imported when the environment is there."""
    assert jobs
    import tests.faults.jobs_edges  # noqa: PLC0415

    return tests.faults.jobs_edges


def written(scene: Scene) -> int:
    """Rows that a submit writes."""
    return sum(scene.ask(f"SELECT count(*) FROM {table}") for table in ("jobs", "outbox", "job_events"))


@pytest.mark.parametrize(
    "options",
    [
        {"link": "a signature"},
        {"link_error": "a signature"},
        {"chain": ["a signature"]},
        {"chord": "a signature"},
        {"group_id": "a group"},
        {"time_limit": 5},
        {"soft_time_limit": 5},
        {"queue": "elsewhere"},
        {"routing_key": "elsewhere"},
        {"exchange": "elsewhere"},
        {"serializer": "pickle"},
        {"compression": "gzip"},
        {"headers": {"x": 1}},
        {"reply_to": "somebody"},
        {"typo": 1},
    ],
    ids=lambda options: next(iter(options)),
)
def test_option_that_would_not_be_honoured_is_refused(scene: Scene, task: Any, options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedOption, match=next(iter(options))):
        task.apply_async(kwargs={"n": 1}, **options)
    assert written(scene) == 0


@pytest.mark.parametrize("link", ["link", "link_error"])
def test_signature_with_a_link_is_refused(scene: Scene, task: Any, link: str) -> None:
    signature = task.s(n=1)
    getattr(signature, link)(task.s(n=2))
    with pytest.raises(UnsupportedOption, match=link):
        signature.delay()
    assert written(scene) == 0


@pytest.mark.parametrize("canvas", ["chain", "group", "chord"])
def test_canvas_is_refused_as_a_whole(scene: Scene, task: Any, canvas: str) -> None:
    """Also the first link of a chain, or one member of a group: nothing of a half-obeyed canvas stays."""
    first, second = task.si(n=1), task.si(n=2)
    made = {"chain": chain(first, second), "group": group(first, second), "chord": chord([first], second)}[canvas]
    with pytest.raises(UnsupportedOption):
        made.apply_async()
    assert written(scene) == 0


def test_plain_signature_is_a_submit(scene: Scene, task: Any) -> None:
    result = task.s(n=1).apply_async(countdown=5)
    assert scene.row(uuid.UUID(result.id))["payload"] == {"n": 1}


def test_positional_arguments_follow_the_fields(scene: Scene, task: Any) -> None:
    assert scene.row(uuid.UUID(task.delay(7).id))["payload"] == {"n": 7}
    assert scene.row(uuid.UUID(task.apply_async((8,)).id))["payload"] == {"n": 8}
    before = written(scene)
    for args, kwargs, error in (((1, 2), {}, TypeError), ((1,), {"n": 2}, TypeError), (("x",), {}, ValidationError)):
        with pytest.raises(error):
            task.apply_async(args, kwargs)
    assert written(scene) == before


def test_task_id_of_the_caller(scene: Scene, task: Any) -> None:
    wanted = str(uuid.uuid4())
    assert task.apply_async(kwargs={"n": 1}, task_id=wanted).id == wanted
    assert scene.state(uuid.UUID(wanted)) == "queued"
    task.apply_async(kwargs={"n": 1}, task_id=wanted)
    assert scene.ask("SELECT count(*) FROM jobs") == 1, "the same id is the same job"
    before = written(scene)
    with pytest.raises(ValueError, match="is no UUID; for a key of your own use idempotency_key"):
        task.apply_async(kwargs={"n": 1}, task_id="order-17")
    assert written(scene) == before


def test_ignore_result_changes_nothing(scene: Scene, task: Any) -> None:
    result = task.apply_async(kwargs={"n": 1}, ignore_result=True)
    assert scene.state(uuid.UUID(result.id)) == "queued"


@pytest.mark.parametrize(
    ("eta", "utc"),
    [
        (datetime(2027, 3, 28, 1, 59, tzinfo=BERLIN), datetime(2027, 3, 28, 0, 59, tzinfo=UTC)),
        (datetime(2027, 3, 28, 3, 0, tzinfo=BERLIN), datetime(2027, 3, 28, 1, 0, tzinfo=UTC)),
        (datetime(2027, 10, 31, 2, 30, tzinfo=BERLIN, fold=0), datetime(2027, 10, 31, 0, 30, tzinfo=UTC)),
        (datetime(2027, 10, 31, 2, 30, tzinfo=BERLIN, fold=1), datetime(2027, 10, 31, 1, 30, tzinfo=UTC)),
        (datetime(2126, 7, 1, 12, 0, tzinfo=UTC), datetime(2126, 7, 1, 12, 0, tzinfo=UTC)),
    ],
    ids=["before spring", "after spring", "first 2:30 of autumn", "second 2:30 of autumn", "in a hundred years"],
)
def test_eta_across_a_change_of_the_clocks(scene: Scene, task: Any, eta: datetime, utc: datetime) -> None:
    job_id = uuid.UUID(task.apply_async(kwargs={"n": 1}, eta=eta).id)
    assert scene.row(job_id)["not_before"] == utc
    debt = scene.debt(job_id)
    assert debt is not None
    assert debt["due_at"] == utc


def test_countdown_is_counted_by_the_database(scene: Scene, task: Any) -> None:
    """A hundred days, over any change of the clocks, are as many seconds."""
    job_id = uuid.UUID(task.apply_async(kwargs={"n": 1}, countdown=100 * 86_400).id)
    row = scene.row(job_id)
    assert abs(row["not_before"] - row["created_at"] - timedelta(days=100)) < timedelta(seconds=5)


@pytest.mark.parametrize(
    "options",
    [
        {"eta": datetime(2030, 1, 1)},  # noqa: DTZ001
        {"expires": datetime(2030, 1, 1)},  # noqa: DTZ001
        {"eta": datetime(2030, 1, 1, tzinfo=UTC), "countdown": 3},
        {"priority": PRIORITIES.stop},
        {"priority": -1},
        {"idempotency_key": ""},
    ],
    ids=["naive eta", "naive expires", "eta and countdown", "priority 10", "priority -1", "empty key"],
)
def test_wrong_value_is_named_before_any_write(scene: Scene, task: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        task.apply_async(kwargs={"n": 1}, **options)
    assert written(scene) == 0


def test_payload_at_the_limit_and_one_byte_more(scene: Scene, edges: Any) -> None:
    around = len('{"text":""}')
    limit = settings().payload_limit
    largest = edges.text_job.delay(text="x" * (limit - around))
    assert len(scene.row(uuid.UUID(largest.id))["payload"]["text"]) == limit - around
    before = written(scene)
    with pytest.raises(PayloadTooLarge, match=f"{limit + 1} bytes of JSON, at most {limit}"):
        edges.text_job.delay(text="x" * (limit - around + 1))
    with pytest.raises(PayloadTooLarge, match="bytes of JSON"):
        edges.text_job.delay(text="\N{SNOWMAN}" * (limit // 3))
    assert written(scene) == before


def test_durable_task_is_not_called_directly(scene: Scene, task: Any) -> None:
    with pytest.raises(UnsupportedOption, match="not called directly"):
        task(n=1)
    with pytest.raises(UnsupportedOption):
        task.apply(kwargs={"n": 1})
    assert written(scene) == 0
