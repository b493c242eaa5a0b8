"""One job over the real arrows, step by step: what everybody may do to it, and what must hold after each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from app import cancel, claim, dead_letters, finish, outbox, sweep
from app.cancel import Cancelled
from app.claim import Delivery, Refusal
from app.dead_letters import DeadLetter
from app.errors import LeaseLost
from app.finish import Holder
from app.outbox import Debt
from app.park import park
from app.release import release
from app.repair import repair
from app.settings import Settings
from app.states import TERMINAL, State
from db.session import rows
from tests.integration.scene import Scene, Worker

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
)
AROUND = ("take", "refuse", "park", "dead letter", "cancel", "repair", "lose the debt", "replay")
# What anybody may do while a clean path holds the row.
BESIDE_A_HELD_ROW = ("succeed", "retry", "quarantine", "commit nothing")
OPEN = "state NOT IN ('succeeded', 'cancelled')"
# A stand-in: it brings an operator's decision about, so that dead letters of an old episode meet a later one.
REPLAY = """
WITH job AS (
    UPDATE jobs SET state = 'queued', changed_at = clock_timestamp() WHERE state = 'quarantined' RETURNING jobs.*
), closed AS (
    UPDATE quarantine_entries entry SET closed_at = clock_timestamp()
      FROM job WHERE entry.job_id = job.job_id AND entry.episode = job.episode
), debt AS (
    INSERT INTO outbox (job_id, queue, type, schema_version, correlation_id, episode)
    SELECT job_id, queue, type, schema_version, correlation_id, episode + 1 FROM job
    ON CONFLICT (job_id) DO UPDATE
       SET kind = 'wake', episode = excluded.episode, due_at = excluded.due_at, sends = 0, sent_at = NULL
)
INSERT INTO job_events (job_id, event, attempt) SELECT job_id, 'replay', attempt FROM job
"""


class Life:
    """One job, two workers, and every holder and message that there ever was: the stale ones go on trying."""

    def __init__(self, scene: Scene, workers: list[Worker]) -> None:
        self.scene, self.workers = scene, workers
        self.job_id = scene.job()
        self.holders: list[tuple[Worker, Holder]] = []
        self.begun: tuple[Worker, Holder] | None = None
        self.messages: list[Debt] = []
        self.seen = scene.row(self.job_id)

    def step(self, what: str, who: int, which: int) -> None:
        worker = self.workers[who]
        if self.begun is not None and what not in BESIDE_A_HELD_ROW:
            return  # its row is locked: others pass by, which `test_claim` shows
        if self.begun is not None:
            self.end_atomic(what)
        elif what in AROUND:
            self.around(what, worker, which)
        else:
            self.others(what, worker, which)

    def delivery(self, which: int) -> Delivery:
        """One of the messages that were published, or the first one that there will be."""
        if not self.messages:
            return self.scene.delivery(self.job_id)
        message = self.messages[which % len(self.messages)]
        return self.scene.delivery(self.job_id, copy=message.copy, episode=message.episode)

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
                owner, holder = self.holders[which % len(self.holders)]
                self.finish(what, owner, holder, in_transaction=False)
            case "release":
                release(eyes, self.job_id, worker.worker_id, worker.pid, "r")
            case "expire":
                values = sweep.expire_values(worker.worker_id, "stalled") | {"lease_over": True}
                rows(eyes, sweep.OF_WORKER, values)
            case "crash":
                sweep.expire_child(eyes, self.job_id, worker.worker_id, worker.pid, "signal 9")
            case "lose the lease":
                scene.end_lease(worker)
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
            case "replay":
                rows(eyes, REPLAY)
                self.seen = {**self.seen, "state": State.QUEUED}

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
