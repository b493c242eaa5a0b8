"""A replay in stages: it stops at the right one, resumes from any point, and replays each job once."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import pytest

from app import claim, finish, replay_run, replay_walk
from app.edit import Edit
from app.errors import DeadsureError
from app.finish import Holder
from app.quarantine import Filters, entries
from app.replay_run import Run, Terms
from app.replay_walk import Stopped, Walk
from app.triage import Wish, decide
from db.session import rows
from tests.integration.scene import Scene, Worker
from tests.integration.worklist import actions, known, quarantine, quarantined, wish

TRIALS = (1, 3, None)


class Fleet(threading.Thread):
    """A worker in a thread: claims what is queued; `ends(n)` names the fingerprint with which a job fails, or None."""

    def __init__(self, scene: Scene, ends: Callable[[int], str | None]) -> None:
        super().__init__(daemon=True)
        self._scene, self._ends = scene, ends
        self._worker, self._eyes = scene.worker(lease_s=300), scene.connect()
        self._over = threading.Event()
        self.ran: Counter[UUID] = Counter()

    def run(self) -> None:
        while not self._over.is_set():
            for (job_id,) in rows(self._eyes, "SELECT job_id FROM jobs WHERE state = 'queued'"):
                holder = self.claim(UUID(str(job_id)))
                if holder is None:
                    continue  # a second decision about it looks at the row: again in a moment
                self.ran[holder.claimed.job_id] += 1
                failure = self._ends(holder.claimed.payload["n"])
                if failure is None:
                    finish.succeed(self._worker.session, holder, "k", None, in_transaction=False)
                else:
                    quarantine(holder, self._worker, fingerprint=failure)
            self._over.wait(0.01)

    def claim(self, job_id: UUID) -> Holder | None:
        worker, delivery = self._worker, self._scene.delivery(job_id)
        won = claim.claim(worker.session, delivery, worker.worker_id, worker.pid)
        return Holder(won, delivery, worker.worker_id) if won else None

    def stop(self) -> None:
        self._over.set()
        self.join(10)


@pytest.fixture
def group(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[UUID]]:
    """Quarantined jobs with one fingerprint, oldest first; `n` is their place."""
    known(monkeypatch)
    monkeypatch.setattr(replay_walk, "LOOK_S", 0.02)
    worker = scene.worker()
    return lambda count: [quarantined(scene, worker, scene.job(n=n)) for n in range(count)]


@pytest.fixture
def fleet(scene: Scene) -> Iterator[Callable[..., Fleet]]:
    started: list[Fleet] = []

    def start(ends: Callable[[int], str | None] = lambda _: None) -> Fleet:
        for other in started:
            other.stop()
        started.append(Fleet(scene, ends))
        started[-1].start()
        return started[-1]

    yield start
    for one_of in started:
        one_of.stop()


def planned(scene: Scene, **terms: Any) -> Run:
    """A run over the group as it is now."""
    found = entries(scene.eyes, Filters(fingerprint="f"), None)
    jobs = [(UUID(entry["job_id"]), entry["episode"]) for entry in found]
    given = {"stages": TRIALS, "fingerprint": "f", **terms}
    return replay_run.plan(scene.eyes, Terms("ann", "fixed", **given), jobs)


def go(scene: Scene, run: Run, timeout_s: float = 15) -> Stopped | None:
    """One command's way through the run, on a session of its own."""
    return Walk(scene.connect(), replay_run.read(scene.eyes, run.run_id), "ann", timeout_s).go()


def stages(scene: Scene, run: Run) -> list[tuple[int | None, str | None]]:
    """(stage, outcome) of each job in its place."""
    values = (str(run.run_id),)
    return rows(scene.eyes, "SELECT stage, outcome FROM replay_run_jobs WHERE run_id = %s ORDER BY place", values)


def replays(scene: Scene) -> Counter[UUID]:
    """How often each quarantine was decided about."""
    found = rows(scene.eyes, "SELECT job_id FROM quarantine_actions WHERE action = 'replay'")
    return Counter(UUID(str(row[0])) for row in found)


