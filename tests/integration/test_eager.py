"""Eager mode: a job is submitted and attempted at once, in the caller's process, on the real database."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy.orm import Session

from app.errors import JobQuarantined, UnsupportedOption
from db import session
from tests.integration.scene import Scene


@pytest.fixture
def edges(jobs: Any) -> Iterator[Any]:
    """`tests.faults.jobs_edges`, with the app in eager mode."""
    import tests.faults.jobs_edges  # noqa: PLC0415

    app = jobs.leased_effect.app
    app.conf.task_always_eager = True
    yield tests.faults.jobs_edges
    app.conf.task_always_eager = False


def effects(scene: Scene, job_id: str, kind: str = "effect") -> int:
    return int(scene.ask("SELECT count(*) FROM test_effects WHERE kind = %s AND job_id = %s", (kind, job_id)))


@pytest.mark.parametrize("mode", ["leased_effect", "atomic"])
def test_success_and_its_result(scene: Scene, edges: Any, jobs: Any, mode: str) -> None:
    assert edges.app.conf.task_always_eager
    result = getattr(jobs, mode).delay(n=4)
    assert (result.state, result.get(timeout=1)) == ("SUCCESS", {"n": 4})
    assert effects(scene, result.id) == 1
    assert scene.debt(uuid.UUID(result.id)) is None


def test_retries_are_made_without_their_delays(scene: Scene, edges: Any) -> None:
    result = edges.fails.delay(n=2)
    assert result.get(timeout=1) == {"tries": 3}
    assert (effects(scene, result.id, "start"), effects(scene, result.id)) == (3, 1)
    assert scene.row(uuid.UUID(result.id))["failures"] == 2


@pytest.mark.parametrize(("n", "cause"), [(-1, "permanent"), (99, "attempts_spent")])
def test_quarantine(scene: Scene, edges: Any, n: int, cause: str) -> None:
    result = edges.fails.delay(n=n)
    with pytest.raises(JobQuarantined, match=cause):
        result.get(timeout=1)
    assert [entry["cause"] for entry in scene.entries(uuid.UUID(result.id))] == [cause]
    assert effects(scene, result.id) == 0


def test_children_run_after_their_parent(scene: Scene, edges: Any) -> None:
    result = edges.family.delay(n=3)
    children = result.get(timeout=1)
    assert len(children) == 3
    assert {scene.state(uuid.UUID(child)) for child in children} == {"succeeded"}
    assert [effects(scene, job_id) for job_id in (result.id, *children)] == [1, 1, 1, 1]
    assert {str(scene.row(uuid.UUID(child))["parent_id"]) for child in children} == {result.id}


def test_same_key_runs_once(scene: Scene, edges: Any) -> None:
    first, again = (edges.text_job.apply_async(kwargs={"text": "abc"}, idempotency_key="k") for _ in range(2))
    assert first.id == again.id
    assert again.get(timeout=1) == 3
    assert effects(scene, first.id, "start") == 1


def test_submit_in_a_session_is_refused(scene: Scene, edges: Any) -> None:
    """It exists when the caller commits, so it cannot run before."""
    with Session(session.engine(scene.url)) as mine, pytest.raises(UnsupportedOption, match="always_eager"):
        edges.text_job.submit(mine, text="abc")
    assert scene.ask("SELECT count(*) FROM jobs") == 0


def test_its_lease_is_given_back(scene: Scene, edges: Any) -> None:
    edges.text_job.delay(text="abc")
    assert scene.ask("SELECT count(*) FROM workers WHERE stopped_at IS NULL") == 0
