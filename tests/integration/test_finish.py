"""succeed, retry, quarantine, release: what the owner writes, and what a stale attempt cannot write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg2
import pytest
from psycopg2.extensions import connection as PgConnection

from app import claim, finish
from app.errors import LeaseLost
from app.finish import Holder
from app.release import release
from db.session import rows
from tests.integration.scene import Background, Scene, Worker

OFFER_S = 30.0
Arrow = Callable[[PgConnection, Holder, bool], None]


def succeed(on: PgConnection, holder: Holder, in_transaction: bool) -> None:
    finish.succeed(on, holder, "key-1", '{"rows": 3}', in_transaction)


def retry(on: PgConnection, holder: Holder, in_transaction: bool) -> None:
    finish.retry(on, holder, 60.0, "transient", "TimeoutError in a.py:b", in_transaction=in_transaction)


def quarantine(on: PgConnection, holder: Holder, in_transaction: bool) -> None:
    finish.quarantine(
        on,
        holder,
        "invalid_payload",
        "ValueError in a.py:b",
        "f1",
        failure="permanent",
        offer_s=OFFER_S,
        in_transaction=in_transaction,
    )


ARROWS: list[Arrow] = [succeed, retry, quarantine]
arrows = pytest.mark.parametrize("arrow", ARROWS, ids=lambda arrow: arrow.__name__)


def begin_with_effect(worker: Worker, holder: Holder) -> None:
    """The finishing transaction of a leased job, with a row that its handler wrote."""
    rows(worker.session, "BEGIN; SAVEPOINT effect")
    write_effect(worker, holder)


def write_effect(worker: Worker, holder: Holder) -> None:
    rows(
        worker.session,
        "INSERT INTO test_effects (kind, job_id, attempt, pid) VALUES ('effect', %s, %s, 1)",
        (str(holder.claimed.job_id), holder.claimed.attempt),
    )


def effects(scene: Scene) -> int:
    return int(scene.ask("SELECT count(*) FROM test_effects"))


def reasons(scene: Scene, holder: Holder) -> set[str]:
    """What the journal's last two events give as the reason."""
    found = scene.records(
        "SELECT reason FROM job_events WHERE job_id = %s ORDER BY event_id DESC LIMIT 2",
        (str(holder.claimed.job_id),),
    )
    return {entry["reason"] for entry in found}


def idle(worker: Worker) -> bool:
    return worker.session.info.transaction_status == 0


# the owner


def test_succeed_keeps_the_proof(scene: Scene) -> None:
    worker = scene.worker()
    holder = scene.claimed(worker)
    succeed(worker.session, holder, False)
    row = scene.row(holder.claimed.job_id)
    assert (row["state"], row["attempt"], row["result_key"], row["result"]) == ("succeeded", 1, "key-1", {"rows": 3})
    assert (row["worker_id"], row["child_pid"], row["not_before"]) == (None, None, None)
    assert row["finished_at"] is not None
    assert scene.debt(holder.claimed.job_id) is None
    assert scene.journal(holder.claimed.job_id) == ["submit", "received", "claim", "result_saved", "succeed"]


def test_succeed_commits_the_handlers_rows_with_it(scene: Scene) -> None:
    worker = scene.worker()
    holder = scene.claimed(worker)
    begin_with_effect(worker, holder)
    assert effects(scene) == 0
    succeed(worker.session, holder, True)
    assert effects(scene) == 1
    assert idle(worker)


def test_retry_makes_a_debt_for_later(scene: Scene) -> None:
    worker = scene.worker()
    holder = scene.claimed(worker)
    retry(worker.session, holder, False)
    row = scene.row(holder.claimed.job_id)
    assert (row["state"], row["failures"], row["attempt"], row["cause"]) == ("retry_wait", 1, 1, "transient")
    debt = scene.debt(holder.claimed.job_id)
    assert debt is not None
    assert (debt["sends"], debt["due_at"]) == (0, row["not_before"])
    assert scene.owed(holder.claimed.job_id) == "wake 1"
    wait_s = (row["not_before"] - row["changed_at"]).total_seconds()
    assert 59 < wait_s < 61
    assert scene.journal(holder.claimed.job_id)[-2:] == ["retry", "retry_scheduled"]
    assert reasons(scene, holder) == {"transient: TimeoutError in a.py:b; in 60.000 s"}


