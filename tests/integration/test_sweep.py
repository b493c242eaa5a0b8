"""expire: what proves that a worker is gone, what does not, and what becomes of its jobs."""

from __future__ import annotations

import uuid
from functools import partial

import pytest

from app import claim, finish, lease, sweep
from app.errors import LeaseLost
from app.sweep import Sweeper, Swept, expire_child, expire_redelivered
from db.session import one, rows
from tests.integration.scene import Background, Scene, Worker
from tests.nodes.waiting import wait_for

LEASE_S = 30.0


class Clock:
    """The sweeper's local clock, moved by hand (seconds)."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(sweep, "boottime_s", made)
    return made


@pytest.fixture
def sweeper(clock: Clock) -> Sweeper:
    assert clock.now
    return Sweeper(LEASE_S)


def bystander(scene: Scene, jobs: int = 3) -> Worker:
    """A living worker with most of the running jobs, so that the mass brake stays off."""
    worker = scene.worker()
    for _ in range(jobs):
        scene.claimed(worker)
    return worker


def proofs(scene: Scene, job_id: uuid.UUID) -> list[str]:
    """What the journal gives as the proof of each expiry: it decides what a rerun may believe of an external call."""
    found = scene.records(
        "SELECT split_part(reason, ': ', 1) AS proof FROM job_events WHERE job_id = %s AND event = 'expire'"
        " ORDER BY event_id",
        (str(job_id),),
    )
    return [entry["proof"] for entry in found]


# a lease that is over


def test_nobody_expires_while_all_is_well(scene: Scene, sweeper: Sweeper, clock: Clock) -> None:
    bystander(scene)
    before = scene.picture()
    for _ in range(3):
        assert sweeper.look(scene.eyes) == Swept()
        clock.now += 60
    assert scene.picture() == before


def test_a_lease_that_is_over_with_its_session_there_is_a_stall(scene: Scene, sweeper: Sweeper) -> None:
    bystander(scene)
    worker = scene.worker()
    job_id = scene.claimed(worker).claimed.job_id
    scene.end_lease(worker)
    assert sweeper.look(scene.eyes) == Swept(lost=1, silent=1, expired=1)
    row = scene.row(job_id)
    assert (row["state"], row["stalls"], row["crashes"], row["cause"]) == ("queued", 1, 0, "stalled")
    assert (row["worker_id"], row["attempt"]) == (None, 1)
    debt = scene.debt(job_id)
    assert debt is not None
    assert debt["sends"] == 0
    assert scene.owed(job_id) == "wake 1"
    assert scene.journal(job_id)[-1] == "expire"
    assert proofs(scene, job_id) == ["stalled"]
    lost = scene.worker_row(worker)
    assert lost["lost_cause"] == "stalled"
    assert lost["stopped_at"] is not None
    assert sweeper.look(scene.eyes) == Swept()


def test_a_lease_that_is_over_without_its_session_is_a_crash(scene: Scene, sweeper: Sweeper) -> None:
    bystander(scene)
    worker = scene.worker()
    job_id = scene.claimed(worker).claimed.job_id
    scene.end_lease(worker)
    scene.end_session(worker)
    assert sweeper.look(scene.eyes) == Swept(lost=1, expired=1)
    row = scene.row(job_id)
    assert (row["stalls"], row["crashes"], row["cause"]) == (0, 1, "killed_worker")
    assert proofs(scene, job_id) == ["killed"]


def test_a_worker_without_jobs_is_only_taken_off_the_list(scene: Scene, sweeper: Sweeper) -> None:
    worker = scene.worker(lease_s=-1)
    assert sweeper.look(scene.eyes) == Swept(lost=1, silent=1, expired=0)
    assert scene.worker_row(worker)["stopped_at"] is not None


# a missing session is a hint


def test_a_missing_session_counts_when_it_is_seen_twice_a_second_apart(
    scene: Scene, sweeper: Sweeper, clock: Clock
) -> None:
    worker = scene.worker()
    job_id = scene.claimed(worker).claimed.job_id
    scene.end_session(worker)
    assert sweeper.look(scene.eyes) == Swept()
    clock.now += 0.99
    assert sweeper.look(scene.eyes) == Swept()
    clock.now += 0.02
    assert sweeper.look(scene.eyes) == Swept(lost=1, expired=1)
    row = scene.row(job_id)
    assert (row["state"], row["crashes"], row["cause"]) == ("queued", 1, "killed_worker")


def test_a_session_that_comes_back_starts_the_count_again(scene: Scene, sweeper: Sweeper, clock: Clock) -> None:
    worker = scene.worker()
    scene.claimed(worker)
    scene.end_session(worker)
    assert sweeper.look(scene.eyes) == Swept()
    clock.now += 0.5
    again = scene.connect()
    rows(again, "SELECT pg_advisory_lock(%s)", (worker.lock_key,))
    assert sweeper.look(scene.eyes) == Swept()
    rows(again, "SELECT pg_advisory_unlock(%s)", (worker.lock_key,))
    clock.now += 0.6
    assert sweeper.look(scene.eyes) == Swept()
    clock.now += 1.1
    assert sweeper.look(scene.eyes) == Swept(lost=1, expired=1)


def test_a_new_lock_key_starts_the_count_again(scene: Scene, sweeper: Sweeper, clock: Clock) -> None:
    """The keeper locked again and lost that session too: one look at the new key is one look."""
    worker = scene.worker()
    scene.claimed(worker)
    scene.end_session(worker)
    sweeper.look(scene.eyes)
    rows(scene.eyes, "UPDATE workers SET lock_key = lock_key / 2, locked_at = clock_timestamp()")
    clock.now += 5
    assert sweeper.look(scene.eyes) == Swept()
    clock.now += 1
    assert sweeper.look(scene.eyes) == Swept(lost=1, expired=1)


def test_a_lock_from_before_the_servers_start_proves_nothing(scene: Scene, sweeper: Sweeper, clock: Clock) -> None:
    """PostgreSQL restarted: it took every session, and every worker lives."""
    worker = scene.worker()
    job_id = scene.claimed(worker).claimed.job_id
    scene.end_session(worker)
    rows(scene.eyes, "UPDATE workers SET locked_at = pg_postmaster_start_time() - interval '1 s'")
    for _ in range(5):
        assert sweeper.look(scene.eyes) == Swept()
        clock.now += 10
    assert scene.state(job_id) == "running"
    assert not expire_redelivered(scene.eyes, job_id)


def test_behind_a_pooler_only_the_lease_decides(scene: Scene, sweeper: Sweeper, clock: Clock) -> None:
    bystander(scene)
    worker = scene.worker(pooled=True)
    job_id = scene.claimed(worker).claimed.job_id
    scene.end_session(worker)
    for _ in range(3):
        assert sweeper.look(scene.eyes) == Swept()
        clock.now += 10
    assert not expire_redelivered(scene.eyes, job_id)
    scene.end_lease(worker)
    assert sweeper.look(scene.eyes) == Swept(lost=1, silent=1, expired=1)
    assert scene.row(job_id)["cause"] == "stalled"  # nobody knows about its session


def test_a_type_without_key_and_check_waits_for_the_lease(scene: Scene, sweeper: Sweeper, clock: Clock) -> None:
    bystander(scene)
    worker = scene.worker()
    patient = scene.claimed(worker, scene.job(expire_early=False)).claimed.job_id
    quick = scene.claimed(worker).claimed.job_id
    scene.end_session(worker)
    assert not expire_redelivered(scene.eyes, patient)
    sweeper.look(scene.eyes)
    clock.now += 2
    assert sweeper.look(scene.eyes) == Swept(lost=1, expired=1)
    assert (scene.state(quick), scene.state(patient)) == ("queued", "running")
    assert scene.worker_row(worker)["stopped_at"] is None
    clock.now += 2
    assert sweeper.look(scene.eyes) == Swept()
    scene.end_lease(worker)
    assert sweeper.look(scene.eyes) == Swept(lost=0, expired=1)
    assert scene.row(patient)["cause"] == "killed_worker"
    assert scene.worker_row(worker)["stopped_at"] is not None


def test_the_broker_gave_the_message_back_and_the_session_is_gone(scene: Scene) -> None:
    worker = scene.worker()
    job_id = scene.claimed(worker).claimed.job_id
    before = scene.picture()
    assert not expire_redelivered(scene.eyes, job_id)
    assert scene.picture() == before
    scene.end_session(worker)
    assert expire_redelivered(scene.eyes, job_id)
    row = scene.row(job_id)
    assert (row["state"], row["crashes"]) == ("queued", 1)
    assert not expire_redelivered(scene.eyes, job_id)


# between the look and the deed


def lose_by_hand(scene: Scene, sweeper: Sweeper, worker: Worker, cause: str) -> bool:
    return sweeper._lose(scene.eyes, worker.worker_id, worker.lock_key, cause, 1)


def test_a_lock_key_that_changed_after_the_look_is_a_sign_of_life(scene: Scene, sweeper: Sweeper) -> None:
    worker = scene.worker()
    job_id = scene.claimed(worker).claimed.job_id
    rows(scene.eyes, "UPDATE workers SET lock_key = lock_key / 2")
    for cause in ("killed", "stalled"):
        assert not lose_by_hand(scene, sweeper, worker, cause)
    assert scene.worker_row(worker)["lost_at"] is None
    assert scene.state(job_id) == "running"


def test_a_lease_that_was_renewed_after_the_look_stands(scene: Scene, sweeper: Sweeper) -> None:
    worker = scene.worker(lease_s=-1)
    rows(worker.keeper, "BEGIN")
    assert one(worker.keeper, lease.RENEW, {"worker_id": str(worker.worker_id), "lease_s": 30, "queues": None})
    lost = Background(lambda: lose_by_hand(scene, sweeper, worker, "stalled"))
    wait_for(
        lambda: one(worker.keeper, "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'") != (0,),
        10,
        "the sweeper waits for the renewal",
        poll_s=0.005,
    )
    rows(worker.keeper, "COMMIT")
    assert lost.result() is False
    assert scene.worker_row(worker)["lost_at"] is None


def test_two_sweepers_at_once_expire_each_job_once(scene: Scene) -> None:
    bystander(scene, 30)
    worker = scene.worker()
    held = [scene.claimed(worker).claimed.job_id for _ in range(20)]
    scene.end_lease(worker)
    others = [scene.connect() for _ in range(3)]
    swept = scene.at_once(*[partial(Sweeper(LEASE_S).look, other) for other in others])
    assert sum(done.lost for done in swept) == 1
    Sweeper(LEASE_S).look(scene.eyes)
    assert [scene.row(job_id)["stalls"] for job_id in held] == [1] * 20
    assert all(scene.journal(job_id).count("expire") == 1 for job_id in held)


def test_a_job_that_finishes_while_the_sweeper_looks_stays_finished(scene: Scene, sweeper: Sweeper) -> None:
    bystander(scene)
    worker = scene.worker()
    holder = scene.claimed(worker)
    scene.end_lease(worker)
    rows(worker.keeper, "BEGIN")  # not the job's session: that one ends with the lease
    finish.succeed(worker.keeper, holder, "k", None, False)
    assert sweeper.look(scene.eyes) == Swept(lost=1, silent=1, expired=0)
    rows(worker.keeper, "COMMIT")
    assert sweeper.look(scene.eyes) == Swept()
    row = scene.row(holder.claimed.job_id)
    assert (row["state"], row["stalls"]) == ("succeeded", 0)


def test_a_late_finish_after_the_expiry_writes_nothing(scene: Scene, sweeper: Sweeper) -> None:
    bystander(scene)
    worker = scene.worker()
    holder = scene.claimed(worker)
    scene.end_lease(worker)
    sweeper.look(scene.eyes)
    before = scene.picture()
    late = scene.connect()
    with pytest.raises(LeaseLost):
        finish.succeed(late, holder, "k", None, False)
    assert scene.picture() == before


# the sessions of a lost worker


def test_the_session_of_a_frozen_atomic_job_ends_with_the_lease(scene: Scene, sweeper: Sweeper) -> None:
    other, worker = bystander(scene), scene.worker()
    holder = scene.begun(worker)
    job_id = holder.claimed.job_id
    assert claim.claim(other.session, holder.delivery, other.worker_id, 1) is None
    scene.end_lease(worker)
    sweeper.look(scene.eyes)
    wait_for(
        lambda: claim.claim(other.session, holder.delivery, other.worker_id, 1),
        10,
        "another worker gets the row",
        poll_s=0.005,
    )
    assert scene.row(job_id)["attempt"] == 1
    assert not other.session.closed
    assert one(other.session, "SELECT 1") == (1,)


# the mass brake


def test_a_sweep_that_would_expire_most_jobs_waits_one_lease(scene: Scene, sweeper: Sweeper, clock: Clock) -> None:
    workers = [scene.worker() for _ in range(3)]
    held = [scene.claimed(worker).claimed.job_id for worker in workers]
    for worker in workers:
        scene.end_lease(worker)
    assert sweeper.look(scene.eyes) == Swept()
    clock.now += LEASE_S - 0.1
    assert sweeper.look(scene.eyes) == Swept()
    assert [scene.state(job_id) for job_id in held] == ["running"] * 3
    clock.now += 0.2
    assert sweeper.look(scene.eyes) == Swept(lost=3, silent=3, expired=3)


def test_the_brake_saves_workers_that_were_only_out_of_time(scene: Scene, sweeper: Sweeper, clock: Clock) -> None:
    """The database's clock jumped: the workers renew while the sweeper waits, and keep their jobs."""
    workers = [scene.worker() for _ in range(3)]
    held = [scene.claimed(worker).claimed.job_id for worker in workers]
    for worker in workers:
        scene.end_lease(worker)
    assert sweeper.look(scene.eyes) == Swept()
    for worker in workers:
        assert one(worker.keeper, lease.RENEW, {"worker_id": str(worker.worker_id), "lease_s": 30, "queues": None})
    clock.now += 100
    assert sweeper.look(scene.eyes) == Swept()
    assert [scene.state(job_id) for job_id in held] == ["running"] * 3
    scene.end_lease(workers[0])
    scene.end_lease(workers[1])
    clock.now += 1
    assert sweeper.look(scene.eyes) == Swept()  # the brake starts anew


