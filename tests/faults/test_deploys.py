"""Deploys: a worker is replaced by the next one, again and again, under load, under its own name."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, text

from tests.conftest import Scale
from tests.faults.conftest import Court
from tests.faults.effects import Effects
from tests.faults.points import QUICK
from tests.faults.test_shutdown import APP, blame, wait_prefetched, wait_running
from tests.nodes.marks import on_rabbitmq
from tests.nodes.servers import BrokerNode
from tests.nodes.waiting import stays_true, wait_for

pytestmark = pytest.mark.usefixtures("settings")
SAME_PID = "tests.faults.jobs_same_pid"


@pytest.mark.soak
@on_rabbitmq
@pytest.mark.environment(DEADSURE_SHUTDOWN_GRACE_S="20")
def test_c24_deploys_over_a_job_that_checkpoints(
    leaving: Any, court: Court, effects: Effects, start_worker: Any, tmp_path: Path, scale: Scale
) -> None:
    """One step for each worker: it takes up where the last one stopped, and every delivery of it is a first one."""
    deploys = scale.deploys
    walk = leaving.walk.delay(steps=deploys, road=str(tmp_path))
    workers = [start_worker(APP, concurrency=1, options=QUICK)]
    for deploy in range(deploys - 1):
        wait_for(lambda: effects.starts(walk.id) == deploy + 1, 60, f"attempt {deploy + 1} runs")  # noqa: B023
        (tmp_path / str(deploy)).touch()
        if deploy + 1 < deploys:
            stays_true(lambda: court.case(walk.id).state == "running", 0.2)
        workers.append(start_worker(APP, concurrency=1, options=QUICK))
        workers[-2].terminate(60)
    wait_for(lambda: effects.starts(walk.id) == deploys, 60, "the last worker has it")
    (tmp_path / str(deploys - 1)).touch()
    (case,) = court.wait_succeeded([walk.id]).values()
    assert walk.get(timeout=5) == {"began": list(range(deploys))}
    assert (blame(case), case.attempt, case.releases, effects.count(walk.id)) == ((0, 0, 0), deploys, deploys - 1, 1)
    # A leaving worker may have been handed the next message already; each release makes a new one, so it never adds up.
    redelivered = sum(bool(event.redelivered) for event in case.events("claim"))
    assert redelivered <= max(2, deploys // 4), "the broker's delivery limit is far away"
    assert not case.events("dead_lettered")
    assert [worker.exit_code() for worker in workers[:-1]] == [0] * (deploys - 1)
    print(  # noqa: T201  for the reader of `-rP`
        f"{deploys} deploys over one job: {case.releases} releases, {case.attempt} attempts, {redelivered} redelivered"
    )


@on_rabbitmq
@pytest.mark.environment(DEADSURE_SHUTDOWN_GRACE_S="1", DEADSURE_RESEND_FIRST_S="60", DEADSURE_PREFETCH="8")
def test_c24_prefetched_through_deploys(
    broker: BrokerNode, jobs: Any, leaving: Any, court: Court, effects: Effects, start_worker: Any, tmp_path: Path
) -> None:
    """Each worker that leaves gives back what it held and never started."""
    blocker = leaving.walk.delay(steps=1, road=str(tmp_path)).id
    worker = start_worker(APP, concurrency=1, options=QUICK)
    wait_running(court, effects, [blocker])
    held = [task.delay(n=n).id for n in range(2) for task in (jobs.leased_effect, jobs.atomic)]
    for _ in range(2):
        wait_prefetched(court, broker, held)
        assert worker.terminate(60) == 0
        worker = start_worker(APP, concurrency=1, options=QUICK)
    (tmp_path / "0").touch()
    found = court.wait_succeeded([blocker, *held])
    assert {blame(case) for case in found.values()} == {(0, 0, 0)}
    assert {found[UUID(job_id)].attempt for job_id in held} == {1}


@pytest.mark.soak
@on_rabbitmq
@pytest.mark.environment(DEADSURE_LEASE_S="3", DEADSURE_SHUTDOWN_GRACE_S="1", DEADSURE_PREFETCH="1")
def test_deploy_under_load(
    jobs: Any,
    leaving: Any,
    court: Court,
    effects: Effects,
    engine: Engine,
    start_worker: Any,
    tmp_path: Path,
    scale: Scale,
) -> None:
    """Two workers are replaced: one leaves in order, the other is killed at the end of a grace too short for it."""
    go = tmp_path / "go"
    first = start_worker(APP, options=QUICK, name="first")
    second = start_worker(APP, options=QUICK, name="second", environment={"DEADSURE_SHUTDOWN_GRACE_S": "60"})
    long = [jobs.slow.delay(until=str(go)).id for _ in range(2)]
    wait_running(court, effects, long)
    short = [task.delay(s=0.03).id for _ in range(scale.load) for task in (leaving.short_leased, leaving.short_atomic)]
    wait_for(lambda: effects.count() > scale.load // 5, 60 * scale.patience, "work goes on")

    first.kill("SIGTERM")
    start_worker(APP, options=QUICK, name="third")
    assert first.wait(60) == 0
    lease = lease_of(engine, "second")
    second.kill("SIGTERM")
    stays_true(second.is_running, 0.5)
    killed_at = jobs_of(engine, lease)
    second.sigkill_group()
    start_worker(APP, options=QUICK, name="fourth")
    go.touch()

    found = court.wait_succeeded([*long, *short], 90 * scale.patience)
    assert len(found) == len(long) + len(short)
    assert effects.doubled() == {}
    assert effects.count() == len(found)
    assert {case.failures for case in found.values()} == {0}
    assert {case.stalls for case in found.values()} == {0}
    crashed = {case.job_id for case in found.values() if case.crashes}
    for job_id in crashed:
        assert {event.worker_id for event in found[job_id].events("expire")} == {lease}, "only what was shot"
    assert len(crashed) <= 2
    released = Counter(case.releases for case in found.values())
    print(  # noqa: T201  for the reader of `-rP`
        f"deploy under load: {len(found)} jobs, 0 lost, 0 doubled; {len(killed_at)} running at the kill, "
        f"{len(crashed)} crashed; jobs by releases: {dict(released)}"
    )


def lease_of(engine: Engine, name: str) -> UUID:
    """The lease of a worker by its name."""
    with engine.connect() as connection:
        found: UUID = connection.scalar(text("SELECT worker_id FROM workers WHERE name LIKE :n"), {"n": f"{name}@%"})
        return found


def leases_of(engine: Engine, name: str) -> dict[UUID, str | None]:
    """Why each lease of one name, host and process number was lost."""
    with engine.connect() as connection:
        doubles = "SELECT worker_id, lost_cause FROM workers WHERE name LIKE :n AND pid = 1"
        return dict(map(tuple, connection.execute(text(doubles), {"n": f"{name}@%"})))


def jobs_of(engine: Engine, lease: UUID) -> list[UUID]:
    """What runs under a lease."""
    with engine.connect() as connection:
        statement = text("SELECT job_id FROM jobs WHERE state = 'running' AND worker_id = :lease")
        return list(connection.scalars(statement, {"lease": lease}))


@on_rabbitmq
@pytest.mark.parametrize("old", ["killed", "frozen"])
def test_c25_reused_name_host_and_pid(
    old: str, jobs: Any, court: Court, effects: Effects, engine: Engine, start_worker: Any, tmp_path: Path
) -> None:
    """A pod that comes back as its own double: the old lease ends by itself, and is not taken for the new one's."""
    go = tmp_path / "go"
    first = start_worker(SAME_PID, concurrency=1, name="pod", options=QUICK)
    job = jobs.slow.delay(until=str(go)).id
    wait_running(court, effects, [job])
    first.sigkill_group() if old == "killed" else first.sigstop()
    second = start_worker(SAME_PID, concurrency=1, name="pod", options=QUICK)
    case = court.wait_case(job, lambda case: case.attempt == 2, "is taken from the old one")
    go.touch()
    (case,) = court.wait_succeeded([job]).values()
    assert (case.crashes, case.stalls) == ((1, 0) if old == "killed" else (0, 1))
    before, after = [event.worker_id for event in case.events("claim")]
    assert before != after
    lost = {before: "killed" if old == "killed" else "stalled", after: None}
    wait_for(lambda: leases_of(engine, "pod") == lost, 30, "the old lease is lost, the new one is not")
    if old == "frozen":
        first.sigcont()
        first.wait_for_log("lease.lost")
    court.wait_succeeded([jobs.leased_effect.delay(n=1).id])
    assert second.is_running()
    assert effects.count(job) == 1


@on_rabbitmq
@pytest.mark.environment(
    DEADSURE_LEASE_S="1.5", DEADSURE_RESEND_FIRST_S="0.5", DEADSURE_RESEND_MAX_S="0.5", DEADSURE_SWEEP_S="0.1"
)
def test_c33_a_long_job_is_not_run_again_because_it_looks_old(
    jobs: Any, court: Court, effects: Effects, engine: Engine, start_worker: Any, tmp_path: Path
) -> None:
    """Five leases long, with an idle worker beside it, and its row made to look days old."""
    go = tmp_path / "go"
    for _ in range(2):
        start_worker(APP, concurrency=1, options=QUICK)
    job = jobs.slow.delay(until=str(go)).id
    wait_running(court, effects, [job])
    with engine.begin() as connection:
        old = "SET changed_at = changed_at - interval '3 days', created_at = created_at - interval '3 days'"
        connection.execute(text(f"UPDATE jobs {old} WHERE job_id = :id"), {"id": job})
    stays_true(lambda: effects.starts(job) == 1, 7.5, "it runs once", poll_s=0.2)
    go.touch()
    (case,) = court.wait_succeeded([job]).values()
    assert (case.attempt, blame(case), effects.starts(job)) == (1, (0, 0, 0), 1)