def test_quarantine_leaves_the_first_trace_and_the_debt_for_the_second(scene: Scene) -> None:
    worker = scene.worker()
    holder = scene.claimed(worker)
    quarantine(worker.session, holder, False)
    job_id = holder.claimed.job_id
    row = scene.row(job_id)
    assert (row["state"], row["episode"], row["failures"], row["cause"]) == ("quarantined", 1, 1, "invalid_payload")
    (entry,) = scene.entries(job_id)
    assert (entry["episode"], entry["fingerprint"], entry["attempt"]) == (1, "f1", 1)
    assert (entry["cause"], entry["dead_lettered_at"], entry["closed_at"]) == ("invalid_payload", None, None)
    assert scene.owed(job_id) == "trace 1"
    debt = scene.debt(job_id)
    assert debt is not None
    assert (debt["sends"], debt["sent_at"]) == (0, None)
    wait_s = (debt["due_at"] - row["changed_at"]).total_seconds()
    assert OFFER_S <= wait_s < OFFER_S + 1  # the delivery at hand is rejected first
    assert scene.journal(job_id)[-2:] == ["quarantine", "quarantined"]
    assert reasons(scene, holder) == {"permanent: ValueError in a.py:b"}


def test_a_quarantine_counts_its_failure(scene: Scene) -> None:
    worker = scene.worker()
    holder = scene.claimed(worker, scene.job(failures=2))
    quarantine(worker.session, holder, False)
    assert scene.row(holder.claimed.job_id)["failures"] == 3


def test_a_second_quarantine_owes_a_trace_of_its_own(scene: Scene) -> None:
    worker = scene.worker()
    holder = scene.claimed(worker, scene.job(episode=1))  # replayed
    quarantine(worker.session, holder, False)
    assert scene.owed(holder.claimed.job_id) == "trace 2"
    assert [entry["episode"] for entry in scene.entries(holder.claimed.job_id)] == [2]


@arrows
def test_the_clean_path_journals_the_whole_attempt_in_one_commit(scene: Scene, arrow: Arrow) -> None:
    worker = scene.worker()
    holder = scene.begun(worker)
    job_id = holder.claimed.job_id
    rows(worker.session, "SAVEPOINT effect")
    write_effect(worker, holder)
    if arrow is not succeed:
        rows(worker.session, "ROLLBACK TO SAVEPOINT effect")
    assert scene.journal(job_id) == ["submit"]
    arrow(worker.session, holder, True)
    assert idle(worker)
    row = scene.row(job_id)
    assert (row["attempt"], row["worker_id"]) == (1, None)
    assert effects(scene) == (1 if arrow is succeed else 0)
    assert scene.journal(job_id)[:3] == ["submit", "received", "claim"]
    assert arrow.__name__ in scene.journal(job_id)
    assert scene.owed(job_id) == {"succeed": None, "retry": "wake 1", "quarantine": "trace 1"}[arrow.__name__]


def test_a_quarantine_of_the_clean_path_makes_the_debt_of_the_job_that_of_its_trace(scene: Scene) -> None:
    worker = scene.worker()
    holder = scene.begun(worker)
    rows(worker.session, "SAVEPOINT effect; ROLLBACK TO SAVEPOINT effect")
    quarantine(worker.session, holder, True)
    debt = scene.debt(holder.claimed.job_id)
    assert debt is not None
    assert (debt["kind"], debt["sends"], debt["sent_at"]) == ("trace", 0, None)
    assert (debt["due_at"] - scene.row(holder.claimed.job_id)["changed_at"]).total_seconds() >= OFFER_S


