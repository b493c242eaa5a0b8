"""C11: types and versions that only one of two releases knows, while workers of both run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from app.submit import NewJob, alone, prepare
from tasks.headers import VERSION
from tests.faults.effects import Effects
from tests.faults.inject import Fault
from tests.faults.outcomes import Outcomes
from tests.faults.points import QUICK
from tests.faults.raw_messages import stranger
from tests.nodes.marks import on_own_postgres, on_rabbitmq
from tests.nodes.servers import BrokerNode, ServerNode
from tests.nodes.waiting import stays_true, wait_for

pytestmark = [
    pytest.mark.usefixtures("settings"),
    pytest.mark.environment(DEADSURE_RESEND_FIRST_S="0.4", DEADSURE_RESEND_MAX_S="2"),
]
OLDER = (*QUICK, "-I", "tests.faults.jobs_older")
NEWER = (*QUICK, "-I", "tests.faults.jobs_newer")
UNKNOWN = "type or version unknown here"
PARKED = "SELECT count(DISTINCT job_id) FROM job_events WHERE event = 'received' AND reason = :reason"
GRACE_S = 2.0


@pytest.fixture
def outcomes(engine: Engine) -> Outcomes:
    return Outcomes(engine)


@pytest.fixture
def newer(jobs: Any) -> Any:
    """`tests.faults.jobs_newer`, imported when the environment is there."""
    assert jobs
    import tests.faults.jobs_newer  # noqa: PLC0415

    return tests.faults.jobs_newer


def wait_parked(outcomes: Outcomes, count: int) -> None:
    """Wait until so many jobs were seen by a worker that does not know them."""
    wait_for(lambda: outcomes.value(PARKED, reason=UNKNOWN) >= count, 60, f"{count} jobs are parked")


def older_job(name: str) -> NewJob:
    """A job of version 1, as the previous release submits it."""
    from app.job_types import find  # noqa: PLC0415

    job_type = find(name, 1)
    return prepare(job_type, job_type.parse({"n": 1}))


def test_c11_what_only_the_newer_of_two_workers_knows_is_done_by_it(
    engine: Engine, newer: Any, outcomes: Outcomes, effects: Effects, start_worker: Any
) -> None:
    older = start_worker(options=OLDER)
    pid = older.pid
    with Session(engine) as session:
        new = newer.only_newer.submit_many(session, [{"n": n} for n in range(10)])
        second = newer.versioned.submit_many(session, [{"n": n} for n in range(10)])
        session.commit()
    first = alone(older_job("tests.versioned")).job_id
    wait_parked(outcomes, 20)
    wait_for(lambda: effects.count(first) == 1, 60, "the older worker does what it knows")
    assert outcomes.states() == {"succeeded": 1, "queued": 20}
    start_worker(options=NEWER)
    outcomes.wait_all_succeeded(21)
    outcomes.assert_once(21)
    result = newer.versioned.AsyncResult
    assert result(str(first)).get(timeout=1) == {"version": 1, "n": 1}
    assert [result(str(job.job_id)).get(timeout=1)["version"] for job in second] == [2] * 10
    assert {row.attempt for row in outcomes.events("claim", new[0].job_id)} == {1}
    assert outcomes.value("SELECT count(*) FROM dead_letters") == 0
    assert outcomes.value("SELECT count(*) FROM jobs WHERE parked_at IS NOT NULL") == 0
    assert (older.pid, older.is_running()) == (pid, True)


@on_rabbitmq
@on_own_postgres
def test_c11_the_database_down_at_that_moment(
    postgres: ServerNode,
    broker: BrokerNode,
    newer: Any,
    outcomes: Outcomes,
    effects: Effects,
    start_worker: Any,
    tmp_path: Path,
) -> None:
    go = tmp_path / "go"
    held = Fault("before:app.park.park", "wait_file", announce=str(tmp_path / "held"), until=str(go))
    older = start_worker(options=OLDER, faults=[held])
    job = newer.only_newer.delay(n=1)
    wait_for((tmp_path / "held").exists, 60, "the older worker is about to park it")
    postgres.stop()
    go.touch()
    stays_true(older.is_running, 1, "the worker holds the delivery")
    assert broker.depth("quarantine") == 0
    postgres.start()
    wait_for(lambda: outcomes.value(PARKED, reason=UNKNOWN) == 1, 60, "it is parked", retry_on=(DBAPIError,))
    start_worker(options=NEWER)
    outcomes.wait_all_succeeded(1)
    outcomes.assert_once(1)
    assert older.is_running()
    assert effects.count(job.id) == 1
    assert outcomes.value("SELECT count(*) FROM dead_letters") == 0


@pytest.fixture
def client(broker: BrokerNode) -> Celery:
    """Somebody else's Celery: it has the broker and nothing of ours."""
    return stranger(broker)


KEPT = "SELECT count(*) FROM parked_messages"


