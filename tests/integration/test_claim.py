"""claim: the gate before every effect, with a second connection that is there first."""

from __future__ import annotations

import uuid
from functools import partial
from typing import Any

import pytest

from app import claim
from app.claim import Refusal
from db.session import one, rows
from tests.integration.scene import Scene, Worker

ME = 4711


def look(scene: Scene, worker: Worker, job_id: uuid.UUID) -> Refusal:
    return claim.look(worker.session, scene.delivery(job_id), worker.worker_id)


def claim_here(scene: Scene, worker: Worker, job_id: uuid.UUID) -> claim.Claimed | None:
    return claim.claim(worker.session, scene.delivery(job_id), worker.worker_id, ME)


def test_a_claim_takes_the_job_pays_the_debt_and_journals(scene: Scene) -> None:
    worker, job_id = scene.worker(pid=ME), scene.job(n=7)
    won = claim.claim(worker.session, scene.delivery(job_id, delivery_tag="12"), worker.worker_id, ME)
    assert won is not None
    assert (won.attempt, won.payload, won.type, won.version, won.committed) == (1, {"n": 7}, "scene.plain", 1, True)
    assert (won.failures, won.max_failures, won.correlation_id) == (0, 5, str(job_id))
    row = scene.row(job_id)
    assert (row["state"], row["attempt"], row["child_pid"]) == ("running", 1, ME)
    assert row["worker_id"] == str(worker.worker_id)
    assert scene.debt(job_id) is None
    assert scene.journal(job_id) == ["submit", "received", "claim"]
    noted = scene.records("SELECT * FROM job_events WHERE job_id = %s AND event = 'claim'", (str(job_id),))[0]
    assert (noted["attempt"], noted["copy"], noted["delivery_tag"], noted["redelivered"]) == (1, 1, "12", False)


def test_two_connections_claim_at_once_and_one_wins(scene: Scene) -> None:
    workers = [scene.worker(), scene.worker()]
    for _ in range(20):
        job_id = scene.job()
        won = scene.at_once(*[partial(claim_here, scene, worker, job_id) for worker in workers])
        assert sorted(claimed is not None for claimed in won) == [False, True]
        assert scene.row(job_id)["attempt"] == 1
        assert scene.journal(job_id).count("claim") == 1
        loser = workers[won.index(None)]
        assert look(scene, loser, job_id) is Refusal.OWNED


@pytest.mark.parametrize("first", ["committed", "atomic"])
def test_a_row_held_by_another_connection_is_locked_and_nothing_waits(scene: Scene, first: str) -> None:
    holder, other, job_id = scene.worker(), scene.worker(), scene.job()
    scene.sent(job_id)
    delivery = scene.delivery(job_id)
    if first == "atomic":
        assert claim.begin_atomic(holder.session, delivery, holder.worker_id)
    else:
        rows(holder.session, "BEGIN")
        assert claim.claim(holder.session, delivery, holder.worker_id, ME)
    rows(other.session, "SET statement_timeout = '2s'")
    assert claim.begin_atomic(other.session, delivery, other.worker_id) is None
    assert claim.claim(other.session, delivery, other.worker_id, ME) is None
    assert look(scene, other, job_id) is Refusal.LOCKED
    rows(holder.session, "ROLLBACK")
    won = claim.claim(other.session, delivery, other.worker_id, ME)
    assert won is not None
    assert won.attempt == 1


def test_the_claim_that_waited_for_nothing_sees_the_winner_after_its_commit(scene: Scene) -> None:
    first, second = scene.worker(), scene.worker()
    holder = scene.begun(first)
    job_id = holder.claimed.job_id
    assert look(scene, second, job_id) is Refusal.LOCKED
    rows(first.session, "ROLLBACK")
    scene.claimed(first, job_id)
    assert claim.claim(second.session, scene.delivery(job_id), second.worker_id, ME) is None
    assert look(scene, second, job_id) is Refusal.OWNED


