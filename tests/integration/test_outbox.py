"""The outbox as a debt: what a relay takes, when it takes it again, and what makes it hurry."""

from __future__ import annotations

import dataclasses
import itertools
from datetime import datetime
from functools import partial
from typing import Any
from uuid import UUID

import pytest

from app import claim, outbox
from app.outbox import Debt
from app.settings import Settings
from db.session import rows
from tests.integration.scene import Scene

SETTINGS = Settings(prefetch=1, resend_first_s=30, resend_max_s=900, window=1000, batch=200, evidence_age_s=2)


def settings(**changed: Any) -> Settings:
    return dataclasses.replace(SETTINGS, **changed)


def take(scene: Scene, **changed: Any) -> list[Debt]:
    return outbox.take(scene.eyes, "jobs", settings(**changed))


def make_due(scene: Scene, job_id: UUID | None = None) -> None:
    rows(
        scene.eyes,
        "UPDATE outbox SET due_at = clock_timestamp() - interval '1 s' WHERE %(id)s IS NULL OR job_id = %(id)s::uuid",
        {"id": str(job_id) if job_id else None},
    )


def gap_s(scene: Scene, job_id: UUID) -> float:
    """Seconds between the last send and the next."""
    debt = scene.debt(job_id)
    assert debt is not None
    return float((debt["due_at"] - debt["sent_at"]).total_seconds())


def set_sent(scene: Scene, job_id: UUID, sends: int, ago_s: float) -> None:
    rows(
        scene.eyes,
        "UPDATE outbox SET sends = %s, sent_at = clock_timestamp() - make_interval(secs => %s),"
        " due_at = clock_timestamp() + interval '1 h' WHERE job_id = %s",
        (sends, ago_s, str(job_id)),
    )


def now(scene: Scene) -> datetime:
    found: datetime = scene.ask("SELECT clock_timestamp()")
    return found


# take


def test_a_new_debt_is_taken_with_all_that_the_message_needs(scene: Scene) -> None:
    job_id = scene.job()
    (taken,) = take(scene)
    assert str(taken.job_id) == str(job_id)
    assert (taken.type, taken.version, taken.priority, taken.copy) == ("scene.plain", 1, 0, 1)
    assert (taken.correlation_id, taken.trace_context) == (str(job_id), None)
    assert (taken.kind, taken.episode) == ("wake", 1)
    debt = scene.debt(job_id)
    assert debt is not None
    assert (debt["sends"], debt["returned_at"]) == (1, None)
    assert take(scene) == []


def test_a_taken_debt_carries_its_job_id_as_its_type_says(scene: Scene) -> None:
    scene.job()
    (debt,) = take(scene)
    assert isinstance(debt.job_id, UUID)


def test_the_send_is_committed_and_no_lock_is_kept(scene: Scene) -> None:
    """The claim that pays the debt never waits for a broker."""
    worker, job_id, relay = scene.worker(), scene.job(), scene.connect()
    assert outbox.take(relay, "jobs", SETTINGS)
    assert relay.info.transaction_status == 0
    assert scene.debt(job_id) is not None
    rows(worker.session, "SET lock_timeout = '1ms'")
    assert claim.claim(worker.session, scene.delivery(job_id), worker.worker_id, 1) is not None
    assert scene.debt(job_id) is None


def test_a_debt_that_is_being_paid_is_skipped(scene: Scene) -> None:
    worker, held, free = scene.worker(), scene.job(), scene.job()
    rows(worker.session, "BEGIN")
    assert claim.claim(worker.session, scene.delivery(held), worker.worker_id, 1)
    rows(scene.eyes, "SET lock_timeout = '1s'")
    assert [str(debt.job_id) for debt in take(scene)] == [str(free)]


def test_a_debt_for_later_waits_in_the_database(scene: Scene) -> None:
    job_id = scene.job()
    rows(scene.eyes, "UPDATE outbox SET due_at = clock_timestamp() + interval '90 s'")
    assert take(scene) == []
    due_s = outbox.next_due_s(scene.eyes, "jobs")
    assert due_s is not None
    assert 85 < due_s <= 90
    make_due(scene, job_id)
    assert len(take(scene)) == 1