def test_the_brake_does_not_hold_up_the_death_of_a_few(scene: Scene, sweeper: Sweeper) -> None:
    bystander(scene, 2)
    worker = scene.worker()
    scene.claimed(worker)
    scene.end_lease(worker)
    assert sweeper.look(scene.eyes) == Swept(lost=1, silent=1, expired=1)


# budgets


@pytest.mark.parametrize(("cause", "counter"), [("killed_worker", "crashes"), ("stalled", "stalls")])
def test_the_last_loss_that_is_allowed_quarantines(scene: Scene, sweeper: Sweeper, cause: str, counter: str) -> None:
    bystander(scene)
    worker = scene.worker()
    job_id = scene.claimed(worker, scene.job(**{counter: 2})).claimed.job_id
    scene.end_lease(worker)
    if cause == "killed_worker":
        scene.end_session(worker)
    assert sweeper.look(scene.eyes) == Swept(lost=1, silent=int(cause == "stalled"), expired=1)
    row = scene.row(job_id)
    assert (row["state"], row[counter], row["episode"], row["cause"]) == ("quarantined", 3, 1, cause)
    (entry,) = scene.entries(job_id)
    assert (entry["episode"], entry["cause"], entry["attempt"]) == (1, cause, 1)
    assert (entry["dead_lettered_at"], entry["closed_at"]) == (None, None)
    assert scene.owed(job_id) == "trace 1"
    debt = scene.debt(job_id)
    assert debt is not None
    assert debt["sends"] == 0
    assert debt["due_at"] <= scene.ask("SELECT clock_timestamp()")  # nobody holds a delivery to reject
    assert scene.journal(job_id)[-2:] == ["expire", "quarantined"]
    assert proofs(scene, job_id) == ["stalled" if cause == "stalled" else "killed"]