def test_a_retry_of_the_clean_path_starts_a_new_debt(scene: Scene) -> None:
    worker = scene.worker()
    holder = scene.begun(worker)
    rows(worker.session, "SAVEPOINT effect; ROLLBACK TO SAVEPOINT effect")
    retry(worker.session, holder, True)
    debt = scene.debt(holder.claimed.job_id)
    assert debt is not None
    assert (debt["sends"], debt["sent_at"]) == (0, None)
    assert debt["due_at"] == scene.row(holder.claimed.job_id)["not_before"]
    assert debt["kind"] == "wake"


def test_nothing_is_seen_of_the_clean_path_before_its_commit(scene: Scene) -> None:
    worker = scene.worker()
    holder = scene.begun(worker)
    before = scene.picture()
    write_effect(worker, holder)
    assert scene.picture() == before
    worker.session.close()  # the process is killed
    assert scene.picture() == before


@pytest.mark.parametrize("after_commit", ["", "SELECT pg_notify('deadsure_outbox', '')"])
def test_the_wake_up_of_children_comes_with_the_same_message(scene: Scene, after_commit: str) -> None:
    worker, listener = scene.worker(), scene.connect()
    rows(listener, "LISTEN deadsure_outbox")
    holder = scene.claimed(worker)
    begin_with_effect(worker, holder)
    finish.succeed(worker.session, holder, "k", None, True, after_commit)
    assert idle(worker)
    rows(listener, "SELECT 1")  # a NOTIFY that was sent is delivered with the next answer at the latest
    assert bool(listener.notifies) is bool(after_commit)


# a cancel that was asked for while the job ran


def test_retry_honours_a_cancel(scene: Scene) -> None:
    worker = scene.worker()
    holder = scene.claimed(worker)
    job_id = holder.claimed.job_id
    scene.change(job_id, cancel_requested=True)
    retry(worker.session, holder, False)
    row = scene.row(job_id)
    assert row["state"] == "cancelled"
    assert row["finished_at"] is not None
    assert scene.debt(job_id) is None


def test_retry_of_the_clean_path_honours_a_cancel_and_pays_the_debt(scene: Scene) -> None:
    job_id = scene.job(cancel_requested=True)
    worker = scene.worker()
    holder = scene.begun(worker, job_id)
    retry(worker.session, holder, True)
    assert scene.state(job_id) == "cancelled"
    assert scene.debt(job_id) is None


def test_release_honours_a_cancel(scene: Scene) -> None:
    worker = scene.worker()
    holder = scene.claimed(worker)
    scene.change(holder.claimed.job_id, cancel_requested=True)
    release(worker.session, holder.claimed.job_id, worker.worker_id, worker.pid, "the worker stops")
    assert scene.state(holder.claimed.job_id) == "cancelled"
    assert scene.debt(holder.claimed.job_id) is None


def test_an_effect_that_is_done_is_no_longer_cancelled(scene: Scene) -> None:
    worker = scene.worker()
    holder = scene.claimed(worker)
    scene.change(holder.claimed.job_id, cancel_requested=True)
    succeed(worker.session, holder, False)
    assert scene.state(holder.claimed.job_id) == "succeeded"


def test_no_journal_event_claims_a_retry_that_was_cancelled(scene: Scene) -> None:
    worker = scene.worker()
    holder = scene.claimed(worker)
    scene.change(holder.claimed.job_id, cancel_requested=True)
    retry(worker.session, holder, False)
    assert "retry_scheduled" not in scene.journal(holder.claimed.job_id)


# release