def test_the_gap_doubles_up_to_its_cap_and_the_copy_counts(scene: Scene) -> None:
    job_id = scene.job()
    gaps = []
    for copy in range(1, 9):
        make_due(scene)
        (debt,) = take(scene)
        assert debt.copy == copy
        gaps.append(round(gap_s(scene, job_id)))
    assert gaps == [30, 60, 120, 240, 480, 900, 900, 900]


def test_the_gap_of_a_debt_that_was_sent_a_thousand_times(scene: Scene) -> None:
    job_id = scene.job()
    set_sent(scene, job_id, 5000, 10)
    make_due(scene)
    assert [debt.copy for debt in take(scene)] == [5001]
    assert round(gap_s(scene, job_id)) == 900


def test_the_window_bounds_first_sends(scene: Scene) -> None:
    for _ in range(10):
        scene.job()
    assert len(take(scene, window=4)) == 4
    assert take(scene, window=4) == []
    assert outbox.unpaid_messages(scene.eyes, "jobs", lambda *_: 1) == 4
    assert outbox.unpaid_messages(scene.eyes, "jobs", lambda *_: 3) == 2
    rows(scene.eyes, "DELETE FROM outbox WHERE job_id = (SELECT job_id FROM outbox WHERE sends > 0 LIMIT 1)")
    assert len(take(scene, window=4)) == 1


def test_resends_pass_a_full_window(scene: Scene) -> None:
    for _ in range(5):
        scene.job()
    first = {debt.job_id for debt in take(scene, window=2)}
    make_due(scene)
    again = take(scene, window=2)
    assert {debt.job_id for debt in again} == first
    assert {debt.copy for debt in again} == {2}


def test_the_batch_bounds_one_statement(scene: Scene) -> None:
    for _ in range(7):
        scene.job()
    assert [len(take(scene, batch=3)) for _ in range(4)] == [3, 3, 1, 0]


def test_queues_do_not_share_a_window(scene: Scene) -> None:
    scene.job()
    other = scene.job()
    rows(scene.eyes, "UPDATE outbox SET queue = 'mail' WHERE job_id = %s", (str(other),))
    assert len(take(scene, window=1)) == 1
    taken = outbox.take(scene.eyes, "mail", settings(window=1))
    assert [str(debt.job_id) for debt in taken] == [str(other)]


def test_the_highest_priority_fills_the_window_first_and_the_oldest_within_it(scene: Scene) -> None:
    expected: list[tuple[int, int]] = []
    for age, priority in itertools.product(range(3), (0, 4, 9)):
        job_id = scene.job(n=age)
        rows(
            scene.eyes,
            "UPDATE outbox SET priority = %s, due_at = clock_timestamp() - make_interval(secs => %s) WHERE job_id = %s",
            (priority, 10 + age, str(job_id)),
        )
        expected.append((priority, age))
    seen: list[tuple[int, int]] = []
    while taken := take(scene, batch=1):
        job = scene.row(UUID(str(taken[0].job_id)))
        seen.append((taken[0].priority, job["payload"]["n"]))
    assert seen == sorted(expected, key=lambda pair: (-pair[0], -pair[1]))


def test_one_batch_is_published_highest_priority_first(scene: Scene) -> None:
    for priority in (0, 9, 3, 5, 0, 9):
        job_id = scene.job()
        rows(scene.eyes, "UPDATE outbox SET priority = %s WHERE job_id = %s", (priority, str(job_id)))
    assert [debt.priority for debt in take(scene)] == [9, 9, 5, 3, 0, 0]


def test_two_relays_at_once_take_different_debts(scene: Scene) -> None:
    for _ in range(300):
        scene.job()
    relays = [scene.connect() for _ in range(3)]
    taken = scene.at_once(*[partial(outbox.take, r, "jobs", settings(batch=120)) for r in relays])
    ids = [debt.job_id for batch in taken for debt in batch]
    assert len(ids) == len(set(ids))
    rest = [outbox.take(scene.eyes, "jobs", SETTINGS) for _ in range(3)]
    ids += [debt.job_id for batch in rest for debt in batch]
    assert len(ids) == len(set(ids)) == 300
    assert scene.ask("SELECT array_agg(DISTINCT sends) FROM outbox") == [1]