def test_a_loss_of_the_other_kind_does_not_spend_the_budget(scene: Scene, sweeper: Sweeper) -> None:
    bystander(scene)
    worker = scene.worker()
    job_id = scene.claimed(worker, scene.job(crashes=2)).claimed.job_id
    scene.end_lease(worker)
    sweeper.look(scene.eyes)
    row = scene.row(job_id)
    assert (row["state"], row["crashes"], row["stalls"]) == ("queued", 2, 1)


def test_a_cancel_that_was_asked_for_is_honoured(scene: Scene, sweeper: Sweeper) -> None:
    bystander(scene)
    worker = scene.worker()
    job_id = scene.claimed(worker, scene.job(cancel_requested=True, stalls=2)).claimed.job_id
    scene.end_lease(worker)
    sweeper.look(scene.eyes)
    row = scene.row(job_id)
    assert (row["state"], row["episode"]) == ("cancelled", 0)
    assert row["finished_at"] is not None
    assert scene.debt(job_id) is None
    assert scene.entries(job_id) == []


def test_a_worker_with_more_jobs_than_one_page(scene: Scene, sweeper: Sweeper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "PAGE", 2)
    monkeypatch.setattr(sweep, "OF_WORKER", sweep.EXPIRE.format(which="(expire_early OR %(lease_over)s)", page=2))
    bystander(scene, 8)
    worker = scene.worker()
    for _ in range(5):
        scene.claimed(worker)
    scene.end_lease(worker)
    assert sweeper.look(scene.eyes) == Swept(lost=1, silent=1, expired=5)
    assert scene.worker_row(worker)["stopped_at"] is not None