def test_c11_foreign_messages_that_only_the_newer_worker_can_read(
    client: Celery, newer: Any, outcomes: Outcomes, effects: Effects, start_worker: Any
) -> None:
    """A new type, a version with another payload, a task that is none of ours: the older worker keeps them for it."""
    older = start_worker(options=OLDER)
    sent = [
        client.send_task("tests.foreign_newer", kwargs={"n": 1}).id,
        client.send_task("tests.foreign_newer", kwargs={"n": 2}, task_id=str(uuid4())).id,
        client.send_task("tests.plain_newer", kwargs={"n": 3}).id,
    ]
    understood = client.send_task("tests.foreign_versioned", kwargs={"n": 4}).id
    wait_for(lambda: outcomes.value(KEPT) == 3, 60, "they are kept")
    wait_for(lambda: effects.count(understood) == 1, 60, "the older worker does what it understands")
    start_worker(options=NEWER)
    second = [
        client.send_task("tests.foreign_versioned", kwargs={"n": n}, headers=headers).id
        for _ in range(4)
        for n, headers in (("seven", {}), (7, {VERSION: 2}))
    ]
    outcomes.wait_all_succeeded(11)
    wait_for(lambda: effects.count(sent[2]) == 1, 60, "the plain task ran")
    result = newer.foreign_versioned.AsyncResult
    assert result(understood).get(timeout=1) == {"version": 1, "n": 4}
    assert [result(task_id).get(timeout=1)["version"] for task_id in second] == [2] * 8
    assert [effects.count(task_id) for task_id in sent] == [1, 1, 1]
    assert effects.doubled() == {}
    assert outcomes.value("SELECT count(*) FROM dead_letters") == 0
    assert outcomes.value(KEPT) == 0
    assert older.is_running()


@on_rabbitmq
@pytest.mark.environment(DEADSURE_PARK_GRACE_S=str(GRACE_S))
def test_c11_a_foreign_message_that_nobody_knows_is_a_dead_letter_after_the_grace_period(
    client: Celery, jobs: Any, outcomes: Outcomes, start_worker: Any
) -> None:
    start_worker(options=OLDER)
    task_id = client.send_task("tests.foreign_newer", kwargs={"n": 1}).id
    wait_for(lambda: outcomes.value(KEPT) == 1, 60, "it is kept")
    wait_for(lambda: outcomes.value("SELECT count(*) FROM dead_letters") == 1, 60, "it is given up")
    ((known_as, body, reason, waited_s),) = outcomes.rows(
        "SELECT headers->>'id', body, reason, extract(epoch FROM received_at)::float8"
        " - (SELECT extract(epoch FROM min(started_at))::float8 FROM workers) FROM dead_letters"
    )
    assert (known_as, json.loads(bytes(body))[1]) == (task_id, {"n": 1})
    assert "no live worker" in reason
    assert waited_s >= GRACE_S
    assert outcomes.value(KEPT) == 0
    assert jobs.leased_effect.delay(n=1).get(timeout=60) == {"n": 1}


def assert_unknown_type(outcomes: Outcomes, job_id: str) -> None:
    """Quarantined once as `unknown_type`, with both traces, and blamed for nothing."""
    traced = "SELECT cause, dead_lettered_at FROM quarantine_entries WHERE job_id = :job_id"
    wait_for(lambda: outcomes.rows(traced, job_id=job_id)[0].dead_lettered_at, 60, "the second trace")
    assert [row.cause for row in outcomes.rows(traced, job_id=job_id)] == ["unknown_type"]
    row = outcomes.rows("SELECT state::text, attempt, failures, crashes, stalls, episode FROM jobs")[0]
    assert tuple(row) == ("quarantined", 0, 0, 0, 0, 1)
    letters = "SELECT count(*) FROM dead_letters WHERE job_id = :job_id AND episode = 1"
    assert outcomes.value(letters, job_id=job_id) >= 1
    assert outcomes.debts() == 0


@pytest.mark.environment(DEADSURE_PARK_GRACE_S=str(GRACE_S))
def test_c11_a_type_that_nobody_knows_is_quarantined_only_after_the_grace_period(
    jobs: Any, newer: Any, outcomes: Outcomes, start_worker: Any
) -> None:
    start_worker(options=OLDER)
    job = newer.only_newer.delay(n=1)
    wait_for(lambda: outcomes.states() == {"quarantined": 1}, 60, "it is quarantined")
    assert_unknown_type(outcomes, job.id)
    parked, over = outcomes.events("received", job.id)[0], outcomes.events("quarantine", job.id)[0]
    assert (over.at - parked.at).total_seconds() >= GRACE_S
    assert jobs.leased_effect.delay(n=1).get(timeout=60) == {"n": 1}


@on_rabbitmq
@pytest.mark.environment(DEADSURE_PARK_GRACE_S="0.05")
def test_c11_a_worker_that_dies_between_the_quarantine_of_an_unknown_type_and_its_reject(
    newer: Any, outcomes: Outcomes, start_worker: Any
) -> None:
    first = start_worker(options=OLDER, faults=[Fault("after:app.park.park", "kill", when=2, who="group")])
    job = newer.only_newer.delay(n=1)
    first.wait(60)
    assert outcomes.states() == {"quarantined": 1}
    start_worker(options=OLDER)
    assert_unknown_type(outcomes, job.id)


def test_the_types_that_a_worker_knows_stand_with_its_lease(newer: Any, outcomes: Outcomes, start_worker: Any) -> None:
    assert newer
    start_worker(options=NEWER)
    (knows,) = outcomes.rows("SELECT knows FROM workers WHERE stopped_at IS NULL")[0]
    known = json.loads(knows) if isinstance(knows, str) else knows
    assert {"tests.versioned@1", "tests.versioned@2", "tests.only_newer@1"} <= set(known)
