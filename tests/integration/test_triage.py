"""What the ledger says before a replay, and H11: of the old and the new payload exactly one ever acts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any
from uuid import UUID

import pytest
from pydantic import BaseModel, Field

from app import effects as ledger
from app import finish, submit
from app.edit import Edit
from app.effects import Answer, Caller, Check, Checked
from app.errors import IdempotencyConflict, LeaseLost
from app.finish import Holder
from app.job_types import JobType
from app.sweep import CHILD_DIED, Sweeper, expire_child
from app.triage import Leave, Replay, Settle, Why, consider
from db.session import rows
from tests.integration.scene import Background, Scene, Worker
from tests.integration.worklist import actions, candidate, effects, known, quarantine, wish
from tests.nodes.waiting import wait_for

NAME = "charge"
PATCH = Edit(patch={"n": 7})


@dataclass
class Acts:
    """What each attempt did to the other side: the payload it did it with."""

    scene: Scene
    seen: list[int] = field(default_factory=list)

    def caller(self, worker: Worker, holder: Holder, check: Check | None = None) -> Caller:
        session = self.scene.connect()
        claimed = holder.claimed
        return Caller(lambda: session, claimed.job_id, claimed.attempt, worker.worker_id, claimed.payload, check)

    def call(self, worker: Worker, holder: Holder, check: Check | None = None, *, takes_key: bool = False) -> Any:
        def act(_key: str) -> dict[str, int]:
            self.seen.append(holder.claimed.payload["n"])
            return {"acted": holder.claimed.payload["n"]}

        return self.caller(worker, holder, check).call(NAME, act, takes_key=takes_key)

    def cut_off(self, worker: Worker, holder: Holder, *, takes_key: bool = False) -> None:
        """The attempt entered its call and is frozen, or dead, in it."""

        def cut(_key: str) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            self.caller(worker, holder).call(NAME, cut, takes_key=takes_key)


@pytest.fixture
def acts(scene: Scene) -> Acts:
    return Acts(scene)


@pytest.fixture
def worker(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Worker:
    known(monkeypatch)
    return scene.worker()


def says(answer: Answer, result: Any = None) -> Check:
    return lambda _name, _key, _payload: Checked(answer, result)


def stall(scene: Scene, worker: Worker, job_id: UUID) -> None:
    """The worker is frozen: its lease is over, and the job's last stall quarantines it."""
    scene.change(job_id, max_stalls=int(scene.row(job_id)["stalls"]) + 1)
    scene.end_lease(worker)
    sweeper = Sweeper(0.0)
    wait_for(lambda: [sweeper.look(scene.eyes), scene.state(job_id)][1] == "quarantined", 10)


def child_dies(scene: Scene, worker: Worker, job_id: UUID) -> None:
    """The worker's main process saw its child die, for the last time that is allowed."""
    scene.change(job_id, max_crashes=int(scene.row(job_id)["crashes"]) + 1)
    assert expire_child(scene.eyes, job_id, worker.worker_id, worker.pid, CHILD_DIED) == "quarantined"


def left(decision: Any) -> Why:
    assert isinstance(decision, Leave), decision
    return decision.why


# H11, C27: another payload


def test_c27_a_frozen_owner_that_wakes_after_the_patched_replay_acts_no_more(
    scene: Scene, worker: Worker, acts: Acts
) -> None:
    holder = scene.claimed(worker)
    job_id = holder.claimed.job_id
    stall(scene, worker, job_id)
    assert isinstance(wish(scene, job_id, edit=PATCH), Replay)
    with pytest.raises(LeaseLost):
        acts.call(worker, holder)
    with pytest.raises(LeaseLost):
        finish.succeed(scene.connect(), holder, "old", None, in_transaction=False)
    again = scene.worker()
    new = scene.claimed(again, job_id)
    assert new.claimed.payload == {"n": 7}
    acts.call(again, new)
    with pytest.raises(LeaseLost):
        acts.call(worker, holder)
    finish.succeed(again.session, new, "new", None, in_transaction=False)
    assert acts.seen == [7]
    assert scene.row(job_id)["result_key"] == "new"