def test_all_stages_when_nothing_comes_back(scene: Scene, group: Any, fleet: Any) -> None:
    jobs, workers = group(8), fleet()
    run = planned(scene)
    assert go(scene, run) is None
    assert stages(scene, run) == [(stage, "succeeded") for stage in (0, 1, 1, 1, 2, 2, 2, 2)]
    assert workers.ran == Counter(jobs)
    assert replay_run.read(scene.eyes, run.run_id).finished


def test_it_stops_in_the_stage_in_which_the_failure_returns_and_goes_on_where_it_stopped(
    scene: Scene, group: Any, fleet: Any
) -> None:
    jobs, workers = group(12), fleet(lambda n: "f" if n in (2, 9) else None)
    run = planned(scene)
    assert go(scene, run) is Stopped.RETURNED
    assert workers.ran.keys() <= set(jobs[:4]), "the third stage was not begun"
    assert stages(scene, run)[2] == (1, "returned")
    assert [outcome for _, outcome in stages(scene, run)[4:]] == [None] * 8
    fixed = fleet()
    assert replay_run.resume(scene.eyes, run)
    assert go(scene, run) is None
    assert replay_run.counts(scene.eyes, run) == {"returned": 1, "succeeded": 11}
    assert (workers.ran + fixed.ran) == Counter(jobs)
    assert scene.state(jobs[2]) == "quarantined", "what came back is another decision"


def test_another_failure_stops_a_trial_and_not_the_rest(scene: Scene, group: Any, fleet: Any) -> None:
    group(8)
    fleet(lambda n: "other" if n in (1, 6) else None)
    run = planned(scene)
    assert go(scene, run) is Stopped.ANOTHER_CAUSE
    assert all(outcome is None for _, outcome in stages(scene, run)[4:])
    replay_run.resume(scene.eyes, run)
    assert go(scene, run) is None
    assert replay_run.counts(scene.eyes, run) == {"quarantined for another cause": 2, "succeeded": 6}


def test_what_was_left_proves_nothing_so_the_next_job_makes_the_trial(scene: Scene, group: Any, fleet: Any) -> None:
    """C29: some of the group have been cancelled, or have succeeded, since it was listed."""
    jobs = group(6)
    workers = fleet()
    run = planned(scene, stages=(1, 2))
    for job_id in jobs[:2]:
        scene.change(job_id, state="succeeded", result_key="k", finished_at="now")
    assert go(scene, run) is None
    outcomes = stages(scene, run)
    assert [stage for stage, _ in outcomes] == [0, 0, 0, 1, 1, None]
    assert outcomes[0] == (0, "left: not in quarantine: succeeded")
    assert workers.ran == Counter(jobs[2:5])
    assert replay_run.counts(scene.eyes, run)["to come"] == 1


def test_a_stage_that_does_not_end_stops_the_run(scene: Scene, group: Any, fleet: Any) -> None:
    jobs = group(5)
    run = planned(scene)
    assert go(scene, run, 0.1) is Stopped.TIMEOUT
    assert replays(scene) == Counter(jobs[:1])
    workers = fleet()
    replay_run.resume(scene.eyes, run)
    assert go(scene, run) is None
    assert workers.ran == Counter(jobs)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("nth", [1, 3, 5])
