"""Two workers get the same job at once: one runs it, the other acknowledges and does nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from tests.faults.conftest import Court
from tests.faults.effects import Effects
from tests.faults.inject import Fault
from tests.faults.points import QUICK, identities, let_go, none_waits, park, wait_parked
from tests.faults.test_worker_killed import submit
from tests.nodes.marks import on_rabbitmq
from tests.nodes.servers import BrokerNode
from tests.nodes.waiting import wait_for

pytestmark = pytest.mark.usefixtures("settings")
MODES = {"leased": "tests.leased_effect", "atomic": "tests.atomic"}


def publish(broker: BrokerNode, job_type: str, job_ids: list[UUID], copies: range) -> None:
    """More wake-up calls for jobs than their debts ask for."""
    from app.outbox import Debt  # noqa: PLC0415  these read the environment
    from tasks.publisher import Publisher  # noqa: PLC0415

    publisher = Publisher(broker.url, ["jobs"], 15)
    publisher.open()
    debts = [
        Debt(job_id, "wake", job_type, 1, 0, str(job_id), None, episode=1, copy=copy)
        for copy in copies
        for job_id in job_ids
    ]
    assert len(publisher.publish("jobs", [[debt] for debt in debts]).confirmed) == len(debts)
    publisher.close()


def parked_by(who: str, job_id: UUID, directory: Path) -> list[Fault]:
    """Holds `job_id` before either way through the gate; each worker says so in a file of its own."""
    return [
        Fault(
            f"before:app.claim.{gate}",
            "wait_file",
            match=str(job_id),
            announce=str(directory / f"{who}-{job_id}"),
            until=str(directory / f"go-{job_id}"),
        )
        for gate in ("claim", "begin_atomic")
    ]


def test_both_stand_at_the_gate(
    broker: BrokerNode, jobs: Any, court: Court, effects: Effects, start_worker: Any, tmp_path: Path
) -> None:
    raced = identities(MODES)
    workers = ("one", "two")
    for who in workers:
        faults = [fault for job_id in raced.values() for fault in parked_by(who, job_id, tmp_path)]
        start_worker(concurrency=1, faults=faults, options=QUICK, ready=False, name=who)
    for mode, job_type in MODES.items():
        job_id = raced[mode]
        submit(jobs, mode, job_id)  # type: ignore[arg-type]  # one of Kind
        wait_for(lambda job_id=job_id: list(tmp_path.glob(f"*-{job_id}")), 60, "one is there")  # type: ignore[misc]
        publish(broker, job_type, [job_id], range(2, 6))
        for who in workers:
            wait_for((tmp_path / f"{who}-{job_id}").exists, 60, f"{who} is there")
        let_go(tmp_path, job_id)
        court.wait_succeeded([job_id])
        case = court.wait_case(job_id, lambda case: case.count("ack_sent") >= 5, "all copies are acknowledged")
        assert (case.count("claim"), case.attempt, case.crashes) == (1, 1, 0)
        assert effects.starts(job_id) == effects.count(job_id) == 1
        assert {event.reason for event in case.events("received")} > {None}, "the other one was told why"


def test_every_message_comes_many_times(
    broker: BrokerNode, jobs: Any, court: Court, effects: Effects, engine: Engine, programs: Any
) -> None:
    with Session(engine) as session:
        leased = jobs.leased_effect.submit_many(session, [{"n": n} for n in range(30)])
        atomic = jobs.atomic.submit_many(session, [{"n": n} for n in range(30)])
        session.commit()
    for job_type, submitted in (("tests.leased_effect", leased), ("tests.atomic", atomic)):
        publish(broker, job_type, [job.job_id for job in submitted], range(2, 5))
    programs.workers(2, options=QUICK)
    found = court.wait_succeeded([job.job_id for job in [*leased, *atomic]])
    assert {(case.attempt, case.crashes, case.stalls, case.failures) for case in found.values()} == {(1, 0, 0, 0)}
    assert effects.starts() == effects.count() == 60
    wait_for(lambda: none_waits(broker), 30, "no copy is left")
    for job_id in found:
        court.wait_case(job_id, lambda case: case.count("ack_sent") >= 3, "its copies are acknowledged")


@on_rabbitmq
@pytest.mark.environment(DEADSURE_PREFETCH="1")  # the first worker is full, so the copies reach the second
def test_second_copy_comes_in_the_middle_of_the_first(
    broker: BrokerNode, jobs: Any, court: Court, effects: Effects, start_worker: Any, tmp_path: Path
) -> None:
    struck = identities({**MODES, "orphan": None})
    faults = [park("before:tests.faults.effects.record_in", job_id, tmp_path) for job_id in struck.values()]
    first = start_worker(concurrency=3, faults=faults, options=QUICK)
    submit(jobs, "leased", struck["leased"])
    submit(jobs, "atomic", struck["atomic"])
    submit(jobs, "atomic", struck["orphan"])
    wait_parked(tmp_path, *struck.values())
    start_worker(options=QUICK)
    publish(broker, "tests.leased_effect", [struck["leased"]], range(2, 5))
    publish(broker, "tests.atomic", [struck["atomic"], struck["orphan"]], range(2, 5))
    owned, locked = "owned by a live worker", "locked by another transaction"
    for name, reason in {"leased": owned, "atomic": locked, "orphan": locked}.items():
        case = court.wait_case(struck[name], lambda case: case.count("ack_sent") >= 3, "copies are acknowledged")
        assert {event.reason for event in case.events("received") if event.copy != 1} == {reason}
    let_go(tmp_path, struck["leased"], struck["atomic"])
    court.wait_succeeded([struck["leased"], struck["atomic"]])
    assert [effects.starts(struck[mode]) for mode in MODES] == [1, 1]

    first.sigkill()  # the copies of the third were acknowledged away; its debt was not paid by that
    found = court.wait_succeeded([struck["orphan"]])
    assert (effects.starts(struck["orphan"]), effects.count(struck["orphan"])) == (2, 1)
    assert {case.crashes for case in found.values()} == {0}