def test_a_call_that_is_being_entered_cannot_slip_behind_the_replay(scene: Scene, worker: Worker) -> None:
    """The entry is written and not committed: the job cannot leave its owner before it is, so a replay will see it."""
    holder = scene.claimed(worker)
    job_id = holder.claimed.job_id
    values = {
        "job_id": str(job_id),
        "attempt": 1,
        "worker_id": str(worker.worker_id),
        "name": NAME,
        "key": "k",
        "takes_key": False,
    }
    slow = scene.connect()
    rows(slow, "BEGIN")
    rows(slow, ledger.START, values)
    scene.end_lease(worker)
    sweeper = Sweeper(0.0)
    for _ in range(3):
        sweeper.look(scene.eyes)
    assert scene.state(job_id) == "running"
    rows(slow, "COMMIT")
    stall(scene, worker, job_id)
    assert left(wish(scene, job_id, edit=PATCH)) is Why.MAY_ACT


def test_a_call_cannot_be_entered_behind_the_expiry(scene: Scene, worker: Worker) -> None:
    """The other order: while the expiry commits, the entry waits for it, and then finds that the job is lost."""
    holder = scene.claimed(worker)
    job_id = holder.claimed.job_id
    entering = Acts(scene)
    other = scene.connect()
    rows(other, "BEGIN; UPDATE jobs SET state = 'queued', worker_id = NULL, child_pid = NULL WHERE state = 'running'")
    late = Background(lambda: entering.call(worker, holder))
    scene.wait_until_blocked()
    rows(other, "COMMIT")
    with pytest.raises(LeaseLost):
        late.result()
    assert entering.seen == []
    assert effects(scene, job_id) == []


def test_c27_a_call_in_flight_forbids_another_payload_until_its_owner_is_proven_dead(
    scene: Scene, worker: Worker, acts: Acts, monkeypatch: pytest.MonkeyPatch
) -> None:
    known(monkeypatch, check=says(Answer.NOT_DONE))
    holder = scene.claimed(worker)
    job_id = holder.claimed.job_id
    acts.cut_off(worker, holder)
    stall(scene, worker, job_id)
    before = scene.picture()
    assert left(wish(scene, job_id, edit=PATCH)) is Why.MAY_ACT
    assert left(wish(scene, job_id, edit=PATCH, accept_uncertain=True)) is Why.MAY_ACT, "nobody may accept two effects"
    assert scene.picture() == before


@pytest.mark.parametrize(
    ("answer", "expected"),
    [(Answer.NOT_DONE, None), (Answer.UNKNOWN, Why.MAY_ACT), (Answer.DONE, Why.ACTED), (None, Why.MAY_ACT)],
)
def test_c27_a_dead_owner_and_the_other_side_decide(
    scene: Scene,
    worker: Worker,
    acts: Acts,
    monkeypatch: pytest.MonkeyPatch,
    answer: Answer | None,
    expected: Why | None,
) -> None:
    known(monkeypatch, check=says(answer) if answer else None)
    holder = scene.claimed(worker)
    acts.cut_off(worker, holder)
    child_dies(scene, worker, holder.claimed.job_id)
    decision = wish(scene, holder.claimed.job_id, edit=PATCH)
    if expected is None:
        assert isinstance(decision, Replay)
        new = scene.claimed(worker, holder.claimed.job_id)
        acts.call(worker, new, says(Answer.NOT_DONE))
        assert acts.seen == [7]
    else:
        assert left(decision) is expected


