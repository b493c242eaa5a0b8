"""adopt: a foreign message becomes one job, or finds the one that holds its key."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from pydantic import BaseModel, ValidationError

from app.adopt import adopt
from app.errors import IdempotencyConflict, PayloadTooLarge
from app.job_types import JobType
from tests.integration.scene import Scene


class Parcel(BaseModel):
    """Something to deliver; `number` is its natural key."""

    number: int
    note: str = ""


FREE = JobType(name="scene.free", payload=Parcel, foreign=True)
KEYED = JobType(name="scene.keyed", payload=Parcel, foreign=True, key=lambda parcel: str(parcel.number))


@pytest.fixture(autouse=True)
def _producer(producer_settings: object) -> None:
    assert producer_settings


def aliases(scene: Scene) -> dict[UUID, UUID]:
    """Task id -> job that answers for it."""
    found = scene.records("SELECT alias_id::text, job_id::text FROM job_aliases")
    return {UUID(row["alias_id"]): UUID(row["job_id"]) for row in found}


def test_it_becomes_a_job_under_its_own_id(scene: Scene) -> None:
    task_id = uuid4()
    assert adopt(scene.eyes, task_id, FREE, {"number": 1}) == task_id
    debt = scene.debt(task_id)
    assert (scene.state(task_id), scene.journal(task_id)) == ("queued", ["submit"])
    assert debt is not None
    assert (debt["kind"], debt["sends"]) == ("wake", 0)


@pytest.mark.parametrize("payload", [{"number": 1}, {"number": 2}])
def test_the_same_id_again_changes_nothing(scene: Scene, payload: dict[str, Any]) -> None:
    task_id = uuid4()
    adopt(scene.eyes, task_id, FREE, {"number": 1})
    before = scene.picture()
    assert adopt(scene.eyes, task_id, FREE, payload) == task_id
    assert scene.picture() == before


def test_five_at_once_make_one_job(scene: Scene) -> None:
    task_id, sessions = uuid4(), [scene.connect() for _ in range(5)]
    calls: list[Any] = [lambda on=on: adopt(on, task_id, KEYED, {"number": 1}) for on in sessions]
    (job_id,) = set(scene.at_once(*calls))
    assert scene.ask("SELECT count(*) FROM jobs") == 1
    assert aliases(scene) == {task_id: job_id}


def test_a_pruned_job_does_not_run_again(scene: Scene) -> None:
    task_id = uuid4()
    adopt(scene.eyes, task_id, FREE, {"number": 1})
    scene.ask(
        "INSERT INTO job_tombstones (job_id, type, state, payload_digest)"
        " SELECT job_id, type, 'succeeded', payload_digest FROM jobs RETURNING 1"
    )
    scene.empty_jobs()
    assert adopt(scene.eyes, task_id, FREE, {"number": 1}) == task_id
    assert scene.ask("SELECT count(*) FROM jobs") == 0


def test_the_holder_of_a_key_answers(scene: Scene) -> None:
    first, second = uuid4(), uuid4()
    holder = adopt(scene.eyes, first, KEYED, {"number": 1})
    assert adopt(scene.eyes, second, KEYED, {"number": 1}) == holder
    assert adopt(scene.eyes, uuid4(), KEYED, {"number": 2}) != holder
    assert {aliases(scene)[first], aliases(scene)[second]} == {holder}
    assert scene.ask("SELECT count(*) FROM jobs") == 2


def test_a_key_with_another_payload_is_a_conflict(scene: Scene) -> None:
    adopt(scene.eyes, uuid4(), KEYED, {"number": 1})
    before = scene.picture()
    with pytest.raises(IdempotencyConflict):
        adopt(scene.eyes, uuid4(), KEYED, {"number": 1, "note": "another"})
    assert scene.picture() == before


@pytest.mark.parametrize(
    ("payload", "error"),
    [
        ({}, ValidationError),
        ({"number": "many"}, ValidationError),
        ({"number": 1, "note": "x" * 70_000}, PayloadTooLarge),
    ],
)
def test_an_invalid_payload_writes_nothing(scene: Scene, payload: dict[str, Any], error: type[Exception]) -> None:
    before = scene.picture()
    with pytest.raises(error):
        adopt(scene.eyes, uuid4(), FREE, payload)
    assert scene.picture() == before


@pytest.mark.parametrize(("asked", "given"), [(None, 4), (0, 0), (9, 9)])
def test_its_priority_is_kept(scene: Scene, asked: int | None, given: int) -> None:
    task_id, job_type = uuid4(), replace(FREE, priority=4)
    adopt(scene.eyes, task_id, job_type, {"number": 1}, priority=asked)
    debt = scene.debt(task_id)
    assert debt is not None
    assert (scene.row(task_id)["priority"], debt["priority"]) == (given, given)


def test_its_times_are_kept(scene: Scene) -> None:
    task_id, eta = uuid4(), datetime.now(UTC) + timedelta(days=40)
    adopt(scene.eyes, task_id, FREE, {"number": 1}, eta=eta, expires=eta + timedelta(days=1))
    row, debt = scene.row(task_id), scene.debt(task_id)
    assert debt is not None
    assert (row["not_before"], row["expires_at"], debt["due_at"]) == (eta, eta + timedelta(days=1), eta)