# a child that died


def test_a_dead_child_frees_its_own_job_only(scene: Scene) -> None:
    worker = scene.worker(pid=10)
    dead = scene.claimed(worker).claimed.job_id
    worker.pid = 11
    alive = scene.claimed(worker).claimed.job_id
    assert expire_child(scene.eyes, alive, worker.worker_id, 10, "signal 9") is None
    assert expire_child(scene.eyes, dead, uuid.uuid4(), 10, "signal 9") is None
    assert expire_child(scene.eyes, dead, worker.worker_id, 10, "signal 9") == "queued"
    assert expire_child(scene.eyes, dead, worker.worker_id, 10, "signal 9") is None
    assert scene.state(alive) == "running"
    row = scene.row(dead)
    assert (row["crashes"], row["reason"]) == (1, "signal 9")
    assert proofs(scene, dead) == ["killed"]


def test_a_child_that_died_too_often_quarantines_its_job(scene: Scene) -> None:
    worker = scene.worker(pid=10)
    job_id = scene.claimed(worker, scene.job(crashes=2, episode=4)).claimed.job_id
    assert expire_child(scene.eyes, job_id, worker.worker_id, 10, "signal 9") == "quarantined"
    assert [entry["episode"] for entry in scene.entries(job_id)] == [5]
    assert scene.owed(job_id) == "trace 5"