def test_an_earlier_attempt_frozen_in_its_call_counts_though_a_later_one_ended(
    scene: Scene, acts: Acts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger names the attempt that started the call last; the first one may still be in it."""
    known(monkeypatch, check=says(Answer.NOT_DONE))
    frozen, second = scene.worker(), scene.worker()
    holder = scene.claimed(frozen)
    job_id = holder.claimed.job_id
    acts.cut_off(frozen, holder, takes_key=True)
    scene.end_lease(frozen)
    sweeper = Sweeper(0.0)
    wait_for(lambda: [sweeper.look(scene.eyes), scene.state(job_id)][1] == "queued", 10)
    again = scene.claimed(second, job_id)
    with pytest.raises(KeyboardInterrupt):
        acts.caller(second, again).call(NAME, interrupt, takes_key=True)
    child_dies(scene, second, job_id)
    assert effects(scene, job_id) == [(NAME, 2, "started", None)]
    assert left(wish(scene, job_id, edit=PATCH)) is Why.MAY_ACT


def interrupt(_key: str) -> None:
    raise KeyboardInterrupt


def test_an_attempt_that_asked_and_lost_the_job_makes_no_call(
    scene: Scene, acts: Acts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen between the check's answer and the call: it must ask the job's row once more, not the ledger alone."""
    known(monkeypatch, check=says(Answer.NOT_DONE))
    first, second = scene.worker(), scene.worker()
    holder = scene.claimed(first)
    job_id = holder.claimed.job_id
    acts.cut_off(first, holder)
    expire_child(scene.eyes, job_id, first.worker_id, first.pid, CHILD_DIED)
    again = scene.claimed(second, job_id)
    decided: list[Any] = []

    def freeze(_name: str, _key: str, _payload: Any) -> Checked:
        stall(scene, second, job_id)
        decided.append(wish(scene, job_id, edit=PATCH))
        decided.append(wish(scene, job_id))
        return Checked(Answer.NOT_DONE)

    with pytest.raises(LeaseLost):
        acts.call(second, again, freeze)
    assert left(decided[0]) is Why.MAY_ACT, "attempt 2 was never seen to end"
    assert isinstance(decided[1], Replay)
    assert acts.seen == []


@pytest.mark.parametrize("begun", ["finished call", "checkpoint"])
def test_c27_what_has_acted_in_part_keeps_its_payload(scene: Scene, worker: Worker, acts: Acts, begun: str) -> None:
    holder = scene.claimed(worker)
    if begun == "finished call":
        acts.call(worker, holder)
    else:
        scene.change(holder.claimed.job_id, checkpoint='{"page": 3}')
    quarantine(holder, worker)
    assert left(wish(scene, holder.claimed.job_id, edit=PATCH)) is Why.ACTED
    assert isinstance(wish(scene, holder.claimed.job_id), Replay), "as it is, it may go on"


# edits


class Account(BaseModel):
    account_id: Annotated[int, Field(gt=0)] = 1
    n: int = 0


def test_c27_old_and_new_payload_are_kept_and_the_key_stands_for_the_new_one(
    scene: Scene, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_type = known(monkeypatch)
    job_id = submitted(scene, job_type, "k")
    quarantine(scene.claimed(worker, job_id), worker)
    assert isinstance(wish(scene, job_id, edit=PATCH), Replay)
    (action,) = actions(scene, job_id)
    assert (action["old_payload"], action["new_payload"]) == ({"n": 0}, {"n": 7})
    assert scene.row(job_id)["payload"] == {"n": 7}
    assert submitted(scene, job_type, "k", n=7) == job_id
    with pytest.raises(IdempotencyConflict):
        submitted(scene, job_type, "k", n=0)


def submitted(scene: Scene, job_type: JobType, key: str | None = None, **fields: Any) -> UUID:
    new = submit.prepare(job_type, job_type.parse(fields), idempotency_key=key)
    submit.within(lambda sql, values: rows(scene.eyes, sql, values), [new])
    return new.job_id


@pytest.mark.parametrize(
    "edit",
    [
        Edit(patch={"account_id": "secret-4711"}),
        Edit(patch={"account_id": -4711}),
        Edit(patch={"account_id": {"a": "secret-4711"}}),
        Edit(payload={"account_id": "secret-4711"}),
    ],
)
def test_c28_an_edit_that_fails_validation_changes_nothing(
    scene: Scene, worker: Worker, monkeypatch: pytest.MonkeyPatch, edit: Edit
) -> None:
    job_type = known(monkeypatch, payload=Account)
    job_id = submitted(scene, job_type)
    quarantine(scene.claimed(worker, job_id), worker)
    before = scene.picture()
    decision = wish(scene, job_id, edit=edit)
    assert left(decision) is Why.INVALID
    assert "account_id" in str(decision)
    assert "4711" not in str(decision)
    assert scene.picture() == before


def test_an_edit_cannot_make_it_another_job(scene: Scene, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its id stands for its key: a second job would come of the same charge."""
    job_type = known(monkeypatch, payload=Account, key=lambda payload: str(payload.account_id))
    job_id = submitted(scene, job_type)
    quarantine(scene.claimed(worker, job_id), worker)
    assert left(wish(scene, job_id, edit=Edit(patch={"account_id": 2}))) is Why.INVALID
    assert isinstance(wish(scene, job_id, edit=Edit(patch={"n": 2})), Replay)


def test_an_edit_that_says_the_same_is_a_plain_replay(scene: Scene, worker: Worker, acts: Acts) -> None:
    holder = scene.claimed(worker)
    acts.call(worker, holder)
    quarantine(holder, worker)
    decision = wish(scene, holder.claimed.job_id, edit=Edit(payload={"n": 0}))
    assert isinstance(decision, Replay)
    assert decision.edited is None
    assert actions(scene, holder.claimed.job_id)[0]["new_payload"] is None


# done, not done, uncertain


def test_done_is_settled_with_its_result_where_the_call_is_everything(
    scene: Scene, worker: Worker, acts: Acts, monkeypatch: pytest.MonkeyPatch
) -> None:
    known(monkeypatch, whole_effect=NAME)
    holder = scene.claimed(worker)
    job_id = holder.claimed.job_id
    acts.call(worker, holder)
    quarantine(holder, worker)
    assert isinstance(wish(scene, job_id), Settle)
    row = scene.row(job_id)
    assert (row["state"], row["result"], row["result_key"]) == ("succeeded", {"acted": 0}, f"job:{job_id}")
    assert actions(scene, job_id)[0]["action"] == "settle"
    assert acts.seen == [0]


def test_done_is_run_again_where_the_handler_does_more_and_calls_nothing_twice(
    scene: Scene, worker: Worker, acts: Acts
) -> None:
    """Settling would lose what the handler writes after its call."""
    holder = scene.claimed(worker)
    acts.call(worker, holder)
    job_id = quarantine(holder, worker)
    assert isinstance(wish(scene, job_id), Replay)
    assert acts.call(worker, scene.claimed(worker, job_id)) == {"acted": 0}
    assert acts.seen == [0]


def test_done_is_settled_on_demand(scene: Scene, worker: Worker, acts: Acts) -> None:
    holder = scene.claimed(worker)
    acts.call(worker, holder)
    job_id = quarantine(holder, worker)
    assert isinstance(wish(scene, job_id, settle_done=True), Settle)
    assert scene.row(job_id)["result"] == {"acted": 0}


def test_what_the_other_side_says_is_done_is_entered_into_the_ledger(
    scene: Scene, worker: Worker, acts: Acts, monkeypatch: pytest.MonkeyPatch
) -> None:
    known(monkeypatch, whole_effect=NAME, check=says(Answer.DONE, {"acted": 9}))
    holder = scene.claimed(worker)
    job_id = holder.claimed.job_id
    acts.cut_off(worker, holder)
    quarantine(holder, worker, cause="uncertain")
    found = candidate(scene, job_id)
    assert isinstance(consider(found, 1, wish_of()), Settle)
    assert effects(scene, job_id) == [(NAME, 1, "started", None)], "looking writes nothing"
    assert isinstance(wish(scene, job_id), Settle)
    assert effects(scene, job_id) == [(NAME, 1, "finished", {"acted": 9})]
    assert scene.row(job_id)["result"] == {"acted": 9}


def wish_of() -> Any:
    from app.triage import Wish  # noqa: PLC0415

    return Wish()


def broken(_name: str, _key: str, _payload: Any) -> Checked:
    raise RuntimeError("the other side is away")


@pytest.mark.parametrize(
    ("terms", "takes_key", "free"),
    [
        ({}, False, False),
        ({"check": says(Answer.UNKNOWN)}, False, False),
        ({"check": broken}, False, False),
        ({"check": says(Answer.NOT_DONE)}, False, True),
        ({}, True, True),
        ({"on_uncertain": "retry"}, False, True),
    ],
)
def test_uncertain_is_left_unless_a_rerun_may_repeat_the_call(
    scene: Scene,
    worker: Worker,
    acts: Acts,
    monkeypatch: pytest.MonkeyPatch,
    terms: dict[str, Any],
    takes_key: bool,
    free: bool,
) -> None:
    known(monkeypatch, **terms)
    holder = scene.claimed(worker)
    job_id = holder.claimed.job_id
    acts.cut_off(worker, holder, takes_key=takes_key)
    quarantine(holder, worker, cause="uncertain")
    before = scene.picture()
    decision = wish(scene, job_id)
    if free:
        assert isinstance(decision, Replay)
        assert effects(scene, job_id) == [(NAME, 1, "started", None)], "the rerun asks again"
    else:
        assert left(decision) is Why.UNCERTAIN
        assert scene.picture() == before


def test_uncertain_that_is_accepted_is_called_again(scene: Scene, worker: Worker, acts: Acts) -> None:
    holder = scene.claimed(worker)
    job_id = holder.claimed.job_id
    acts.cut_off(worker, holder)
    quarantine(holder, worker, cause="uncertain")
    assert isinstance(wish(scene, job_id, accept_uncertain=True), Replay)
    again = scene.claimed(worker, job_id)
    acts.call(worker, again)
    assert acts.seen == [0]
    told = scene.records("SELECT reason FROM job_events WHERE event = 'replay'")[0]["reason"]
    assert "accepted that it may be done already: charge" in told


def test_a_call_that_ends_while_the_operator_decides_makes_the_decision_anew(
    scene: Scene, worker: Worker, acts: Acts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The frozen owner wakes and finishes its call between the look at the ledger and the arrow."""
    holder = scene.claimed(worker)
    job_id = holder.claimed.job_id
    caller = acts.caller(worker, holder)
    acts.cut_off(worker, holder)

    def finishes(_name: str, _key: str, _payload: Any) -> Checked:
        caller.finish(NAME, {"acted": 5})
        return Checked(Answer.NOT_DONE)

    known(monkeypatch, whole_effect=NAME, check=finishes)
    stall(scene, worker, job_id)
    assert isinstance(wish(scene, job_id, accept_uncertain=True), Settle)
    assert scene.row(job_id)["result"] == {"acted": 5}


def test_an_unknown_type_is_left(scene: Scene) -> None:
    worker = scene.worker()
    job_id = quarantine(scene.claimed(worker), worker)
    assert left(wish(scene, job_id)) is Why.UNKNOWN_TYPE


def run(scene: Scene, job_id: UUID, end: Callable[[Worker, Holder], object]) -> None:
    again = scene.worker()
    end(again, scene.claimed(again, job_id))


def test_c29_what_was_decided_meanwhile_is_left(scene: Scene, worker: Worker) -> None:
    job_id = quarantine(scene.claimed(worker), worker)
    assert isinstance(wish(scene, job_id, 1), Replay)
    late = wish(scene, job_id, 1)
    assert (left(late), late.decided) == (Why.DECIDED, "replay")  # type: ignore[union-attr]
    run(scene, job_id, lambda w, h: finish.succeed(w.session, h, "k", None, in_transaction=False))
    before = scene.picture()
    assert left(wish(scene, job_id, 1)) is Why.DECIDED
    assert scene.picture() == before
    assert json.loads(json.dumps(str(late))) == "decided by somebody else: replay"