def test_a_relay_that_looks_while_another_holds_the_rows(scene: Scene) -> None:
    for _ in range(6):
        scene.job()
    other = scene.connect()
    rows(other, "BEGIN")
    held = {debt.job_id for debt in outbox.take(other, "jobs", settings(batch=4))}
    free = {debt.job_id for debt in take(scene)}
    assert (len(held), len(free), held & free) == (4, 2, set())
    rows(other, "ROLLBACK")  # that relay died before it published: nothing was sent, nothing is noted
    assert {debt.job_id for debt in take(scene)} == held


def test_resends_taken_by_two_relays_are_sent_once(scene: Scene) -> None:
    for _ in range(100):
        scene.job()
    take(scene)
    make_due(scene)
    relays = [scene.connect() for _ in range(2)]
    taken = scene.at_once(*[partial(outbox.take, r, "jobs", SETTINGS) for r in relays])
    ids = [debt.job_id for batch in taken for debt in batch]
    assert len(ids) == len(set(ids)) == 100
    assert scene.ask("SELECT array_agg(DISTINCT sends) FROM outbox") == [2]


def test_next_due_of_nothing_and_of_what_is_overdue(scene: Scene) -> None:
    assert outbox.next_due_s(scene.eyes, "jobs") is None
    scene.job()
    due_s = outbox.next_due_s(scene.eyes, "jobs")
    assert due_s is not None
    assert due_s < 0
    take(scene)
    due_s = outbox.next_due_s(scene.eyes, "jobs")
    assert due_s is not None
    assert 29 < due_s <= 30


# evidence of loss


@pytest.mark.parametrize(("sends", "age_s"), [(1, 2), (2, 4), (3, 8), (4, 16), (7, 128)])
def test_evidence_brings_a_debt_forward_to_its_least_age(scene: Scene, sends: int, age_s: float) -> None:
    young, old = scene.job(), scene.job()
    set_sent(scene, young, sends, age_s - 0.9)
    set_sent(scene, old, sends, age_s + 0.9)
    outbox.note_loss(scene.eyes, "jobs", 2.0)
    assert gap_s(scene, young) == pytest.approx(age_s, abs=0.001)
    debt = scene.debt(old)
    assert debt is not None
    assert debt["due_at"] <= now(scene)
    assert [str(taken.job_id) for taken in take(scene)] == [str(old)]


def test_evidence_never_puts_a_debt_off(scene: Scene) -> None:
    job_id = scene.job()
    set_sent(scene, job_id, 6, 1)
    rows(scene.eyes, "UPDATE outbox SET due_at = clock_timestamp() + interval '3 s'")
    before = scene.debt(job_id)
    outbox.note_loss(scene.eyes, "jobs", 2.0)
    assert scene.debt(job_id) == before


def test_evidence_again_and_again_does_not_publish_without_end(scene: Scene) -> None:
    """A broker that flaps: each send doubles the least age of the next one."""
    job_id = scene.job()
    take(scene)
    outbox.note_loss(scene.eyes, "jobs", 2.0)
    first = gap_s(scene, job_id)
    for _ in range(5):
        outbox.note_loss(scene.eyes, "jobs", 2.0)
    assert gap_s(scene, job_id) == pytest.approx(first, abs=0.001)
    assert take(scene) == []


def test_evidence_leaves_first_sends_and_other_queues_alone(scene: Scene) -> None:
    later, other = scene.job(), scene.job()
    rows(scene.eyes, "UPDATE outbox SET due_at = clock_timestamp() + interval '1 h'")
    set_sent(scene, other, 1, 60)
    rows(scene.eyes, "UPDATE outbox SET queue = 'mail' WHERE job_id = %s", (str(other),))
    before = [scene.debt(later), scene.debt(other)]
    outbox.note_loss(scene.eyes, "jobs", 2.0)
    assert [scene.debt(later), scene.debt(other)] == before


def test_evidence_does_not_wait_for_a_claim_in_progress(scene: Scene) -> None:
    worker, job_id = scene.worker(), scene.job()
    set_sent(scene, job_id, 1, 60)
    rows(worker.session, "BEGIN")
    assert claim.claim(worker.session, scene.delivery(job_id), worker.worker_id, 1)
    rows(scene.eyes, "SET lock_timeout = '1s'")
    outbox.note_loss(scene.eyes, "jobs", 2.0)


