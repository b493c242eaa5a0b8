"""Each situation that `deadsure diagnose` names, produced with real processes and recognised."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from kombu import Connection
from sqlalchemy import Engine, text

from tests.faults.conftest import Court
from tests.faults.effects import Effects
from tests.faults.inject import Fault
from tests.faults.points import QUICK, identities, let_go, park, wait_parked
from tests.faults.test_worker_killed import plant, submit
from tests.nodes.marks import on_rabbitmq, on_valkey
from tests.nodes.programs import Programs
from tests.nodes.servers import BrokerNode
from tests.nodes.waiting import wait_for

pytestmark = pytest.mark.usefixtures("settings")
IN_BATCH = "UPDATE jobs SET batch_id = :batch WHERE job_id = :job"
BATCH = "INSERT INTO batches (batch_id, coordinator_id) VALUES (:batch, gen_random_uuid())"
APP = "tests.faults.jobs_diagnose"
RELAY_THAT_KNOWS = "import tests.faults.jobs_diagnose; from tasks.commands import deadsure; deadsure(['relay'])"
NOBODY = "amqp://guest:guest@127.0.0.1:9//"


@pytest.fixture
def situations(jobs: Any) -> Any:
    """`tests.faults.jobs_diagnose`, imported when the environment is there."""
    assert jobs
    import tests.faults.jobs_diagnose  # noqa: PLC0415

    return tests.faults.jobs_diagnose


def diagnosis(job_id: UUID | str) -> Any:
    """What the command concludes."""
    from tasks.diagnose import examine  # noqa: PLC0415  reads the environment

    return examine(UUID(str(job_id)))[1]


def look(job_id: str) -> Any:
    """The facts about a job."""
    from tasks.diagnose import examine  # noqa: PLC0415  reads the environment

    return examine(UUID(job_id))[0]


def wait_cause(job_id: UUID | str, cause: str, *, wrong: bool = True) -> Any:
    """Wait until this is the diagnosis."""
    seen: list[str] = []

    def is_it() -> Any:
        found = diagnosis(job_id)
        seen.append(f"{found.cause}: {found.explanation}")
        return found if found.cause == cause else None

    try:
        found = wait_for(is_it, 60, cause, poll_s=0.1)
    except AssertionError as error:
        raise AssertionError(f"{error}\n" + "\n".join(dict.fromkeys(seen))) from None
    assert found.wrong is wrong, found.explanation
    assert found.next
    return found


def command(programs: Programs, job_id: str, **environment: str) -> tuple[int, Any]:
    """Exit code and answer of the program for scripts."""
    run = [sys.executable, "-m", "tasks.cli", "diagnose", "--json", job_id]
    told = {**programs.environment, "PYTHONPATH": ".", **environment}
    done = subprocess.run(run, env=told, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@on_rabbitmq
@pytest.mark.environment(
    DEADSURE_RESEND_FIRST_S="60", DEADSURE_EVIDENCE_AGE_S="30", DEADSURE_LEASE_S="60", DEADSURE_SWEEP_S="0.2"
)
def test_queued_for_long(
    broker: BrokerNode, jobs: Any, situations: Any, court: Court, programs: Programs, start_relay: Any
) -> None:
    job, later = jobs.leased_effect.delay(n=1), jobs.leased_effect.apply_async(kwargs={"n": 2}, countdown=600)
    unwanted = jobs.leased_effect.delay(n=3)
    late = situations.aside.apply_async(kwargs={"n": 4}, expires=0.5)
    wait_cause(later.id, "waiting_not_before", wrong=False)
    assert [look(later.id).broker.exists for _ in range(2)] == [False, False], "it declares nothing"
    unwanted.revoke()
    wait_cause(unwanted.id, "cancelled", wrong=False)
    code, told = command(programs, job.id, BROKER_URL=NOBODY)
    assert (code, told["cause"], told["evidence"]["broker"]["reachable"]) == (3, "broker_down", False)

    relay = start_relay()
    court.wait_case(job.id, lambda case: case.events("published"), "is published")
    assert wait_cause(job.id, "waiting_no_worker").next == "celery -A tasks worker -Q jobs"
    wait_cause(late.id, "waiting_expired")
    with Connection(broker.url) as connection:
        connection.default_channel.queue_delete("jobs")
    lost = jobs.leased_effect.delay(n=5)
    assert "NO_ROUTE" in wait_cause(lost.id, "unroutable").explanation

    worker = programs.worker(APP, options=("-Q", "aside", "--without-relay", *QUICK))
    assert wait_cause(job.id, "waiting_no_consumer").next == "celery -A tasks worker -Q jobs"
    assert (look(job.id).broker.bound, look(job.id).broker.quarantine_exists) == (True, True)
    unsent = situations.aside.delay(n=6)
    assert "no code at work routes" in wait_cause(unsent.id, "relay_not_sending").explanation
    relay.sigkill()
    assert wait_cause(unsent.id, "relay_stopped").next == "deadsure relay"
    programs.producer(RELAY_THAT_KNOWS)
    wait_cause(unsent.id, "succeeded", wrong=False)
    wait_cause(late.id, "expired")
    worker.sigstop()
    stuck = [situations.aside.delay(n=n).id for n in range(10)]  # more than it prefetches
    wait_cause(stuck[-1], "consumers_take_nothing")


@on_valkey
@pytest.mark.environment(DEADSURE_RESEND_FIRST_S="60")
def test_redis_tells_no_consumers_but_idle_workers_do(jobs: Any, programs: Programs) -> None:
    job = jobs.leased_effect.delay(n=1)
    programs.worker(APP, options=("-Q", "aside", *QUICK))
    wait_cause(job.id, "waiting_no_consumer")


@on_rabbitmq
@pytest.mark.environment(DEADSURE_RESEND_FIRST_S="60", DEADSURE_WINDOW="4", DEADSURE_PREFETCH="2")
def test_a_backlog_behind_a_long_job_that_does_not_stop(
    jobs: Any, court: Court, effects: Effects, start_worker: Any
) -> None:
    worker = start_worker(concurrency=1, options=QUICK)
    slow = jobs.slow.delay()
    wait_for(lambda: effects.starts(slow.id), 30, "it runs")
    found = wait_cause(slow.id, "running", wrong=False)
    assert "hard time limit is in 15 min" in found.explanation
    held = jobs.leased_effect.delay(n=0)
    wait_cause(held.id, "waiting_in_worker", wrong=False)
    waiting = [jobs.leased_effect.delay(n=n).id for n in range(1, 8)]
    for job_id in waiting[:3]:
        court.wait_case(job_id, lambda case: case.events("published"), "is published")
    wait_cause(waiting[0], "waiting_backlog", wrong=False)
    assert "3 due jobs stand before" in wait_cause(waiting[-1], "waiting_behind_window", wrong=False).explanation
    slow.revoke()
    assert wait_cause(slow.id, "cancel_not_honoured").next.startswith("kill -9 ")
    worker.sigkill()
    wait_cause(slow.id, "worker_lost_not_swept")


@on_rabbitmq
@pytest.mark.environment(DEADSURE_RESEND_FIRST_S="60", DEADSURE_RESEND_MAX_S="60", DEADSURE_PREFETCH="1")
def test_two_files_and_a_result_without_acknowledgement(
    jobs: Any, court: Court, effects: Effects, engine: Engine, start_worker: Any, tmp_path: Path
) -> None:
    plant(engine)
    go, ids = tmp_path / "go", identities({"export": None, "unacknowledged": None, "slow": None})
    export, unacknowledged, slow = ids.values()
    first = start_worker(
        concurrency=1, faults=[park("before:app.domain.reports.record_export", export, tmp_path)], options=QUICK
    )
    submit(jobs, "export", export)
    wait_parked(tmp_path, export)
    killed = Fault("after:app.finish.succeed", "kill", who="main", match=str(unacknowledged))
    second = start_worker(concurrency=2, faults=[killed], options=QUICK)
    jobs.slow.apply_async(kwargs={"until": str(go)}, task_id=str(slow))
    wait_for(lambda: effects.starts(slow), 30, "the other worker has a long job")

    first.sigstop()
    found = wait_cause(export, "owner_frozen")
    assert f"pid {first.pid} on" in found.explanation
    court.wait_case(export, lambda case: case.state == "succeeded", "is taken over")
    let_go(tmp_path, export)
    first.sigcont()
    first.wait_for_log("lease.lost")
    found = wait_cause(export, "two_attempts_one_effect", wrong=False)
    assert found.explanation.startswith("Attempt 2 counts")

    first.sigkill()
    submit(jobs, "leased", unacknowledged)
    assert second.wait(60) == 137
    wait_cause(unacknowledged, "succeeded_not_acked", wrong=False)
    wait_cause(slow, "worker_lost_not_swept")
    go.touch()
    start_worker(options=QUICK)
    wait_cause(unacknowledged, "succeeded_redelivered", wrong=False)
    wait_cause(slow, "two_attempts_one_effect", wrong=False)
    assert (effects.starts(unacknowledged), effects.count(unacknowledged), effects.count(slow)) == (1, 1, 1)


@on_rabbitmq
@pytest.mark.environment(DEADSURE_RESEND_FIRST_S="0.5", DEADSURE_RESEND_MAX_S="60")
def test_attempts_that_go_wrong_and_what_waits_for_a_person(
    situations: Any, court: Court, engine: Engine, programs: Programs, tmp_path: Path
) -> None:
    import tests.faults.jobs_older  # noqa: PLC0415  reads the environment

    programs.worker(APP, concurrency=4, options=("--without-relay", *QUICK))
    relay = programs.relay()
    go, batch_id = tmp_path / "go", uuid4()

    def begin(how: str, go: Path = go) -> str:
        return str(situations.situation.delay(how=how, go=str(go)).id)

    crashing, failing, uncertain = begin("crash"), begin("fail"), begin("uncertain")
    unknown = tests.faults.jobs_older.versioned.delay(n=1)
    now = tmp_path / "now"
    now.touch()
    hopeless, child = begin("hopeless", now), begin("hopeless", now)
    with engine.begin() as connection:
        connection.execute(text(IN_BATCH), {"batch": batch_id, "job": child})
        connection.execute(text(BATCH), {"batch": batch_id})
    assert "2 attempts ended its worker process" in wait_cause(crashing, "crashes_growing").explanation
    assert "2 attempts in a row failed for one reason" in wait_cause(failing, "failing_repeatedly").explanation
    assert "tests.versioned@" in wait_cause(unknown.id, "parked_unknown_version").explanation
    assert f"{uncertain}:charge" in wait_cause(uncertain, "effect_uncertain").explanation
    found = wait_cause(hopeless, "quarantined")
    assert found.next == f"deadsure quarantine show {hopeless}"
    assert str(batch_id) in wait_cause(child, "quarantined_blocks_batch").explanation
    for job_id in (hopeless, child):
        court.wait_case(job_id, lambda case: not case.has_debt, "has both traces")

    last = tmp_path / "last"
    untraced = begin("hopeless", last)
    wait_cause(untraced, "running", wrong=False)
    relay.sigkill()  # and with it the intake: the message goes into the queue `quarantine` and nobody reads it
    last.touch()
    assert "has not come through" in wait_cause(untraced, "quarantine_trace_missing").explanation
    go.touch()
    for job_id in (crashing, failing):
        wait_cause(job_id, "two_attempts_one_effect" if job_id == crashing else "succeeded", wrong=False)
