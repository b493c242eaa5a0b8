"""Cancel, by every name that Celery has for it: a state in the database, which no restart forgets."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from app import cancel, claim, finish, release, sweep
from app.cancel import Cancelled
from app.errors import JobCancelled
from tests.integration.scene import Scene

DONE: dict[str, Any] = {"state": "succeeded", "result_key": "k", "finished_at": "now"}


@pytest.mark.parametrize("way", ["result", "control", "terminate", "list"])
def test_revoke_is_cancel(scene: Scene, jobs: Any, way: str) -> None:
    result = jobs.leased_effect.delay(n=1)
    control = jobs.leased_effect.app.control
    match way:
        case "result":
            result.revoke()
        case "control":
            control.revoke(result.id)
        case "terminate":
            control.terminate(result.id)
        case "list":
            control.revoke([result.id])
    assert result.state == "REVOKED"
    with pytest.raises(JobCancelled):
        result.get(timeout=1)
    assert scene.debt(uuid.UUID(result.id)) is None
    assert scene.journal(uuid.UUID(result.id)) == ["submit", "cancel"]


@pytest.mark.parametrize("state", ["queued", "retry_wait", "quarantined"])
def test_who_waits_is_cancelled(scene: Scene, state: str) -> None:
    holder = scene.claimed(scene.worker())
    job_id, on = holder.claimed.job_id, scene.eyes
    if state == "queued":
        job_id = scene.job()
    elif state == "retry_wait":
        finish.retry(on, holder, 60, "transient", "why", in_transaction=False)
    else:
        finish.quarantine(on, holder, "permanent", "why", "f", failure="permanent", offer_s=1, in_transaction=False)
    assert scene.state(job_id) == state
    assert cancel.cancel(on, job_id) is Cancelled.CANCELLED
    assert (scene.state(job_id), scene.debt(job_id)) == ("cancelled", None)
    assert all(entry["closed_at"] for entry in scene.entries(job_id))


def test_c26_message_of_a_cancelled_job_finds_nothing_to_do(scene: Scene) -> None:
    job_id = scene.job()
    cancel.cancel(scene.eyes, job_id)
    worker = scene.worker()
    late = scene.delivery(job_id, redelivered=True)
    assert claim.claim(worker.session, late, worker.worker_id, worker.pid) is None
    assert claim.begin_atomic(worker.session, late, worker.worker_id) is None
    assert claim.look(worker.session, late, worker.worker_id) is claim.Refusal.FINISHED


def test_running_job_is_asked_and_may_finish(scene: Scene) -> None:
    holder = scene.claimed(scene.worker())
    job_id = holder.claimed.job_id
    assert cancel.cancel(scene.eyes, job_id) is Cancelled.REQUESTED
    assert (scene.state(job_id), scene.row(job_id)["cancel_requested"]) == ("running", True)
    finish.succeed(scene.eyes, holder, "k", None, in_transaction=False)
    assert scene.state(job_id) == "succeeded"
    assert cancel.cancel(scene.eyes, job_id) is Cancelled.FINISHED
    assert scene.state(job_id) == "succeeded"


@pytest.mark.parametrize("arrow", ["retry", "release", "expire"])
def test_request_is_honoured_by_the_arrow_that_would_try_again(scene: Scene, arrow: str) -> None:
    worker = scene.worker()
    holder = scene.claimed(worker)
    job_id = holder.claimed.job_id
    cancel.cancel(scene.eyes, job_id)
    match arrow:
        case "retry":
            finish.retry(scene.eyes, holder, 60, "transient", "why", in_transaction=False)
        case "release":
            release.release(scene.eyes, job_id, worker.worker_id, worker.pid, "leaving")
        case "expire":
            sweep.expire_child(scene.eyes, job_id, worker.worker_id, worker.pid, "died")
    row = scene.row(job_id)
    assert (row["state"], row["finished_at"] is not None, scene.debt(job_id)) == ("cancelled", True, None)
    assert scene.entries(job_id) == []


def test_atomic_job_at_work_is_not_waited_for(scene: Scene) -> None:
    holder = scene.begun(scene.worker())
    assert cancel.cancel(scene.eyes, holder.claimed.job_id) is Cancelled.RUNNING
    assert scene.state(holder.claimed.job_id) == "queued"


def test_finished_and_unknown_jobs_are_left_alone(scene: Scene, jobs: Any) -> None:
    done = scene.job(**DONE)
    assert cancel.cancel(scene.eyes, done) is Cancelled.FINISHED
    assert cancel.cancel(scene.eyes, uuid.uuid4()) is Cancelled.UNKNOWN
    jobs.leased_effect.app.control.revoke(str(done))
    assert scene.state(done) == "succeeded"


def test_only_what_is_past_its_time_expires(scene: Scene, jobs: Any) -> None:
    """`expires` is looked at by the claim; the cancel for it is guarded by the same clock."""
    late = uuid.UUID(jobs.leased_effect.apply_async(kwargs={"n": 1}, expires=3600).id)
    assert cancel.cancel(scene.eyes, late, cause="expired") is Cancelled.FINISHED
    assert scene.state(late) == "queued"
    scene.change(late, expires_at="yesterday")
    worker = scene.worker()
    delivery = scene.delivery(late)
    assert claim.claim(worker.session, delivery, worker.worker_id, worker.pid) is None
    assert claim.look(worker.session, delivery, worker.worker_id) is claim.Refusal.EXPIRED
    assert cancel.cancel(scene.eyes, late, cause="expired") is Cancelled.CANCELLED
    assert scene.state(late) == "cancelled"


def test_asking_a_running_job_is_told_in_its_journal(scene: Scene) -> None:
    job_id = scene.claimed(scene.worker()).claimed.job_id
    assert cancel.cancel(scene.eyes, job_id, reason="ann: the wrong month") is Cancelled.REQUESTED
    found = scene.record("SELECT * FROM job_events WHERE job_id = %s AND event = 'cancel_requested'", (str(job_id),))
    assert found["reason"] == "ann: the wrong month"


def test_a_quarantined_job_that_is_revoked_has_a_decision(scene: Scene) -> None:
    worker = scene.worker()
    holder = scene.claimed(worker)
    finish.quarantine(
        worker.session, holder, "permanent", "r", "f", failure="permanent", offer_s=30, in_transaction=False
    )
    job_id = holder.claimed.job_id
    assert cancel.cancel(scene.eyes, job_id, reason="revoked", author="bob") is Cancelled.CANCELLED
    decided = scene.record("SELECT * FROM quarantine_actions WHERE job_id = %s", (str(job_id),))
    assert (decided["action"], decided["author"], decided["reason"], decided["episode"]) == (
        "cancel",
        "bob",
        "revoked",
        1,
    )
