"""AsyncResult answers from the job row."""

from __future__ import annotations

import time
import uuid
from typing import Any

import pytest
from celery.exceptions import TimeoutError as CeleryTimeoutError
from celery.result import AsyncResult
from psycopg2 import OperationalError

from app import settings as app_settings
from app.errors import JobCancelled, JobQuarantined, UnsupportedOption
from db.session import autocommit_pool, rows
from tests.integration.scene import Background, Scene, kill_sessions
from tests.nodes.waiting import wait_for


@pytest.fixture
def app(jobs: Any) -> Any:
    return jobs.leased_effect.app


@pytest.fixture
def submitted(jobs: Any) -> Any:
    """One waiting job, as its producer sees it."""
    return jobs.leased_effect.delay(n=1)


OWNER = str(uuid.uuid4())
SUCCEEDED = {"state": "succeeded", "result_key": "k", "finished_at": "now", "result": '{"n": 1}'}
QUARANTINED = {"state": "quarantined", "cause": "permanent", "reason": "ValueError in a.py:b", "episode": 1}
CANCELLED = {"state": "cancelled", "finished_at": "now"}


@pytest.mark.parametrize(
    ("columns", "state", "ready"),
    [
        ({}, "PENDING", False),
        ({"state": "running", "worker_id": OWNER}, "STARTED", False),
        ({"state": "retry_wait", "not_before": "tomorrow"}, "RETRY", False),
        (SUCCEEDED, "SUCCESS", True),
        (QUARANTINED, "FAILURE", True),
        (CANCELLED, "REVOKED", True),
    ],
    ids=["queued", "running", "retry_wait", "succeeded", "quarantined", "cancelled"],
)
def test_each_state_in_celerys_words(
    scene: Scene, submitted: Any, columns: dict[str, Any], state: str, *, ready: bool
) -> None:
    scene.change(uuid.UUID(submitted.id), **columns)
    assert submitted.state == state
    assert submitted.ready() is ready
    assert submitted.successful() is (state == "SUCCESS")
    assert submitted.failed() is (state == "FAILURE")


def test_a_result_and_when_it_came(scene: Scene, submitted: Any) -> None:
    scene.change(uuid.UUID(submitted.id), **SUCCEEDED)
    assert submitted.get(timeout=5) == {"n": 1}
    assert submitted.result == {"n": 1}
    assert submitted.name == "tests.leased_effect"
    assert submitted.date_done == scene.row(uuid.UUID(submitted.id))["finished_at"]


def test_a_success_without_a_value(scene: Scene, submitted: Any) -> None:
    scene.change(uuid.UUID(submitted.id), **{**SUCCEEDED, "result": None})
    assert submitted.get(timeout=5) is None


def test_get_waits_for_the_end(scene: Scene, submitted: Any) -> None:
    waiting = Background(lambda: submitted.get(timeout=20))
    scene.change(uuid.UUID(submitted.id), state="running", worker_id=OWNER)
    assert not waiting.ended
    scene.change(uuid.UUID(submitted.id), **SUCCEEDED, worker_id=None)
    assert waiting.result() == {"n": 1}


def test_get_gives_up_in_time(submitted: Any) -> None:
    started = time.monotonic()
    with pytest.raises(CeleryTimeoutError, match=f"{submitted.id} is PENDING after 0.3 s"):
        submitted.get(timeout=0.3)
    assert time.monotonic() - started < 2


def test_a_timeout_of_zero_is_a_look(scene: Scene, submitted: Any) -> None:
    with pytest.raises(CeleryTimeoutError):
        submitted.get(timeout=0)
    scene.change(uuid.UUID(submitted.id), **SUCCEEDED)
    assert submitted.get(timeout=0) == {"n": 1}


def test_a_quarantined_job_raises_its_cause(scene: Scene, submitted: Any) -> None:
    scene.change(uuid.UUID(submitted.id), **QUARANTINED)
    with pytest.raises(JobQuarantined) as raised:
        submitted.get(timeout=5)
    assert (raised.value.cause, raised.value.reason) == ("permanent", "ValueError in a.py:b")
    assert str(raised.value) == f"job {submitted.id} is quarantined (permanent): ValueError in a.py:b"
    assert isinstance(submitted.get(timeout=5, propagate=False), JobQuarantined)


def test_a_quarantined_job_can_come_back(scene: Scene, submitted: Any, app: Any) -> None:
    """FAILURE is the state of now: who asks anew after a replay sees the job's success."""
    scene.change(uuid.UUID(submitted.id), **QUARANTINED)
    assert submitted.state == "FAILURE"
    scene.change(uuid.UUID(submitted.id), **SUCCEEDED)
    again = AsyncResult(submitted.id, app=app)
    assert again.state == "SUCCESS"
    assert again.get(timeout=5) == {"n": 1}


def test_a_cancelled_job_raises(scene: Scene, submitted: Any) -> None:
    scene.change(uuid.UUID(submitted.id), **CANCELLED)
    with pytest.raises(JobCancelled, match=submitted.id):
        submitted.get(timeout=5)


@pytest.mark.parametrize("task_id", ["68bc717a-3033-4ee1-a535-11c6c5696dbb", "not-a-uuid", "x" * 300, "a\0b"])
def test_an_id_that_is_no_job_is_pending(app: Any, task_id: str) -> None:
    result = AsyncResult(task_id, app=app)
    assert result.state == "PENDING"
    assert result.result is None
    assert not result.ready()


def test_a_pruned_job_still_has_its_state(scene: Scene, app: Any) -> None:
    job_id = uuid.uuid4()
    rows(
        scene.eyes,
        "INSERT INTO job_tombstones (job_id, type, state, payload_digest) VALUES (%s, 't', 'succeeded', '')",
        (str(job_id),),
    )
    assert AsyncResult(str(job_id), app=app).state == "SUCCESS"


def test_forget_is_refused(submitted: Any) -> None:
    with pytest.raises(UnsupportedOption, match="its record is kept"):
        submitted.forget()


def test_storing_is_no_second_truth(scene: Scene, submitted: Any, app: Any) -> None:
    before = scene.picture()
    app.backend.store_result(submitted.id, {"n": 2}, "SUCCESS")
    app.backend.mark_as_failure(submitted.id, ValueError("no"))
    assert scene.picture() == before
    assert submitted.state == "PENDING"


def test_a_database_that_is_away_is_told(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql+psycopg2://x@127.0.0.1:1/x")
    app_settings.settings.cache_clear()
    with pytest.raises(OperationalError):
        assert AsyncResult(str(uuid.uuid4()), app=app).state


def test_a_wait_outlives_a_lost_connection(scene: Scene, submitted: Any) -> None:
    """PostgreSQL restarts while a producer waits: the job goes on, and so does the wait."""
    waiting = Background(lambda: submitted.get(timeout=20))
    wait_for(lambda: kill_sessions(scene.eyes, "deadsure submit"), 10, "the waiting session is there", poll_s=0.01)
    scene.change(uuid.UUID(submitted.id), **SUCCEEDED)
    assert waiting.result() == {"n": 1}


def test_a_stale_connection_in_the_pool_is_replaced(scene: Scene, submitted: Any) -> None:
    pool = autocommit_pool(scene.url, app_settings.settings().submit_timeout_s)
    pool.raw_connection().close()
    assert kill_sessions(scene.eyes, "deadsure submit")
    assert submitted.state == "PENDING"