def test_release_gives_the_job_back_without_a_budget(scene: Scene) -> None:
    worker = scene.worker()
    holder = scene.claimed(worker)
    job_id = holder.claimed.job_id
    assert release(worker.session, job_id, worker.worker_id, worker.pid, "the worker stops") == 1
    row = scene.row(job_id)
    assert (row["state"], row["attempt"], row["releases"]) == ("queued", 1, 1)
    assert (row["failures"], row["crashes"], row["stalls"], row["worker_id"]) == (0, 0, 0, None)
    debt = scene.debt(job_id)
    assert debt is not None
    assert debt["sends"] == 0
    assert scene.owed(job_id) == "wake 1"
    assert scene.journal(job_id)[-1] == "release"
    again = scene.claimed(worker, job_id)
    assert again.claimed.attempt == 2
    with pytest.raises(LeaseLost):
        succeed(worker.session, holder, False)


@pytest.mark.parametrize("who", ["another worker", "another child"])
def test_nobody_else_can_release(scene: Scene, who: str) -> None:
    worker, other = scene.worker(), scene.worker(pid=99)
    holder = scene.claimed(worker)
    before = scene.picture()
    worker_id, pid = (other.worker_id, worker.pid) if who == "another worker" else (worker.worker_id, 99)
    assert release(other.session, holder.claimed.job_id, worker_id, pid, "mine?") is None
    assert scene.picture() == before


# the loser


@arrows
@pytest.mark.parametrize("in_transaction", [False, True], ids=["alone", "with the handler's rows"])
@pytest.mark.parametrize("winner", ["runs", "succeeded", "released", "retry_wait", "quarantined", "same worker"])
def test_a_stale_attempt_writes_nothing(scene: Scene, arrow: Arrow, in_transaction: bool, winner: str) -> None:
    slow, other = scene.worker(), scene.worker()
    stale = scene.claimed(slow)
    job_id = stale.claimed.job_id
    release(slow.session, job_id, slow.worker_id, slow.pid, "declared lost")
    if winner != "released":
        owner = slow if winner == "same worker" else other
        fresh = scene.claimed(owner, job_id)
        assert fresh.claimed.attempt == 2
        if winner in ("succeeded", "retry_wait", "quarantined"):
            {"succeeded": succeed, "retry_wait": retry, "quarantined": quarantine}[winner](owner.session, fresh, False)
    before = scene.picture()
    if in_transaction:
        begin_with_effect(slow, stale)
    with pytest.raises(LeaseLost, match=f"job {job_id}: attempt 1"):
        arrow(slow.session, stale, in_transaction)
    assert scene.picture() == before
    assert idle(slow)


@arrows
def test_the_right_attempt_of_the_wrong_worker_writes_nothing(scene: Scene, arrow: Arrow) -> None:
    owner, other = scene.worker(), scene.worker()
    holder = scene.claimed(owner)
    thief = Holder(holder.claimed, holder.delivery, other.worker_id)
    before = scene.picture()
    with pytest.raises(LeaseLost):
        arrow(other.session, thief, False)
    assert scene.picture() == before


@arrows
def test_the_loser_waits_for_the_winners_commit_and_then_writes_nothing(scene: Scene, arrow: Arrow) -> None:
    slow, other = scene.worker(), scene.worker()
    stale = scene.claimed(slow)
    job_id = stale.claimed.job_id
    rows(other.session, "BEGIN")
    release(other.session, job_id, slow.worker_id, slow.pid, "declared lost")
    claim.claim(other.session, stale.delivery, other.worker_id, other.pid)
    begin_with_effect(slow, stale)
    late = Background(lambda: arrow(slow.session, stale, True))
    scene.wait_until_blocked(slow.session)
    rows(other.session, "COMMIT")
    before = scene.picture()
    with pytest.raises(LeaseLost):
        late.result()
    assert scene.picture() == before
    assert effects(scene) == 0


