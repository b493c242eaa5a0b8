"""SIGKILL of a whole worker: at every point of an attempt exactly one effect stays, and only what ran is blamed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, text

from app.domain.seed import seed
from tests.faults.conftest import Court
from tests.faults.effects import Effects
from tests.faults.points import QUICK, Kind, identities, none_waits, park, points, wait_parked
from tests.nodes.marks import on_rabbitmq
from tests.nodes.servers import BrokerNode
from tests.nodes.waiting import wait_for

pytestmark = pytest.mark.usefixtures("settings")
MONTH = "2026-10"
BYSTANDERS = 3
CHILDREN = 2
DEFAULT_TIMES = pytest.mark.environment(
    DEADSURE_LEASE_S="30", DEADSURE_LEASE_RENEW_S="5", DEADSURE_RESEND_FIRST_S="30", DEADSURE_POLL_S="1"
)


def submit(jobs: Any, kind: Kind, job_id: UUID) -> None:
    """A job of the kind under a known id."""
    from tasks.reports import export_report  # noqa: PLC0415  reads the environment

    task, kwargs = {
        "leased": (jobs.leased_effect, {"n": 1}),
        "atomic": (jobs.atomic, {"n": 1}),
        "export": (export_report, {"account_id": 1, "month": MONTH}),
        "parent": (jobs.parent, {"children": CHILDREN}),
    }[kind]
    task.apply_async(kwargs=kwargs, task_id=str(job_id))


def plant(engine: Engine) -> None:
    """An account with orders."""
    with engine.begin() as connection:
        seed(connection, 1, 50, months=[MONTH])


def rows(engine: Engine, statement: str, **parameters: Any) -> list[Any]:
    with engine.connect() as connection:
        return list(connection.execute(text(statement), parameters))


@pytest.mark.parametrize("kind", ["leased", "atomic", "export", "parent"])
def test_whole_worker_killed_at_every_point(
    kind: Kind, broker: BrokerNode, jobs: Any, court: Court, engine: Engine, start_worker: Any, tmp_path: Path
) -> None:
    plant(engine)
    where = points(kind, clean_path=broker.is_rabbitmq)
    struck = identities(where)
    held = list(identities({f"bystander {n}": None for n in range(BYSTANDERS)}).values())
    faults = [park(point.at, struck[name], tmp_path) for name, point in where.items()]
    first = start_worker(concurrency=len(where), faults=faults, options=QUICK)
    for job_id in [*struck.values(), *held]:
        submit(jobs, kind, job_id)
    wait_parked(tmp_path, *struck.values())
    wait_for(lambda: all(court.case(job_id).events("published") for job_id in held), 30, "all are published")
    wait_for(lambda: none_waits(broker), 30, "the worker holds the bystanders")

    first.sigkill()
    wait_for(lambda: not first.children(), 10, "its children die with it")
    start_worker(options=QUICK)
    found = court.wait_succeeded([*struck.values(), *held])

    for name, job_id in struck.items():
        counted = int(where[name].counted)
        seen = found[job_id]
        assert (seen.crashes, seen.stalls, seen.failures, seen.attempt) == (counted, 0, 0, 1 + counted), name
    for job_id in held:
        seen = found[job_id]
        assert (seen.crashes, seen.stalls, seen.releases, seen.attempt) == (0, 0, 0, 1), "a bystander is not blamed"
    if kind == "export":
        assert_whole_files(engine, tmp_path / "reports", {*struck.values(), *held})
    if kind == "parent":
        assert_one_litter(engine, court, [*struck.values(), *held])


def assert_whole_files(engine: Engine, reports: Path, job_ids: set[UUID]) -> None:
    """One file for each job, as its record says, and no temporary left behind."""
    assert {path.name for path in reports.iterdir()} == {f"{job_id}.csv" for job_id in job_ids}
    sizes = dict(map(tuple, rows(engine, "SELECT job_id, bytes FROM report_exports")))
    assert sizes == {job_id: (reports / f"{job_id}.csv").stat().st_size for job_id in job_ids}


def assert_one_litter(engine: Engine, court: Court, parents: list[UUID]) -> None:
    """Each parent has its children, each of them once, however often it ran."""
    counted = rows(engine, "SELECT parent_id, count(*) FROM jobs WHERE parent_id IS NOT NULL GROUP BY 1")
    assert dict(map(tuple, counted)) == dict.fromkeys(parents, CHILDREN)
    children = rows(engine, "SELECT job_id FROM jobs WHERE parent_id IS NOT NULL")
    court.wait_succeeded([row[0] for row in children])


@on_rabbitmq
def test_killed_with_its_whole_group(
    jobs: Any, court: Court, effects: Effects, start_worker: Any, tmp_path: Path
) -> None:
    struck = identities({"leased": None, "atomic": None})
    faults = [park("before:app.finish.succeed", job_id, tmp_path) for job_id in struck.values()]
    first = start_worker(faults=faults, options=QUICK)
    submit(jobs, "leased", struck["leased"])
    submit(jobs, "atomic", struck["atomic"])
    wait_parked(tmp_path, *struck.values())
    first.sigkill_group()
    start_worker(options=QUICK)
    found = court.wait_succeeded(struck.values())
    assert [found[job_id].crashes for job_id in struck.values()] == [1, 0]
    assert [effects.starts(job_id) for job_id in struck.values()] == [2, 2]


@DEFAULT_TIMES
def test_recovery_time_on_defaults(
    broker: BrokerNode,
    jobs: Any,
    court: Court,
    effects: Effects,
    start_worker: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    struck = identities({"leased": None, "atomic": None})
    held = identities({"held": None})["held"]
    faults = [park("before:app.finish.succeed", job_id, tmp_path) for job_id in struck.values()]
    first = start_worker(faults=faults, options=QUICK)
    submit(jobs, "leased", struck["leased"])
    submit(jobs, "atomic", struck["atomic"])
    wait_parked(tmp_path, *struck.values())
    submit(jobs, "leased", held)
    wait_for(lambda: court.case(held).events("published") and none_waits(broker), 30, "it holds the third")
    start_worker(options=QUICK)
    killed = time.monotonic()
    first.sigkill()
    took = {}
    for name, job_id in {**struck, "held": held}.items():
        wait_for(lambda job_id=job_id: effects.count(job_id), 90, f"{name} is done", poll_s=0.01)  # type: ignore[misc]
        took[name] = time.monotonic() - killed
    with capsys.disabled():
        figures = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in took.items())
        print(f"\nrecovery on {broker.kind}: {figures}")  # noqa: T201  a figure to read, not a claim
    court.wait_succeeded([*struck.values(), held])