@pytest.mark.parametrize("how", ["over", "lost", "stopped", "unknown"])
@pytest.mark.parametrize("mode", ["leased", "atomic"])
def test_a_worker_without_a_live_lease_claims_nothing(scene: Scene, how: str, mode: str) -> None:
    worker, job_id = scene.worker(), scene.job()
    scene.sent(job_id)
    match how:
        case "over":
            scene.end_lease(worker)
        case "lost":
            scene.lose(worker)
        case "stopped":
            scene.do("UPDATE workers SET stopped_at = clock_timestamp() WHERE worker_id = %s", worker)
        case "unknown":
            worker.worker_id = uuid.uuid4()
    before = scene.picture()
    delivery = scene.delivery(job_id)
    if mode == "leased":
        assert claim.claim(worker.session, delivery, worker.worker_id, ME) is None
    else:
        assert claim.begin_atomic(worker.session, delivery, worker.worker_id) is None
    assert look(scene, worker, job_id) is Refusal.NO_LEASE
    assert scene.picture() == before
    assert one(worker.session, "SELECT now() = statement_timestamp()") == (True,)  # no transaction stayed open


FINISHED = {"state": "succeeded", "result_key": "k", "finished_at": "now"}
CANCELLED = {"state": "cancelled", "finished_at": "now"}
QUARANTINED: dict[str, Any] = {"state": "quarantined", "cause": "permanent", "episode": 1}
WAITING = {"state": "retry_wait", "not_before": "tomorrow"}
LATER = {"not_before": "tomorrow"}


EXPIRED = {"expires_at": "yesterday"}


@pytest.mark.parametrize(
    ("columns", "refusal"),
    [
        (FINISHED, Refusal.FINISHED),
        (CANCELLED, Refusal.FINISHED),
        (QUARANTINED, Refusal.QUARANTINED),
        (WAITING, Refusal.NOT_DUE),
        (LATER, Refusal.NOT_DUE),
        (EXPIRED, Refusal.EXPIRED),
        ({**WAITING, **EXPIRED}, Refusal.EXPIRED),
    ],
    ids=["succeeded", "cancelled", "quarantined", "retry_wait", "countdown", "expired", "expired while it waited"],
)
def test_a_delivery_that_finds_no_work_says_why_and_changes_nothing(
    scene: Scene, columns: dict[str, Any], refusal: Refusal
) -> None:
    worker, job_id = scene.worker(), scene.job(**columns)
    scene.sent(job_id)
    if refusal is Refusal.QUARANTINED:
        owe_trace(scene, job_id)
    before = scene.picture()
    delivery = scene.delivery(job_id)
    assert claim.begin_atomic(worker.session, delivery, worker.worker_id) is None
    assert claim.claim(worker.session, delivery, worker.worker_id, ME) is None
    assert claim.look(worker.session, delivery, worker.worker_id) is refusal
    assert scene.picture() == before
    claim.received(worker.session, delivery, worker.worker_id, refusal)
    last = scene.records("SELECT * FROM job_events WHERE job_id = %s ORDER BY event_id DESC LIMIT 1", (str(job_id),))
    assert (last[0]["event"], last[0]["reason"]) == ("received", refusal.value)


def owe_trace(scene: Scene, job_id: uuid.UUID) -> None:
    """The job's debt is that for its first dead letter."""
    rows(scene.eyes, "UPDATE outbox SET kind = 'trace', episode = 1 WHERE job_id = %s", (str(job_id),))


def test_a_quarantined_job_with_its_trace_needs_no_second_one(scene: Scene) -> None:
    worker, job_id = scene.worker(), scene.job(**QUARANTINED)
    owe_trace(scene, job_id)
    assert look(scene, worker, job_id) is Refusal.QUARANTINED
    rows(scene.eyes, "DELETE FROM outbox WHERE job_id = %s", (str(job_id),))  # the intake has stored it
    assert look(scene, worker, job_id) is Refusal.QUARANTINED_TRACED