# the debt for a dead letter


def owe_trace(scene: Scene) -> UUID:
    """A quarantined job whose first dead letter is missing."""
    job_id = scene.job(state="quarantined", cause="permanent", episode=1)
    rows(scene.eyes, "UPDATE outbox SET kind = 'trace' WHERE job_id = %s", (str(job_id),))
    return job_id


def test_a_dead_letter_is_offered_a_bounded_number_of_times(scene: Scene) -> None:
    job_id = owe_trace(scene)
    gaps: list[int] = []
    for copy in range(1, outbox.TRACE_OFFERS + 1):
        make_due(scene)
        (debt,) = take(scene)
        assert (debt.kind, debt.episode, debt.copy) == ("trace", 1, copy)
        if copy < outbox.TRACE_OFFERS:
            gaps.append(round(gap_s(scene, job_id)))
    assert gaps == [30, 60, 120, 240, 480, 900, 900]
    assert scene.ask("SELECT due_at = 'infinity' FROM outbox")
    assert take(scene) == []
    assert scene.owed(job_id) == "trace 1"  # still owed: a late letter pays it, and `doctor` reports it


def spend_offers(scene: Scene) -> UUID:
    """A dead letter that was offered as often as it may be."""
    job_id = owe_trace(scene)
    set_sent(scene, job_id, outbox.TRACE_OFFERS, 60)
    rows(scene.eyes, "UPDATE outbox SET due_at = 'infinity' WHERE job_id = %s", (str(job_id),))
    return job_id


def test_no_loss_brings_back_what_was_offered_often_enough(scene: Scene) -> None:
    job_id = spend_offers(scene)
    before = scene.debt(job_id)
    outbox.note_loss(scene.eyes, "jobs", 2.0)
    assert scene.debt(job_id) == before
    assert take(scene) == []


def test_what_was_offered_often_enough_is_not_waited_for(scene: Scene) -> None:
    """The relay asks when the next debt is due, and must get an answer although one never is."""
    spend_offers(scene)
    assert outbox.next_due_s(scene.eyes, "jobs") is None
    later = scene.job()
    set_sent(scene, later, 1, 0)
    due_s = outbox.next_due_s(scene.eyes, "jobs")
    assert due_s is not None
    assert 3590 < due_s <= 3600


def test_what_was_offered_often_enough_takes_no_place_in_the_window(scene: Scene) -> None:
    spend_offers(scene)
    scene.job()
    assert outbox.unpaid_messages(scene.eyes, "jobs", lambda *_: 1) == 0
    assert len(take(scene, window=1)) == 1


# returned messages


def test_a_returned_message_is_noted_on_its_row_and_in_the_journal(scene: Scene) -> None:
    job_id, fine = scene.job(), scene.job()
    take(scene)
    outbox.note_returned(scene.eyes, [(job_id, "312 NO_ROUTE")], 2.0)
    debt = scene.debt(job_id)
    assert debt is not None
    assert debt["returned_reason"] == "312 NO_ROUTE"
    assert gap_s(scene, job_id) == pytest.approx(2, abs=0.001)
    assert scene.journal(job_id) == ["submit", "returned"]
    noted = scene.records("SELECT * FROM job_events WHERE event = 'returned'")[0]
    assert (noted["copy"], noted["reason"]) == (1, "312 NO_ROUTE")
    untouched = scene.debt(fine)
    assert untouched is not None
    assert untouched["returned_at"] is None
    make_due(scene, job_id)
    assert [debt.copy for debt in take(scene)] == [2]
    debt = scene.debt(job_id)
    assert debt is not None
    assert (debt["returned_at"], debt["returned_reason"]) == (None, None)


def test_a_message_that_was_returned_after_its_claim_is_no_matter(scene: Scene) -> None:
    worker, job_id = scene.worker(), scene.job()
    take(scene)
    claim.claim(worker.session, scene.delivery(job_id), worker.worker_id, 1)
    outbox.note_returned(scene.eyes, [(job_id, "312 NO_ROUTE")], 2.0)
    assert scene.journal(job_id)[-1] == "claim"