@arrows
@pytest.mark.parametrize("winner", ["runs", "released"])
def test_a_clean_path_that_somebody_else_took_meanwhile(scene: Scene, arrow: Arrow, winner: str) -> None:
    """Its session was ended with its lease, another worker ran the job, and its process finishes late."""
    slow, other = scene.worker(), scene.worker()
    stale = scene.begun(slow)
    rows(slow.session, "ROLLBACK")
    scene.claimed(other, stale.claimed.job_id)
    if winner == "released":
        release(other.session, stale.claimed.job_id, other.worker_id, other.pid, "the worker stops")
    before = scene.picture()
    rows(slow.session, "BEGIN; SAVEPOINT effect")
    write_effect(slow, stale)
    with pytest.raises(LeaseLost):
        arrow(slow.session, stale, True)
    assert scene.picture() == before


def test_a_deferred_constraint_fails_before_the_commit_and_the_lock_stays(scene: Scene) -> None:
    """Then the handler's work can be undone and the failure written under the same lock."""
    rows(
        scene.eyes,
        "DROP TABLE IF EXISTS deferred;"
        " CREATE TABLE deferred (n int, CONSTRAINT deferred_n UNIQUE (n) DEFERRABLE INITIALLY DEFERRED)",
    )
    worker = scene.worker()
    holder = scene.begun(worker)
    rows(worker.session, "SAVEPOINT effect; INSERT INTO deferred VALUES (1), (1)")
    with pytest.raises(psycopg2.errors.UniqueViolation):
        succeed(worker.session, holder, True)
    other = scene.worker()
    assert claim.claim(other.session, holder.delivery, other.worker_id, 1) is None
    rows(worker.session, "ROLLBACK TO SAVEPOINT effect")
    quarantine(worker.session, holder, True)
    assert scene.state(holder.claimed.job_id) == "quarantined"
    assert scene.owed(holder.claimed.job_id) == "trace 1"


# a lost answer to COMMIT


@arrows
@pytest.mark.parametrize("committed", [True, False], ids=["leased", "atomic"])
def test_outcome_after_a_lost_answer(scene: Scene, arrow: Arrow, committed: bool) -> None:
    worker = scene.worker()
    holder = scene.claimed(worker) if committed else scene.begun(worker)
    assert finish.outcome(scene.eyes, holder) == "open"
    arrow(worker.session, holder, not committed)
    assert finish.outcome(scene.eyes, holder) == "ours"


@pytest.mark.parametrize("committed", [True, False], ids=["leased", "atomic"])
def test_outcome_once_another_attempt_owns_the_job(scene: Scene, committed: bool) -> None:
    worker, other = scene.worker(), scene.worker()
    holder = scene.claimed(worker) if committed else scene.begun(worker)
    job_id = holder.claimed.job_id
    if committed:
        release(scene.eyes, job_id, worker.worker_id, worker.pid, "declared lost")
    else:
        rows(worker.session, "ROLLBACK")
    fresh = scene.claimed(other, job_id)
    assert finish.outcome(scene.eyes, holder) == "other"
    succeed(other.session, fresh, False)
    assert finish.outcome(scene.eyes, holder) == "other"


def test_outcome_of_a_leased_attempt_that_was_expired(scene: Scene) -> None:
    """Running -> queued by a sweeper, nobody has claimed yet: this attempt has lost all the same."""
    worker = scene.worker()
    holder = scene.claimed(worker)
    release(scene.eyes, holder.claimed.job_id, worker.worker_id, worker.pid, "declared lost")
    assert finish.outcome(scene.eyes, holder) in ("open", "other")
    with pytest.raises(LeaseLost):
        succeed(worker.session, holder, False)


@pytest.mark.parametrize("result", [None, "null", "[]", '"text"', "0", '{"a": {"b": [1, 2.5]}}'])
def test_results_of_any_json_shape(scene: Scene, result: Any) -> None:
    worker = scene.worker()
    holder = scene.claimed(worker)
    finish.succeed(worker.session, holder, "k", result, False)
    stored = scene.ask("SELECT result::text FROM jobs WHERE job_id = %s", (str(holder.claimed.job_id),))
    assert stored == result
