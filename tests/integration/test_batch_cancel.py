"""Cancel a batch: no further page, no completion, every open child cancelled; also when it is interrupted."""

from __future__ import annotations

from functools import partial
from typing import Any
from uuid import UUID

import pytest

from app import batch_cancel, finish
from app import batches as mechanism
from app.batch_cancel import cancel_batch
from app.cancel import Cancelled
from app.ending import Settlement
from db.session import one, rows
from tests.integration.batch_scene import Batches, nth_time
from tests.integration.scene import Scene

AUTHOR, REASON = "ann", "the wrong month"


def cancel(scene: Scene, batch_id: UUID) -> batch_cancel.BatchCancelled:
    done = cancel_batch(scene.eyes, batch_id, author=AUTHOR, reason=REASON)
    assert done is not None
    return done


def states(scene: Scene, batch_id: UUID) -> dict[str, int]:
    found = rows(
        scene.eyes,
        "SELECT state::text, count(*) FROM jobs WHERE batch_id = %s GROUP BY 1 ORDER BY 1",
        (str(batch_id),),
    )
    return dict(found)


def test_every_open_child_is_cancelled_with_author_and_reason(scene: Scene, batches: Batches) -> None:
    batch_id = batches.run(children=5)
    done, waiting, quarantined, running, _queued = batches.children(batch_id)
    batches.succeed(done)
    eyes = scene.eyes
    finish.retry(eyes, scene.claimed(scene.worker(), waiting), 60, "transient", "why", in_transaction=False)
    batches.quarantine(quarantined)
    holder = scene.claimed(scene.worker(), running)
    answer = cancel(scene, batch_id)
    assert (answer.cancelled, answer.asked, answer.coordinator) == (3, 1, Cancelled.FINISHED)
    assert states(scene, batch_id) == {"cancelled": 3, "running": 1, "succeeded": 1}
    assert scene.row(running)["cancel_requested"] is True
    assert scene.owed(waiting) is scene.owed(quarantined) is None
    assert all(entry["closed_at"] for entry in scene.entries(quarantined))
    (decided,) = scene.records("SELECT job_id, action, author, reason FROM quarantine_actions")
    assert decided == {"job_id": str(quarantined), "action": "cancel", "author": AUTHOR, "reason": REASON}
    said = "SELECT reason FROM job_events WHERE job_id = %s AND event = 'cancel'"
    assert scene.ask(said, (str(waiting),)) == "ann: the wrong month"
    finish.retry(eyes, holder, 60, "transient", "why", in_transaction=False)
    assert states(scene, batch_id) == {"cancelled": 4, "succeeded": 1}
    assert (batches.look(), batches.completions()) == ([], 0)
    row = batches.row(batch_id)
    assert (row["cancelled_by"], row["cancel_reason"], row["finished_at"]) == ("ann", "the wrong month", None)


def test_it_can_be_repeated_and_the_first_reason_stays(scene: Scene, batches: Batches) -> None:
    batch_id = batches.run(children=3)
    cancel(scene, batch_id)
    again = cancel_batch(scene.eyes, batch_id, author="bob", reason="me too")
    assert again is not None
    assert (again.cancelled, again.asked, again.finished) == (0, 0, False)
    assert batches.row(batch_id)["cancelled_by"] == "ann"


def test_cancel_that_died_half_way_is_finished_by_the_next(
    scene: Scene, batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id = batches.run(children=7)
    monkeypatch.setattr(batch_cancel, "CANCEL_CHILDREN", batch_cancel.CANCEL_CHILDREN.replace("LIMIT 500", "LIMIT 2"))
    pages: list[int] = []

    def hear(count: int) -> None:
        pages.append(count)
        if len(pages) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cancel_batch(scene.eyes, batch_id, on_page=hear, author=AUTHOR, reason=REASON)
    assert states(scene, batch_id) == {"cancelled": 4, "queued": 3}
    batches.end_by_hand(batch_id, limit=1)
    assert batches.look() == [], "no completion after the first step of a cancel"
    assert cancel(scene, batch_id).cancelled == 2
    assert states(scene, batch_id) == {"cancelled": 6, "succeeded": 1}


@pytest.mark.parametrize("place", ["submit_page", "submit_children"])
def test_cancel_while_the_coordinator_pages(
    scene: Scene, batches: Batches, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Between two pages, or before one that is being made: no child comes after the cancel."""
    batch_id = batches.submit(children=9, size=3)

    def strike() -> None:
        rows(scene.eyes, batch_cancel.CANCEL_BATCH, {"batch_id": str(batch_id), "author": AUTHOR, "reason": REASON})

    if place == "submit_page":
        monkeypatch.setattr(mechanism, place, nth_time(mechanism.submit_page, 2, strike, before=False))
    else:  # its transaction is open, its guard is still to come
        monkeypatch.setattr(mechanism, "one", nth_time(one, 4, strike, before=True))
    assert batches.attempt(batch_id).settlement is Settlement.IGNORE
    assert scene.state(batch_id) == "cancelled", "it ends by itself, though nobody came to cancel the coordinator"
    before = sum(states(scene, batch_id).values())
    assert before in (3, 6)
    assert cancel(scene, batch_id).cancelled == before
    assert (batches.look(), batches.completions()) == ([], 0)


def test_coordinator_that_waits_is_cancelled(scene: Scene, batches: Batches) -> None:
    batch_id = batches.submit(children=3)
    assert cancel_batch(scene.eyes, batch_id, author=AUTHOR, reason=REASON) is None, (
        "it has made no batch yet: that is a job like any other"
    )
    batches.attempt(batch_id)
    assert cancel(scene, batch_id).coordinator is Cancelled.FINISHED


def test_finished_batch_is_left_alone(scene: Scene, batches: Batches) -> None:
    batch_id = batches.run(children=0)
    answer = cancel(scene, batch_id)
    assert (answer.finished, answer.cancelled) == (True, 0)
    assert batches.row(batch_id)["cancelled_at"] is None
    assert batches.completions() == 1


def test_shared_children_are_left_to_their_own_batch(scene: Scene, batches: Batches) -> None:
    other = batches.run(children=2, name="other")
    batch_id = batches.run(children=4)
    assert cancel(scene, batch_id).cancelled == 2
    assert states(scene, other) == {"queued": 2}
    batches.end_by_hand(other)
    assert batches.look() == [other]


def test_child_at_work_in_one_commit_is_passed_by(scene: Scene, batches: Batches) -> None:
    batch_id = batches.run(children=2)
    first, _second = batches.children(batch_id)
    with scene.holding(first):
        assert cancel(scene, batch_id).cancelled == 1
    assert states(scene, batch_id) == {"cancelled": 1, "queued": 1}
    assert cancel(scene, batch_id).cancelled == 1


def test_end_and_cancel_at_the_same_moment_are_one_of_both(scene: Scene, batches: Batches) -> None:
    from app.completion import complete  # noqa: PLC0415

    for number in range(4):
        batch_id = batches.run(children=1, name=str(number))
        batches.end_by_hand(batch_id)
        calls: list[Any] = [
            partial(complete, scene.connect(), batch_id),
            partial(cancel_batch, scene.connect(), batch_id, author=AUTHOR, reason=REASON),
        ]
        scene.at_once(*calls)
        row = batches.row(batch_id)
        completed = scene.ask("SELECT count(*) FROM jobs WHERE job_id = %s", (row["completion_id"],))
        assert (row["finished_at"] is None) != (row["cancelled_at"] is None)
        assert completed == (row["finished_at"] is not None)
