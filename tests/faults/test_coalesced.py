"""Many jobs in one delivery: per job nothing changes, whatever happens to the others or to the process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import requests
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from app import outbox
from app.coalesce import groups
from app.settings import settings
from app.stack.ports import free_port
from db.session import connect
from tasks.publisher import Publisher
from tasks.relay import jobs_per_delivery
from tests.faults.conftest import Court
from tests.faults.effects import Effects
from tests.faults.inject import Fault
from tests.faults.points import QUICK
from tests.faults.traces import wait_both_traces
from tests.nodes.marks import on_rabbitmq
from tests.nodes.programs import Programs
from tests.nodes.waiting import wait_for

pytestmark = [pytest.mark.usefixtures("settings"), on_rabbitmq]
APP = "tests.faults.jobs_coalesced"
MANY = 160  # a relay takes them at once: deliveries of twenty
LATER = pytest.mark.environment(DEADSURE_RESEND_FIRST_S="30")  # what is sent again was not sent by its gap


@pytest.fixture
def packed(jobs: Any) -> Any:
    """`tests.faults.jobs_coalesced`, imported when the environment is there."""
    assert jobs
    import tests.faults.jobs_coalesced  # noqa: PLC0415

    return tests.faults.jobs_coalesced


def submit(engine: Engine, task: Any, special: dict[int, dict[str, str]], count: int = MANY) -> list[UUID]:
    """`count` jobs in one transaction, so that they are due together; some behave in a special way."""
    with Session(engine) as session, session.begin():
        found = task.submit_many(session, [{"n": n, **special.get(n, {})} for n in range(count)])
    return [answer.job_id for answer in found]


def deliveries(engine: Engine, job_ids: Sequence[UUID]) -> int:
    """How many deliveries these jobs came by."""
    query = (
        "SELECT count(DISTINCT (worker_id, delivery_tag)) FROM job_events"
        " WHERE event = 'ack_sent' AND job_id = ANY(:ids)"
    )
    with engine.connect() as connection:
        return int(connection.execute(text(query), {"ids": list(job_ids)}).scalar_one())


def wait_acknowledged(engine: Engine, count: int) -> None:
    query = "SELECT count(DISTINCT job_id) FROM job_events WHERE event = 'ack_sent'"

    def acknowledged() -> bool:
        with engine.connect() as connection:
            return int(connection.execute(text(query)).scalar_one()) >= count

    wait_for(acknowledged, 30, f"{count} jobs are acknowledged")


@pytest.mark.parametrize("name", ["packed", "packed_leased"])
def test_a_backlog_travels_together_and_each_job_is_done_once(
    name: str, packed: Any, court: Court, effects: Effects, engine: Engine, start_worker: Any
) -> None:
    job_ids = submit(engine, getattr(packed, name), {})
    start_worker(APP, options=QUICK)
    found = court.wait_succeeded(job_ids)
    wait_acknowledged(engine, MANY)
    assert deliveries(engine, job_ids) <= MANY / 2
    for job_id in job_ids:
        assert (effects.count(job_id), effects.starts(job_id), found[job_id].attempt) == (1, 1, 1)


def test_light_load_is_one_job_for_each_delivery(packed: Any, court: Court, engine: Engine, start_worker: Any) -> None:
    job_ids = submit(engine, packed.packed, {}, count=7)
    start_worker(APP, options=QUICK)
    court.wait_succeeded(job_ids)
    wait_acknowledged(engine, 7)
    assert deliveries(engine, job_ids) == 7


def test_failures_in_the_middle_have_their_own_endings_and_traces(
    packed: Any, court: Court, effects: Effects, engine: Engine, start_worker: Any
) -> None:
    job_ids = submit(engine, packed.packed, {7: {"how": "fail once"}, 12: {"how": "never"}})
    start_worker(APP, options=QUICK)
    found = court.wait_succeeded([job_id for n, job_id in enumerate(job_ids) if n != 12])
    assert (found[job_ids[7]].failures, found[job_ids[7]].attempt) == (1, 2)
    assert wait_both_traces(court, job_ids[12]).cause == "permanent"
    assert [effects.count(job_id) for job_id in job_ids] == [int(n != 12) for n in range(MANY)]
    assert {found[job_id].failures for n, job_id in enumerate(job_ids) if n not in (7, 12)} == {0}


@LATER
@pytest.mark.parametrize("name", ["packed", "packed_leased"])
def test_h08_only_the_job_that_kills_its_workers_is_blamed(
    name: str, packed: Any, court: Court, effects: Effects, engine: Engine, start_worker: Any
) -> None:
    job_ids = submit(engine, getattr(packed, name), {9: {"how": "kill"}, 30: {"how": "kill"}})
    poison = {job_ids[9], job_ids[30]}
    start_worker(APP, options=QUICK)
    found = court.wait_succeeded([job_id for job_id in job_ids if job_id not in poison])
    for job_id in poison:
        case = court.wait_case(job_id, lambda case: case.state == "quarantined", "is quarantined")
        assert case.crashes == 3
        assert effects.starts(job_id) <= 4
        assert effects.count(job_id) == 0
    assert {found[job_id].crashes for job_id in job_ids if job_id not in poison} == {0}
    assert all(effects.count(job_id) == 1 for job_id in job_ids if job_id not in poison)


@LATER
def test_a_slow_job_does_not_hold_up_the_others_of_its_delivery(
    packed: Any, court: Court, effects: Effects, engine: Engine, programs: Programs, tmp_path: Path
) -> None:
    """Those that share its commit do wait for it; here nobody does."""
    go = tmp_path / "go"
    job_ids = submit(engine, packed.packed, {0: {"how": "wait", "path": str(go)}})
    worker = programs.worker("tests.faults.no_chunks_app", concurrency=2, options=QUICK)
    court.wait_succeeded(job_ids[1:])
    assert court.case(job_ids[0]).state == "queued", "its transaction is open"
    inspect = ["inspect", "active", "--json", "--timeout", "20", "--destination", worker.hostname()]
    command = [sys.executable, "-m", "celery", "-A", "tasks", *inspect]
    shown = subprocess.run(command, env=programs.environment, capture_output=True, text=True, check=True)
    (active,) = json.loads(shown.stdout).values()
    assert str(job_ids[0]) in {job["id"] for job in active}
    assert len(active) > 1, "those that came with it too"
    go.touch()
    court.wait_succeeded(job_ids[:1])
    assert [effects.count(job_id) for job_id in job_ids] == [1] * MANY


@LATER
def test_a_time_limit_is_that_of_one_job(
    packed: Any, court: Court, effects: Effects, engine: Engine, start_worker: Any
) -> None:
    job_ids = submit(engine, packed.packed_short, {5: {"how": "hang"}})
    start_worker(APP, options=QUICK)
    found = court.wait_succeeded([job_id for n, job_id in enumerate(job_ids) if n != 5])
    case = court.wait_case(job_ids[5], lambda case: case.state == "quarantined", "is quarantined")
    assert (case.crashes, effects.count(job_ids[5])) == (3, 0)
    assert {found[job_id].crashes for n, job_id in enumerate(job_ids) if n != 5} == {0}


@LATER
def test_a_worker_that_leaves_gives_back_what_it_has_not_started(
    packed: Any, court: Court, effects: Effects, engine: Engine, start_worker: Any, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    job_ids = submit(engine, packed.packed_leased, {n: {"how": "wait", "path": str(go)} for n in range(MANY)}, count=64)
    first = start_worker(APP, concurrency=2, options=QUICK)
    wait_for(lambda: sum(effects.starts(job_id) for job_id in job_ids) >= 2, 30, "both children are at work")
    first.kill("SIGTERM")
    go.touch()
    assert first.wait(60) == 0
    start_worker(APP, options=QUICK)
    found = court.wait_succeeded(job_ids)
    assert {(case.crashes, case.stalls, case.failures) for case in found.values()} == {(0, 0, 0)}
    assert [effects.count(job_id) for job_id in job_ids] == [1] * 64


def test_flower_shows_each_job(packed: Any, court: Court, engine: Engine, programs: Programs) -> None:
    worker = programs.worker(APP)
    port = free_port()
    programs.module(
        ["celery", "-A", "tasks", "flower", "--address=127.0.0.1", f"--port={port}"],
        name="flower",
        environment={"FLOWER_UNAUTHENTICATED_API": "true"},
    )
    worker.wait_for_log("enabled by remote", "Flower asks the worker for its events")
    job_ids = submit(engine, packed.packed, {3: {"how": "never"}}, count=64)
    court.wait_succeeded([job_id for n, job_id in enumerate(job_ids) if n != 3])
    wait_acknowledged(engine, 64)
    assert deliveries(engine, job_ids) < 64

    def states() -> dict[str, str]:
        shown = requests.get(f"http://127.0.0.1:{port}/api/tasks", timeout=10).json()
        return {job_id: task["state"] for job_id, task in shown.items()}

    expected = {str(job_id): "FAILURE" if n == 3 else "SUCCESS" for n, job_id in enumerate(job_ids)}
    wait_for(lambda: states() == expected, 30, "Flower shows each job as it ended")


CHUNK = "app.coalesced.Chunk"
WHOLE = "tests.faults.whole_chunks_app"


@LATER
def test_a_child_killed_at_each_step_of_a_chunk_leaves_one_effect_for_each_job(
    packed: Any, court: Court, effects: Effects, engine: Engine, start_worker: Any, tmp_path: Path
) -> None:
    """Before and after the lock, between two jobs, behind the arrow of a failed one, before and after the commit."""
    steps = [
        "before:app.claim.begin_atomic_all",
        "after:app.claim.begin_atomic_all",
        f"after:{CHUNK}.one",
        "after:app.attempt.record",
        "before:app.finish.succeed_all",
        "after:app.finish.succeed_all",
    ]
    fail = range(0, MANY, 5)
    job_ids = submit(engine, packed.packed, {n: {"how": "fail once"} for n in fail})
    killed = [tmp_path / f"killed-{number}" for number in range(len(steps))]
    faults = [Fault(at, "kill", once_file=str(file)) for at, file in zip(steps, killed, strict=True)]
    start_worker(WHOLE, options=QUICK, faults=faults)
    found = court.wait_succeeded(job_ids)
    assert [file.exists() for file in killed] == [True] * len(steps)
    assert [effects.count(job_id) for job_id in job_ids] == [1] * MANY
    assert {case.crashes for case in found.values()} == {0}
    assert [n for n, job_id in enumerate(job_ids) if found[job_id].failures] == list(fail)


@pytest.mark.environment(DEADSURE_PREFETCH="1", DEADSURE_RESEND_MAX_S="2")
def test_a_chunk_frozen_before_its_commit_writes_nothing_once_its_lease_is_over(
    packed: Any, court: Court, effects: Effects, engine: Engine, start_worker: Any, tmp_path: Path
) -> None:
    job_ids = submit(engine, packed.packed, {})
    there, go = tmp_path / "there", tmp_path / "go"
    frozen = Fault("before:app.finish.succeed_all", "wait_file", announce=str(there), until=str(go))
    first = start_worker(WHOLE, concurrency=1, options=QUICK, faults=[frozen])
    wait_for(there.exists, 60, "a chunk is about to commit")
    first.sigstop()
    start_worker(WHOLE, options=QUICK)
    found = court.wait_succeeded(job_ids)
    go.touch()
    first.sigcont()
    first.wait_for_log("chunk.lost", "the late commit had no session any more")
    wait_acknowledged(engine, MANY)
    assert [effects.count(job_id) for job_id in job_ids] == [1] * MANY
    assert {(case.crashes, case.failures) for case in found.values()} == {(0, 0)}


@LATER
def test_a_worker_killed_in_the_middle_of_a_chunk_loses_nothing(
    packed: Any, court: Court, effects: Effects, engine: Engine, start_worker: Any
) -> None:
    """Its message comes back as redelivered, to another worker, which runs its jobs one by one."""
    job_ids = submit(engine, packed.packed, {})
    kill = Fault(f"after:{CHUNK}.one", "kill", who="main", match=str(job_ids[33]))
    first = start_worker(WHOLE, options=QUICK, faults=[kill])
    assert first.wait(60) == 137
    start_worker(WHOLE, options=QUICK)
    found = court.wait_succeeded(job_ids)
    assert [effects.count(job_id) for job_id in job_ids] == [1] * MANY
    assert {(case.crashes, case.failures) for case in found.values()} <= {(0, 0), (1, 0)}


def test_a_message_with_a_job_that_the_database_has_lost_is_kept(
    packed: Any, court: Court, effects: Effects, engine: Engine, start_worker: Any
) -> None:
    """A restore from an older backup: the relay has sent them, and then one of them never was."""
    job_ids = submit(engine, packed.packed, {})
    publisher = Publisher(settings().need_broker(), ["jobs"], 10)
    publisher.open()
    with closing(connect(settings().need_database())) as session:
        debts = outbox.take(session, "jobs", settings())
        publisher.publish("jobs", groups(debts, jobs_per_delivery))
    publisher.close()
    assert len(debts) == MANY
    with engine.begin() as connection:
        for table in ("job_events", "outbox", "jobs"):
            connection.execute(text(f"DELETE FROM {table} WHERE job_id = :id"), {"id": job_ids[50]})
    start_worker(APP, options=QUICK)
    court.wait_succeeded([job_id for n, job_id in enumerate(job_ids) if n != 50])
    letters = "SELECT count(*) FROM dead_letters WHERE job_id = :id"

    def kept() -> bool:
        with engine.connect() as connection:
            return bool(connection.execute(text(letters), {"id": job_ids[50]}).scalar_one())

    wait_for(kept, 30, "the message of the lost job is kept")
    assert [effects.count(job_id) for job_id in job_ids] == [int(n != 50) for n in range(MANY)]
