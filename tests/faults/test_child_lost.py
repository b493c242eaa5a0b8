"""SIGKILL of one child: its worker goes on, the job runs again, and a committed claim is counted once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from tests.faults.conftest import Court
from tests.faults.effects import Effects
from tests.faults.inject import Fault
from tests.faults.points import QUICK, Kind, identities, kill_child, park, points, wait_parked
from tests.faults.test_worker_killed import assert_one_litter, assert_whole_files, plant, submit
from tests.nodes.marks import on_rabbitmq
from tests.nodes.servers import BrokerNode

pytestmark = pytest.mark.usefixtures("settings")


@pytest.mark.parametrize("kind", ["leased", "atomic", "export", "parent"])
def test_child_killed_at_every_point(
    kind: Kind, broker: BrokerNode, jobs: Any, court: Court, engine: Engine, start_worker: Any, tmp_path: Path
) -> None:
    plant(engine)
    where = points(kind, clean_path=broker.is_rabbitmq)
    struck = identities(where)
    faults = [kill_child(point.at, struck[name], tmp_path) for name, point in where.items()]
    worker = start_worker(faults=faults, options=QUICK)
    pid = worker.pid
    for job_id in struck.values():
        submit(jobs, kind, job_id)
    found = court.wait_succeeded(struck.values())

    assert len(list(tmp_path.glob("killed-*"))) == len(where), "every fault has struck"
    for name, job_id in struck.items():
        counted = int(where[name].counted)
        seen = found[job_id]
        assert (seen.crashes, seen.stalls, seen.failures, seen.attempt) == (counted, 0, 0, 1 + counted), name
    if kind == "export":
        assert_whole_files(engine, tmp_path / "reports", set(struck.values()))
    if kind == "parent":
        assert_one_litter(engine, court, list(struck.values()))
    assert (worker.pid, worker.is_running()) == (pid, True)
    court.wait_succeeded([jobs.leased_effect.delay(n=2).id])


@on_rabbitmq
@pytest.mark.parametrize("moment", ["before", "after"])
def test_main_process_dies_over_its_dead_child(
    moment: str, jobs: Any, court: Court, effects: Effects, start_worker: Any, tmp_path: Path
) -> None:
    """The crash is counted once, by the reaper or by whoever finds the worker gone, and its message comes twice."""
    struck = identities({"leased": None, "atomic": None})
    child = [kill_child("before:tests.faults.effects.record_in", job_id, tmp_path) for job_id in struck.values()]
    main = Fault(f"{moment}:app.sweep.expire_child", "kill", who="main")
    first = start_worker(concurrency=1, faults=[*child, main], options=QUICK)
    submit(jobs, "leased", struck["leased"])
    submit(jobs, "atomic", struck["atomic"])
    assert first.wait(60) == 137
    start_worker(options=QUICK)
    found = court.wait_succeeded(struck.values())
    assert [(found[struck[mode]].crashes, effects.count(struck[mode])) for mode in struck] == [(1, 1), (0, 1)]


@on_rabbitmq
@pytest.mark.environment(DEADSURE_RESEND_FIRST_S="30")  # the same copy comes again, not another one
def test_only_the_first_crash_of_an_atomic_job_goes_uncounted(
    jobs: Any, court: Court, effects: Effects, start_worker: Any, tmp_path: Path
) -> None:
    """What comes back as redelivered commits its claim first, so a job that kills its process cannot do so for ever."""
    struck = identities({"struck": None})["struck"]
    runs = [tmp_path / "first", tmp_path / "second"]
    for run in runs:
        run.mkdir()
    start_worker(
        faults=[kill_child("before:tests.faults.effects.record_in", struck, run) for run in runs], options=QUICK
    )
    submit(jobs, "atomic", struck)
    seen = court.wait_succeeded([struck])[struck]
    assert (seen.crashes, seen.attempt, effects.starts(struck), effects.count(struck)) == (1, 2, 3, 1)


@on_rabbitmq
def test_jobs_of_other_children_are_not_blamed(
    jobs: Any, court: Court, effects: Effects, start_worker: Any, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    struck = identities({"struck": None})["struck"]
    worker = start_worker(faults=[park("before:app.finish.succeed", struck, tmp_path)], options=QUICK)
    submit(jobs, "leased", struck)
    beside = jobs.slow.delay(until=str(go))
    wait_parked(tmp_path, struck)
    court.wait_case(beside.id, lambda case: case.state == "running", "runs")
    held = jobs.leased_effect.delay(n=1)
    worker.sigkill_child(effects.rows("start", struck)[0].pid)
    court.wait_case(struck, lambda case: case.crashes == 1, "the crash is counted")
    (tmp_path / f"go-{struck}").touch()
    go.touch()
    found = court.wait_succeeded([struck, beside.id, held.id])
    assert sorted((case.crashes, case.attempt) for case in found.values()) == [(0, 1), (0, 1), (1, 2)]
