"""The ledger of external calls: at most one call for each key, whoever dies in between."""

from __future__ import annotations

from typing import Any

import pytest

from app import effects
from app.errors import LeaseLost, UncertainEffect
from app.finish import Holder
from app.release import release
from tests.integration.scene import Scene, Worker


class OtherSide:
    """What the external system saw: the key of each call."""

    def __init__(self, answer: Any = None, *, dies: bool = False) -> None:
        self.keys: list[str] = []
        self._answer, self._dies = answer, dies

    def __call__(self, key: str) -> Any:
        self.keys.append(key)
        if self._dies:
            raise ConnectionError("the worker died here")
        return self._answer


def call(worker: Worker, holder: Holder, other_side: OtherSide, *, takes_key: bool = True) -> Any:
    claimed = holder.claimed
    return effects.call(
        worker.session, claimed.job_id, claimed.attempt, worker.worker_id, "charge", other_side, takes_key
    )


def next_attempt(scene: Scene, worker: Worker, holder: Holder, other: Worker) -> Holder:
    release(scene.eyes, holder.claimed.job_id, worker.worker_id, worker.pid, "declared lost")
    return scene.claimed(other, holder.claimed.job_id)


def ledger(scene: Scene) -> dict[str, Any]:
    return scene.record("SELECT * FROM effects")


@pytest.mark.parametrize("answer", [None, {"id": 7}, [], "text", 0, False])
def test_a_call_is_made_once_and_its_answer_kept(scene: Scene, answer: Any) -> None:
    worker = scene.worker()
    holder = scene.claimed(worker)
    other_side = OtherSide(answer)
    assert call(worker, holder, other_side) == answer
    assert other_side.keys == [f"{holder.claimed.job_id}:charge"]
    assert (ledger(scene)["status"], ledger(scene)["result"]) == ("finished", answer)
    assert call(worker, holder, other_side) == answer  # the handler asks twice in one attempt
    assert len(other_side.keys) == 1


def test_a_rerun_gets_the_answer_of_the_first_call(scene: Scene) -> None:
    worker, other = scene.worker(), scene.worker()
    holder = scene.claimed(worker)
    other_side = OtherSide({"id": 7})
    call(worker, holder, other_side)
    fresh = next_attempt(scene, worker, holder, other)
    assert call(other, fresh, other_side) == {"id": 7}
    assert len(other_side.keys) == 1


def test_a_call_that_was_started_is_repeated_under_the_same_key(scene: Scene) -> None:
    worker, other = scene.worker(), scene.worker()
    holder = scene.claimed(worker)
    dying, alive = OtherSide(dies=True), OtherSide("done")
    with pytest.raises(ConnectionError):
        call(worker, holder, dying)
    assert ledger(scene)["status"] == "started"
    fresh = next_attempt(scene, worker, holder, other)
    assert call(other, fresh, alive) == "done"
    assert alive.keys == dying.keys
    assert (ledger(scene)["status"], ledger(scene)["attempt"]) == ("finished", 2)


def test_a_call_that_was_started_without_a_key_is_uncertain(scene: Scene) -> None:
    worker, other = scene.worker(), scene.worker()
    holder = scene.claimed(worker)
    with pytest.raises(ConnectionError):
        call(worker, holder, OtherSide(dies=True), takes_key=False)
    fresh = next_attempt(scene, worker, holder, other)
    unreached = OtherSide()
    with pytest.raises(UncertainEffect, match="attempt 1 started 'charge'"):
        call(other, fresh, unreached, takes_key=False)
    assert unreached.keys == []


@pytest.mark.parametrize("started", [False, True])
def test_a_stale_attempt_calls_nobody(scene: Scene, started: bool) -> None:
    worker, other = scene.worker(), scene.worker()
    holder = scene.claimed(worker)
    if started:
        with pytest.raises(ConnectionError):
            call(worker, holder, OtherSide(dies=True))
    next_attempt(scene, worker, holder, other)
    unreached = OtherSide()
    with pytest.raises(LeaseLost):
        call(worker, holder, unreached)
    assert unreached.keys == []


def test_a_call_whose_worker_lost_the_job_meanwhile_does_not_count(scene: Scene) -> None:
    """The late answer must not overwrite what the next attempt finds out."""
    worker, other = scene.worker(), scene.worker()
    holder = scene.claimed(worker)
    fresh: list[Holder] = []

    class Slow(OtherSide):
        def __call__(self, key: str) -> Any:
            fresh.append(next_attempt(scene, worker, holder, other))
            assert call(other, fresh[0], OtherSide("second")) == "second"
            return super().__call__(key)

    with pytest.raises(LeaseLost):
        call(worker, holder, Slow("first"))
    assert ledger(scene)["result"] == "second"