def test_only_a_delivery_of_the_present_episode_can_leave_its_trace(scene: Scene) -> None:
    worker, job_id = scene.worker(), scene.job(**{**QUARANTINED, "episode": 2})  # replayed, and failed again
    owe_trace(scene, job_id)
    assert look(scene, worker, job_id) is Refusal.QUARANTINED_TRACED  # the debt is the old episode's
    rows(scene.eyes, "UPDATE outbox SET episode = 2 WHERE job_id = %s", (str(job_id),))
    assert look(scene, worker, job_id) is Refusal.QUARANTINED_TRACED  # and so is this delivery
    delivery = scene.delivery(job_id, episode=2)
    assert claim.look(worker.session, delivery, worker.worker_id) is Refusal.QUARANTINED


def test_a_job_that_is_not_there(scene: Scene) -> None:
    worker, nobody = scene.worker(), uuid.uuid4()
    assert claim.claim(worker.session, scene.delivery(nobody), worker.worker_id, ME) is None
    assert claim.begin_atomic(worker.session, scene.delivery(nobody), worker.worker_id) is None
    assert look(scene, worker, nobody) is Refusal.UNKNOWN


def test_a_due_retry_is_claimed_and_the_attempt_grows(scene: Scene) -> None:
    worker = scene.worker()
    job_id = scene.job(state="retry_wait", not_before="yesterday", attempt=4, failures=2)
    won = claim.claim(worker.session, scene.delivery(job_id), worker.worker_id, ME)
    assert won is not None
    assert (won.attempt, won.failures) == (5, 2)


@pytest.mark.parametrize(
    ("changed", "allowed"),
    [
        ({}, True),
        ({"copy": 2}, False),
        ({"redelivered": True}, False),
        ({"redelivered_known": False}, False),
        ({"redelivered": True, "redelivered_known": False}, False),
    ],
)
def test_the_clean_path_as_far_as_the_message_tells(scene: Scene, changed: dict[str, Any], allowed: bool) -> None:
    assert claim.may_begin_atomic(scene.delivery(uuid.uuid4(), **changed)) is allowed


@pytest.mark.parametrize(
    ("columns", "sends", "allowed"),
    [
        ({}, 1, True),
        ({"attempt": 1}, 1, False),
        ({"crashes": 1}, 1, False),
        ({}, 2, False),
        ({"state": "retry_wait", "not_before": "yesterday"}, 1, False),
    ],
    ids=["first start", "started before", "crashed before", "sent twice", "failed before"],
)
def test_the_clean_path_as_far_as_the_row_tells(
    scene: Scene, columns: dict[str, Any], sends: int, allowed: bool
) -> None:
    worker, job_id = scene.worker(), scene.job(**columns)
    scene.sent(job_id, sends)
    begun = claim.begin_atomic(worker.session, scene.delivery(job_id), worker.worker_id)
    assert (begun is not None) is allowed
    status = worker.session.info.transaction_status
    assert (status != 0) is allowed  # libpq: 0 is idle
    if begun:
        assert (begun.attempt, begun.committed) == (1, False)
        assert scene.row(job_id)["attempt"] == 0


def test_the_row_lock_outlives_the_handlers_savepoint(scene: Scene) -> None:
    worker, other = scene.worker(), scene.worker()
    holder = scene.begun(worker)
    rows(worker.session, "SAVEPOINT effect; ROLLBACK TO SAVEPOINT effect")
    assert claim.claim(other.session, holder.delivery, other.worker_id, ME) is None
    assert look(scene, other, holder.claimed.job_id) is Refusal.LOCKED


def test_a_held_row_says_nothing_about_the_next_job_of_the_session(scene: Scene) -> None:
    worker = scene.worker()
    scene.begun(worker)
    rows(worker.session, "COMMIT")
    other = scene.job()
    scene.sent(other)
    with scene.holding(other):
        assert claim.begin_atomic(worker.session, scene.delivery(other), worker.worker_id) is None
