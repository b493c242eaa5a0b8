"""One job over the real arrows, step by step: what everybody may do to it, and what must hold after each step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from app import cancel, claim, dead_letters, finish, outbox, settle, sweep
from app.cancel import Cancelled
from app.claim import Delivery, Refusal
from app.dead_letters import DeadLetter
from app.edit import Edit
from app.effects import Answer, Caller, Checked
from app.errors import LeaseLost, UncertainEffect
from app.finish import Holder
from app.outbox import Debt
from app.park import park
from app.release import release
from app.repair import repair
from app.settings import Settings
from app.states import TERMINAL, State
from app.triage import Replay, Wish, decide
from db.session import rows
from tests.integration.scene import Scene, Worker
from tests.integration.worklist import DECIDER

STEPS = (
    "claim",
    "begin",
    "commit nothing",
    "succeed",
    "retry",
    "quarantine",
    "release",
    "expire",
    "crash",
    "lose the lease",
    "ask to cancel",
    "cancel",
    "let it expire",
    "let time pass",
    "take",
    "refuse",
    "park",
    "dead letter",
    "repair",
    "lose the debt",
    "replay",
    "replay with another payload",
    "settle",
    "call",
    "wake",
)
DECIDING = ("replay", "replay with another payload", "settle")
AROUND = ("take", "refuse", "park", "dead letter", "cancel", "repair", "lose the debt", *DECIDING)
# What anybody may do while a clean path holds the row.
BESIDE_A_HELD_ROW = ("succeed", "retry", "quarantine", "commit nothing")
OPEN = "state NOT IN ('succeeded', 'cancelled')"
ACTING = ("call", "wake")
# Each attempt acts with the payload that it was claimed with; the far side knows which payloads have acted.
EDIT = Edit(patch={"n": 1})
FAR_SIDE: set[int] = set()


def far_side_says(_name: str, _key: str, _payload: object) -> Checked:
    """The check: honest, and no prophet."""
    return Checked(Answer.DONE if FAR_SIDE else Answer.NOT_DONE)


class Life:
    """One job, two workers, and every holder and message that there ever was: the stale ones go on trying."""

    def __init__(self, scene: Scene, workers: list[Worker]) -> None:
        self.scene, self.workers = scene, workers
        self.job_id = scene.job()
        self.holders: list[tuple[Worker, Holder]] = []
        self.begun: tuple[Worker, Holder] | None = None
        self.messages: list[Debt] = []
        self.in_flight: dict[int, int] = {}
        FAR_SIDE.clear()
        self.seen = scene.row(self.job_id)

    def step(self, what: str, who: int, which: int) -> None:
        worker = self.workers[who]
        if self.begun is not None and what not in BESIDE_A_HELD_ROW:
            return  # its row is locked: others pass by, which `test_claim` shows
        if self.begun is not None:
            self.end_atomic(what)
        elif what in AROUND:
            self.around(what, worker, which)
        elif what in ACTING:
            self.act(what, which)
        else:
            self.others(what, worker, which)

    def delivery(self, which: int) -> Delivery:
        """One of the messages that were published, or the first one that there will be."""
        if not self.messages:
            return self.scene.delivery(self.job_id)
        message = self.messages[which % len(self.messages)]
        return self.scene.delivery(self.job_id, copy=message.copy, episode=message.episode)

    def holder(self, which: int) -> tuple[Worker, Holder]:
        """The newest of those that ever held the job, or an older one."""
        return self.holders[-1 - which // 2 % len(self.holders)]

    def ended(self, attempt: int | None) -> None:
        """The attempt's process was seen to end, or its handler returned: it wakes up no more."""
        if attempt is not None:
            self.in_flight.pop(attempt, None)

    def others(self, what: str, worker: Worker, which: int) -> None:
        """What workers and sweepers do, and the clock."""
        scene, eyes = self.scene, self.scene.eyes
        match what:
            case "claim":
                delivery = self.delivery(which)
                if won := claim.claim(worker.session, delivery, worker.worker_id, worker.pid):
                    self.holders.append((worker, Holder(won, delivery, worker.worker_id)))
            case "begin":
                delivery = self.delivery(which)
                if won := claim.begin_atomic(worker.session, delivery, worker.worker_id):
                    self.begun = worker, Holder(won, delivery, worker.worker_id)
            case "succeed" | "retry" | "quarantine" if self.holders:
                owner, holder = self.holder(which)
                self.ended(holder.claimed.attempt)
                self.finish(what, owner, holder, in_transaction=False)
            case "release":
                self.ended(release(eyes, self.job_id, worker.worker_id, worker.pid, "r"))
            case "expire":
                values = sweep.expire_values(worker.worker_id, "stalled") | {"lease_over": True}
                rows(eyes, sweep.OF_WORKER, values)
            case "crash":
                if sweep.expire_child(eyes, self.job_id, worker.worker_id, worker.pid, sweep.CHILD_DIED):
                    self.ended(int(scene.row(self.job_id)["attempt"]))
            case _:
                self.happens(what, worker)

    def happens(self, what: str, worker: Worker) -> None:
        """What nobody of ours does."""
        eyes = self.scene.eyes
        match what:
            case "lose the lease":
                self.scene.end_lease(worker)
            case "ask to cancel":
                rows(eyes, f"UPDATE jobs SET cancel_requested = true WHERE {OPEN}")
            case "let it expire":
                rows(eyes, f"UPDATE jobs SET expires_at = 'yesterday' WHERE {OPEN}")
            case "let time pass":
                rows(
                    eyes,
                    f"UPDATE jobs SET not_before = 'yesterday' WHERE not_before IS NOT NULL AND {OPEN};"
                    " UPDATE workers SET lease_until = clock_timestamp() + interval '30 s'",
                )

    def around(self, what: str, worker: Worker, which: int) -> None:
        """What relay, consumer, intake and operators do."""
        scene, eyes = self.scene, self.scene.eyes
        match what:
            case "take":
                rows(eyes, "UPDATE outbox SET due_at = clock_timestamp() WHERE due_at < 'infinity'")
                self.messages += outbox.take(eyes, "jobs", Settings())
            case "refuse":
                self.refuse(worker, self.delivery(which))
            case "park":
                grace_s = 0 if which else 600
                delivery = self.delivery(which)
                park(eyes, self.job_id, delivery.copy, delivery.episode, worker.worker_id, grace_s, 30)
            case "dead letter" if self.messages:
                self.bury(self.messages[which % len(self.messages)])
            case "cancel":
                before = State(scene.state(self.job_id))
                answer = cancel.cancel(eyes, self.job_id, reason="r")
                assert answer is CANCEL_ANSWERS.get(before, Cancelled.CANCELLED)
            case "repair":
                assert repair(eyes, 0) == [], "no arrow leaves anything to repair"
            case "lose the debt":
                owed = scene.owed(self.job_id)
                rows(eyes, "DELETE FROM outbox")
                assert repair(eyes, 0) == ([str(self.job_id)] if owed else [])
                assert scene.owed(self.job_id) == owed
            case "replay" | "replay with another payload" | "settle":
                self.decide(what, which)

    def decide(self, what: str, which: int) -> None:
        """An operator decides about one of the quarantines that there were; only the present one can be."""
        row = self.scene.row(self.job_id)
        episode = max(1, int(row["episode"]) - which)
        present = row["state"] == State.QUARANTINED and episode == row["episode"]
        if what == "settle":
            assert settle.settle(self.scene.eyes, self.job_id, episode, DECIDER) is present
            return
        edit = EDIT if what == "replay with another payload" else None
        decision = decide(self.scene.eyes, self.job_id, episode, Wish(edit, accept_uncertain=True), DECIDER)
        done = isinstance(decision, Replay)
        if not edit or not present:
            expired = row["expires_at"] is not None
            assert done is (present and not expired), decision
        if done:
            after = self.scene.row(self.job_id)
            for counter in ("failures", "crashes", "stalls"):
                assert after[f"max_{counter}"] - after[counter] >= 3, "a fresh budget"
            self.seen = {**self.seen, "state": State.QUEUED}

    def act(self, what: str, which: int) -> None:
        """An attempt enters its call and is cut off, or one that was cut off, and is not dead, wakes up in it."""
        if what == "wake":
            for number in [*self.in_flight][which // 2 :]:
                FAR_SIDE.add(self.in_flight.pop(number))
            return
        if not self.holders:
            return
        worker, holder = self.holder(which)
        claimed, session = holder.claimed, self.scene.eyes
        if claimed.attempt in self.in_flight:
            return  # it is in its call
        caller = Caller(lambda: session, claimed.job_id, claimed.attempt, worker.worker_id, None, far_side_says)

        def cut_off(_key: str) -> None:
            self.in_flight[claimed.attempt] = claimed.payload["n"]
            raise TimeoutError

        with suppress(LeaseLost, UncertainEffect, TimeoutError):
            caller.call("act", cut_off, takes_key=which % 2 == 1)

    def refuse(self, worker: Worker, delivery: Delivery) -> None:
        """A delivery that won no claim: only one whose dead letter is owed may be rejected."""
        refusal = claim.look(worker.session, delivery, worker.worker_id)
        row, owed = self.scene.row(self.job_id), self.scene.owed(self.job_id)
        assert (refusal is Refusal.QUARANTINED) == (
            owed == f"trace {delivery.episode}" and row["episode"] == delivery.episode
        )
        if refusal is Refusal.EXPIRED:
            cancel.cancel(worker.session, self.job_id, cause="expired", reason=refusal.value)
            assert self.scene.state(self.job_id) == State.CANCELLED

    def bury(self, message: Debt) -> None:
        """The broker dead-lettered a message: it pays the trace of its own episode, and no other."""
        before, owed = self.scene.row(self.job_id), self.scene.owed(self.job_id)
        letter = DeadLetter(self.job_id, message.episode, message.copy, {}, {}, b"[]", "rejected")
        stamped, again = dead_letters.store(self.scene.eyes, letter, 0.0)
        pays = owed == f"trace {message.episode}"
        assert stamped is pays
        assert self.scene.owed(self.job_id) == (None if pays else owed)
        assert not again or before["state"] in (State.QUEUED, State.RETRY_WAIT)
        assert self.scene.row(self.job_id) == before, "a dead letter changes no job"
        assert dead_letters.store(self.scene.eyes, letter, 0.0)[0] is False

    def end_atomic(self, what: str) -> None:
        assert self.begun is not None
        worker, holder = self.begun
        self.begun = None
        if what == "commit nothing":
            rows(worker.session, "ROLLBACK")
        else:
            self.finish(what, worker, holder, in_transaction=True)

    @staticmethod
    def finish(what: str, worker: Worker, holder: Holder, *, in_transaction: bool) -> None:
        on = worker.session
        arrows: dict[str, Callable[[], None]] = {
            "succeed": lambda: finish.succeed(on, holder, "k", None, in_transaction),
            "retry": lambda: finish.retry(on, holder, 60, "transient", "r", in_transaction=in_transaction),
            "quarantine": lambda: finish.quarantine(
                on,
                holder,
                "permanent",
                "r",
                "f",
                failure="permanent",
                offer_s=30,
                in_transaction=in_transaction,
            ),
        }
        try:
            arrows[what]()
        except LeaseLost:
            return

    def judge(self) -> None:
        """Compare the row with how it was before the step; debt and traces with the row."""
        row, before = self.scene.row(self.job_id), self.seen
        self.seen = row
        for counter in ("attempt", "failures", "crashes", "stalls", "releases", "episode"):
            assert row[counter] >= before[counter], counter
        assert row["attempt"] - before["attempt"] in (0, 1)
        assert row["episode"] - before["episode"] in (0, 1)
        if before["state"] in TERMINAL:
            assert row == before
        assert len(FAR_SIDE) <= 1, "old and new payload have both acted"
        entries = self.scene.entries(self.job_id)
        assert [entry["episode"] for entry in entries] == list(range(1, row["episode"] + 1))
        stamped = bool(entries) and entries[-1]["dead_lettered_at"] is not None
        assert self.scene.owed(self.job_id) == what_is_owed(row, stamped)
        unclosed = [entry["episode"] for entry in entries if entry["closed_at"] is None]
        assert unclosed == ([row["episode"]] if row["state"] == State.QUARANTINED else [])


# What a cancel answers from these states; from all others: CANCELLED.
CANCEL_ANSWERS = {
    State.RUNNING: Cancelled.REQUESTED,
    State.SUCCEEDED: Cancelled.FINISHED,
    State.CANCELLED: Cancelled.FINISHED,
}


def what_is_owed(row: dict[str, Any], stamped: bool) -> str | None:
    """The one debt of a job: a waiting one is to be woken up, a quarantined one lacks its dead letter."""
    if row["state"] in (State.QUEUED, State.RETRY_WAIT):
        return f"wake {row['episode'] + 1}"
    if row["state"] == State.QUARANTINED and not stamped:
        return f"trace {row['episode']}"
    return None
