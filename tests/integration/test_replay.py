"""replay and settle: one guarded decision about one quarantine, whoever else decides at the same time."""

from __future__ import annotations

import itertools
from typing import Any
from uuid import UUID

import pytest

from app import claim, dead_letters, finish, outbox, park, replay, settle
from app.cancel import cancel, cancel_quarantined
from app.dead_letters import DeadLetter
from app.failures import History, decide
from app.outbox import Debt
from app.retry_policy import RetryPolicy
from app.settings import Settings
from db.session import rows
from tests.integration.scene import Background, Scene, Worker
from tests.integration.worklist import DECIDER, FRAMES, actions, candidate, known, quarantine, quarantined


@pytest.fixture
def worker(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Worker:
    known(monkeypatch)
    return scene.worker()


def replayed(scene: Scene, job_id: UUID) -> bool:
    found = candidate(scene, job_id)
    assert found.job_type is not None
    return replay.replay(scene.connect(), found.job_type, found, DECIDER)


def test_a_replay_creates_the_debt_closes_the_entry_and_is_recorded(scene: Scene, worker: Worker) -> None:
    job_id = quarantined(scene, worker)
    assert scene.entries(job_id)[0]["traceback"] == list(FRAMES)
    assert scene.owed(job_id) == "trace 1"
    assert replayed(scene, job_id)
    row, (entry,), (action,) = scene.row(job_id), scene.entries(job_id), actions(scene, job_id)
    assert (row["state"], row["episode"], row["attempt"], row["failures"]) == ("queued", 1, 1, 1)
    assert scene.owed(job_id) == "wake 2"
    assert entry["closed_at"] is not None
    assert (action["action"], action["episode"], action["author"]) == ("replay", 1, "ann")
    assert (action["reason"], action["old_payload"]) == (DECIDER.reason, None)
    assert scene.journal(job_id)[-1] == "replay"


def test_c30_a_job_whose_attempts_were_spent_gets_a_fresh_budget_and_keeps_its_history(
    scene: Scene, worker: Worker
) -> None:
    job_id = scene.job(failures=4, crashes=2, stalls=2, max_failures=5)
    quarantined(scene, worker, job_id)
    journal = scene.journal(job_id)
    assert replayed(scene, job_id)
    row = scene.row(job_id)
    assert (row["failures"], row["crashes"], row["stalls"]) == (5, 2, 2)
    assert (row["max_failures"], row["max_crashes"], row["max_stalls"]) == (10, 5, 5)
    assert scene.journal(job_id) == [*journal, "replay"]
    delays = []
    for failures in itertools.count(5):
        decision = decide(TimeoutError(), History(failures, 10), RetryPolicy(), uncertain_may_retry=True)
        if decision.delay_s is None:
            break
        delays.append(decision.delay_s)
    assert len(delays) == 4, "four retries, then the fifth failure quarantines it"
    assert delays[0] <= 2, "and the first of them soon: the delays begin anew"


def test_the_age_of_a_replayed_job_counts_from_the_replay(scene: Scene, worker: Worker) -> None:
    """Or a deadline would end the fresh budget at its first failure."""
    job_id = quarantined(scene, worker, scene.job(created_at="yesterday"))
    assert replayed(scene, job_id)
    assert scene.claimed(worker, job_id).claimed.age_s < 60


def test_a_cancel_that_was_asked_for_before_does_not_outlive_the_decision(scene: Scene, worker: Worker) -> None:
    holder = scene.claimed(worker)
    cancel(scene.eyes, holder.claimed.job_id)
    job_id = quarantine(holder, worker)
    assert replayed(scene, job_id)
    assert scene.row(job_id)["cancel_requested"] is False


def decisions(scene: Scene, job_id: UUID) -> dict[str, Any]:
    """Each way to decide about the first quarantine, on a session of its own."""
    found = candidate(scene, job_id)
    assert found.job_type is not None
    kind = found.job_type
    sessions = [scene.connect() for _ in range(3)]
    return {
        "replay": lambda: replay.replay(sessions[0], kind, found, DECIDER),
        "settle": lambda: settle.settle(sessions[1], job_id, 1, DECIDER),
        "cancel": lambda: cancel_quarantined(sessions[2], job_id, 1, "bob", "not wanted"),
    }


@pytest.mark.parametrize("pair", [*itertools.combinations_with_replacement(("replay", "settle", "cancel"), 2)])
def test_two_operators_at_once_one_decides(scene: Scene, worker: Worker, pair: tuple[str, str]) -> None:
    job_id = quarantined(scene, worker)
    first, second = decisions(scene, job_id), decisions(scene, job_id)
    answers = scene.at_once(first[pair[0]], second[pair[1]])
    assert sorted(answers) == [False, True]
    assert [action["action"] for action in actions(scene, job_id)] == [pair[answers.index(True)]]
    arrows = [event for event in scene.journal(job_id) if event in ("replay", "settle", "cancel")]
    assert arrows == [pair[answers.index(True)]]


@pytest.mark.parametrize("late", ["replay", "settle", "cancel"])
@pytest.mark.parametrize("again", [False, True], ids=["queued again", "quarantined again"])
def test_a_decision_about_an_old_quarantine_comes_too_late(
    scene: Scene, worker: Worker, late: str, again: bool
) -> None:
    """A list that an operator looked at an hour ago must not decide about what happened since."""
    job_id = quarantined(scene, worker)
    late_decision = decisions(scene, job_id)[late]
    assert replayed(scene, job_id)
    if again:
        quarantined(scene, worker, job_id)
    before = scene.picture()
    assert late_decision() is False
    assert scene.picture() == before


def test_a_replay_waits_for_whoever_holds_the_row_and_then_looks_again(scene: Scene, worker: Worker) -> None:
    job_id = quarantined(scene, worker)
    with scene.holding(job_id) as other:
        late = Background(lambda: replayed(scene, job_id))
        scene.wait_until_blocked()
        rows(other, "UPDATE jobs SET state = 'cancelled', finished_at = clock_timestamp(); COMMIT")
        assert late.result() is False
    assert scene.state(job_id) == "cancelled"
    assert actions(scene, job_id) == []


def test_what_is_past_its_expiry_is_not_replayed(scene: Scene, worker: Worker) -> None:
    job_id = quarantined(scene, worker)
    scene.change(job_id, expires_at="yesterday")
    before = scene.picture()
    assert not replayed(scene, job_id)
    assert scene.picture() == before


# late messages of the old episode


def test_late_messages_of_the_old_episode_do_not_disturb_a_replayed_job(scene: Scene, worker: Worker) -> None:
    job_id = quarantined(scene, worker)
    old = scene.delivery(job_id, episode=1)
    assert replayed(scene, job_id)
    letter = DeadLetter(job_id, 1, 1, {}, {}, b"[]", "rejected")
    scene.sent(job_id)
    before = scene.picture(but="dead_letters")
    assert dead_letters.store(scene.eyes, letter, 0.0) == (False, False)
    assert scene.picture(but="dead_letters") == before, "neither stamped nor made due"
    quarantined(scene, worker, job_id)
    assert claim.look(worker.session, old, worker.worker_id) is claim.Refusal.QUARANTINED_TRACED
    assert dead_letters.store(scene.eyes, DeadLetter(job_id, 1, 2, {}, {}, b"[]", "x"), 0.0) == (False, False)
    assert scene.owed(job_id) == "trace 2"


def test_an_old_message_wakes_the_replayed_job_once_and_the_new_one_finds_it_done(scene: Scene, worker: Worker) -> None:
    job_id = quarantined(scene, worker)
    assert replayed(scene, job_id)
    holder = scene.claimed(worker, job_id)  # by the delivery of episode 1
    finish.succeed(worker.session, holder, "k", None, in_transaction=False)
    new = scene.delivery(job_id, episode=2)
    assert claim.claim(worker.session, new, worker.worker_id, worker.pid) is None
    assert claim.look(worker.session, new, worker.worker_id) is claim.Refusal.FINISHED


def test_a_replayed_job_never_takes_the_clean_path(scene: Scene, worker: Worker) -> None:
    """Quarantined before it ever ran: copy 1 of the old debt may still be about, beside copy 1 of the new one (H3)."""
    job_id = scene.job()
    park.park(scene.eyes, job_id, 1, 1, worker.worker_id, 600, 30)
    park.park(scene.eyes, job_id, 1, 1, worker.worker_id, 0, 30)
    assert (scene.state(job_id), scene.row(job_id)["attempt"]) == ("quarantined", 0)
    assert replayed(scene, job_id)
    ((debt),) = take(scene)
    assert (debt.copy, debt.episode) == (1, 2)
    for episode in (1, 2):
        message = scene.delivery(job_id, episode=episode)
        assert claim.begin_atomic(worker.session, message, worker.worker_id) is None
    assert scene.claimed(worker, job_id).claimed.attempt == 1


def take(scene: Scene) -> list[Debt]:
    return outbox.take(scene.eyes, "jobs", Settings())


# settle


def test_settle_closes_everything(scene: Scene, worker: Worker) -> None:
    job_id = quarantined(scene, worker)
    assert settle.settle(scene.eyes, job_id, 1, DECIDER, "charge:7", '{"reference": "7"}')
    row, (entry,), (action,) = scene.row(job_id), scene.entries(job_id), actions(scene, job_id)
    assert (row["state"], row["result_key"], row["result"]) == ("succeeded", "charge:7", {"reference": "7"})
    assert row["finished_at"] is not None
    assert scene.debt(job_id) is None
    assert entry["closed_at"] is not None
    assert (action["action"], action["author"], action["reason"]) == ("settle", "ann", DECIDER.reason)
    assert scene.journal(job_id)[-1] == "settle"
    assert cancel(scene.eyes, job_id).value == "finished already"


def test_a_recorded_cancel_says_who_and_why(scene: Scene, worker: Worker) -> None:
    job_id = quarantined(scene, worker)
    assert cancel_quarantined(scene.eyes, job_id, 1, "bob", "the account is closed")
    (action,) = actions(scene, job_id)
    assert (action["action"], action["author"], action["reason"]) == ("cancel", "bob", "the account is closed")
    assert (scene.state(job_id), scene.debt(job_id)) == ("cancelled", None)
    assert scene.entries(job_id)[0]["closed_at"] is not None


def test_a_running_job_is_not_touched_by_a_cancel_of_its_quarantine(scene: Scene, worker: Worker) -> None:
    job_id = quarantined(scene, worker)
    assert replayed(scene, job_id)
    scene.claimed(worker, job_id)
    assert not cancel_quarantined(scene.eyes, job_id, 1, "bob", "late")
    assert scene.row(job_id)["cancel_requested"] is False