def test_a_command_that_dies_is_resumed_and_replays_nothing_twice(
    scene: Scene, group: Any, fleet: Any, monkeypatch: pytest.MonkeyPatch, when: str, nth: int
) -> None:
    jobs, workers = group(6), fleet()
    run = planned(scene)
    calls = 0

    def dying(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth and when == "before":
            raise KeyboardInterrupt
        decision = decide(*arguments)
        if calls == nth:
            raise KeyboardInterrupt
        return decision

    monkeypatch.setattr(replay_walk, "decide", dying)
    with pytest.raises(KeyboardInterrupt):
        go(scene, run)
    assert go(scene, run) is None
    assert workers.ran == replays(scene) == Counter(jobs)
    assert replay_run.counts(scene.eyes, run) == {"succeeded": 6}


def test_two_commands_on_one_run_share_its_jobs(scene: Scene, group: Any, fleet: Any) -> None:
    jobs, workers = group(20), fleet()
    run = planned(scene)
    assert scene.at_once(lambda: go(scene, run), lambda: go(scene, run)) == [None, None]
    assert workers.ran == replays(scene) == Counter(jobs)
    assert replay_run.counts(scene.eyes, run) == {"succeeded": 20}


def test_two_operators_start_the_same_group_at_once(scene: Scene, group: Any, fleet: Any) -> None:
    jobs, workers = group(20), fleet()
    first, second = planned(scene), planned(scene)
    assert scene.at_once(lambda: go(scene, first), lambda: go(scene, second)) == [None, None]
    assert workers.ran == replays(scene) == Counter(jobs)
    assert replay_run.counts(scene.eyes, first) == replay_run.counts(scene.eyes, second) == {"succeeded": 20}


def test_the_second_operator_waits_for_the_first_ones_trial(scene: Scene, group: Any, fleet: Any) -> None:
    """A job that another command has out is this stage's trial too: skipping it would replay ten untried ones."""
    jobs = group(8)
    first, second = planned(scene), planned(scene)
    assert go(scene, first, 0.05) is Stopped.TIMEOUT
    assert go(scene, second, 0.1) is Stopped.TIMEOUT
    assert replays(scene) == Counter(jobs[:1])
    assert stages(scene, second)[0] == (0, "elsewhere")
    fleet(lambda _: "f")
    replay_run.resume(scene.eyes, second)
    assert go(scene, second) is Stopped.RETURNED
    assert replays(scene) == Counter(jobs[:1])


def test_a_run_stopped_by_one_command_stops_the_other(scene: Scene, group: Any) -> None:
    group(6)
    run = planned(scene)
    rows(scene.eyes, replay_walk.STOP, {"run_id": str(run.run_id), "reason": "returned"})
    assert go(scene, run) is Stopped.RETURNED
    assert replays(scene) == Counter()


def test_the_rate_bounds_how_fast_they_go_out(scene: Scene, group: Any, fleet: Any) -> None:
    group(9)
    fleet()
    assert go(scene, planned(scene, stages=(None,), rate_per_s=40)) is None
    took = "SELECT extract(epoch FROM max(at) - min(at))::float8 FROM quarantine_actions"
    assert scene.ask(took) >= 8 / 40 * 0.7


def test_without_waiting_it_ends_when_all_are_out(scene: Scene, group: Any) -> None:
    jobs = group(3)
    run = planned(scene, stages=(None,), wait=False)
    assert go(scene, run) is None
    assert replay_run.counts(scene.eyes, run) == {"replayed": 3}
    assert replays(scene) == Counter(jobs)
    assert not replay_run.resume(scene.eyes, run)


def test_a_wish_is_kept_with_the_run(scene: Scene, group: Any) -> None:
    jobs = group(2)
    wished = Wish(Edit(patch={"n": 70}), accept_uncertain=True, settle_done=True)
    run = planned(scene, stages=(1, None), wait=False, wish=wished)
    assert replay_run.read(scene.eyes, run.run_id).terms.wish == wished
    assert go(scene, run) is None
    assert [scene.row(job_id)["payload"]["n"] for job_id in jobs] == [70, 70]
    assert actions(scene, jobs[0])[0]["run_id"] == str(run.run_id)
    (listed,) = replay_run.newest(scene.eyes, 10)
    assert (listed["patch"], listed["jobs"], listed["to_come"]) == (True, 2, 0)


def test_a_run_that_is_not_there(scene: Scene) -> None:
    with pytest.raises(DeadsureError, match="no replay run"):
        replay_run.read(scene.eyes, UUID(int=7))


def test_a_job_that_came_back_and_was_helped_since_still_counts_as_returned(scene: Scene, group: Any) -> None:
    """The state alone would say succeeded."""
    (job_id,) = group(1)
    run = planned(scene)
    assert go(scene, run, 0.02) is Stopped.TIMEOUT
    worker: Worker = scene.worker()
    quarantined(scene, worker, job_id)
    wish(scene, job_id)
    finish.succeed(worker.session, scene.claimed(worker, job_id), "k", None, in_transaction=False)
    replay_run.resume(scene.eyes, run)
    assert go(scene, run) is Stopped.RETURNED
