"""Random lives of one job over the real arrows: the journal never shows an arrow that the legend does not have.

Two workers, two attempts at everything, stale holders that try again: whatever order things happen in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app import claim, finish, sweep
from app.errors import LeaseLost
from app.finish import Holder
from app.release import release
from app.states import ARROWS, TERMINAL, Arrow, State
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
    "let time pass",
    "take",
)
OPEN = "state NOT IN ('succeeded', 'cancelled')"
steps = st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 1), st.integers(0, 3)), max_size=14)


class Life:
    """One job, two workers, and every holder that there ever was: the stale ones go on trying."""

    def __init__(self, scene: Scene, workers: list[Worker]) -> None:
        self.scene, self.workers = scene, workers
        self.job_id = scene.job()
        self.holders: list[tuple[Worker, Holder]] = []
        self.begun: tuple[Worker, Holder] | None = None
        self.seen = scene.row(self.job_id)

    def step(self, what: str, who: int, which: int) -> None:
        worker = self.workers[who]
        if self.begun is not None and what not in ("succeed", "retry", "quarantine", "commit nothing"):
            return  # its row is locked: others pass by, which `test_claim` shows
        if self.begun is not None:
            self.end_atomic(what)
        else:
            self.others(what, worker, which)

    def others(self, what: str, worker: Worker, which: int) -> None:
        scene, eyes = self.scene, self.scene.eyes
        match what:
            case "claim":
                delivery = scene.delivery(self.job_id)
                if won := claim.claim(worker.session, delivery, worker.worker_id, worker.pid):
                    self.holders.append((worker, Holder(won, delivery, worker.worker_id)))
            case "begin":
                delivery = scene.delivery(self.job_id)
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
            case "let time pass":
                rows(
                    eyes,
                    f"UPDATE jobs SET not_before = 'yesterday' WHERE not_before IS NOT NULL AND {OPEN};"
                    " UPDATE workers SET lease_until = clock_timestamp() + interval '30 s'",
                )
            case "take" if scene.debt(self.job_id):
                rows(eyes, "UPDATE outbox SET sends = sends + 1, sent_at = clock_timestamp()")

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
        arrows: dict[str, Callable[[], None]] = {
            "succeed": lambda: finish.succeed(worker.session, holder, "k", None, in_transaction),
            "retry": lambda: finish.retry(worker.session, holder, 60, "transient", "r", in_transaction),
            "quarantine": lambda: finish.quarantine(
                worker.session, holder, "permanent", "r", "f", True, in_transaction
            ),
        }
        try:
            arrows[what]()
        except LeaseLost:
            return

    def judge(self) -> None:
        """Compare the row with how it was before the step, and with the arrow that the journal names."""
        row, before = self.scene.row(self.job_id), self.seen
        self.seen = row
        for counter in ("attempt", "failures", "crashes", "stalls", "releases", "episode"):
            assert row[counter] >= before[counter], counter
        assert row["attempt"] - before["attempt"] in (0, 1)
        debt = self.scene.debt(self.job_id)
        waiting = row["state"] in (State.QUEUED, State.RETRY_WAIT)
        assert (debt is not None) is waiting, "a job that waits has a debt, and no other job has one"
        if before["state"] in TERMINAL:
            assert row == before


def walk(journal: list[dict[str, Any]], final: str) -> None:
    """The arrows of the journal, one after the other, lead from nothing to the final state."""
    possible: set[State | None] = {None}
    for entry in journal:
        if entry["event"] not in set(Arrow):
            continue
        sources, targets = ARROWS[Arrow(entry["event"])]
        assert possible & sources, f"{entry['event']} from {possible}"
        possible = set(targets)
    assert State(final) in possible


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(life=steps)
def test_no_life_leaves_the_legend(scene: Scene, life: list[tuple[str, int, int]]) -> None:
    scene.empty_jobs()
    workers = [scene.worker_again(0), scene.worker_again(1)]
    lived = Life(scene, workers)
    for step in life:
        lived.step(*step)
        lived.judge()
    if lived.begun is not None:
        rows(lived.begun[0].session, "ROLLBACK")
    journal = scene.records(
        "SELECT event, attempt FROM job_events WHERE job_id = %s ORDER BY event_id", (str(lived.job_id),)
    )
    row = scene.row(lived.job_id)
    walk(journal, row["state"])
    attempts = [entry["attempt"] for entry in journal if entry["event"] == Arrow.CLAIM]
    assert attempts == list(range(1, row["attempt"] + 1)), "each attempt is claimed once, in order"
    assert sum(entry["event"] == Arrow.SUCCEED for entry in journal) == (row["state"] == State.SUCCEEDED)
    assert len(scene.entries(lived.job_id)) == row["episode"]


def test_every_arrow_of_the_legend_starts_and_ends_somewhere() -> None:
    assert set(ARROWS) == set(Arrow)
    reached = {target for _, targets in ARROWS.values() for target in targets}
    assert reached == set(State)
    for sources, targets in ARROWS.values():
        assert not sources & TERMINAL
        assert sources
        assert targets
