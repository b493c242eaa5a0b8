"""Progress where people look: in Flower while the job runs, and Flower's memory after a restart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests
from sqlalchemy import Engine, text

from app.stack.ports import free_port
from tests.faults.conftest import Court
from tests.faults.points import QUICK
from tests.nodes.marks import on_rabbitmq
from tests.nodes.programs import Programs
from tests.nodes.waiting import wait_for

pytestmark = [on_rabbitmq, pytest.mark.usefixtures("settings")]
LOGIN = ("me", "secret")


@pytest.fixture
def steps(jobs: Any) -> Any:
    """The job of `tests.faults.jobs_progress`."""
    assert jobs
    from tests.faults.jobs_progress import steps  # noqa: PLC0415  reads the environment

    return steps


@pytest.fixture
def flower(programs: Programs, tmp_path: Path) -> Callable[[], tuple[Any, Callable[[str], Any]]]:
    """Starts a Flower as the README says; the node, and what its API tells of a task."""

    def start() -> tuple[Any, Callable[[str], Any]]:
        port = free_port()
        options = ["--address=127.0.0.1", f"--port={port}", f"--basic-auth={':'.join(LOGIN)}"]
        memory = ["--persistent=True", f"--db={tmp_path / 'flower.db'}", "--state-save-interval=200"]
        node = programs.module(["celery", "-A", "tasks", "flower", *options, *memory], name="flower")
        address = f"http://127.0.0.1:{port}/api"

        def up() -> bool:
            try:
                return requests.get(f"{address}/tasks", auth=LOGIN, timeout=10).ok
            except requests.ConnectionError:
                return False

        wait_for(up, 60, "Flower answers")
        assert requests.get(f"{address}/tasks", timeout=10).status_code == 401
        return node, lambda task: requests.get(f"{address}/tasks", auth=LOGIN, timeout=10).json().get(task)

    return start


def test_progress_shows_in_flower_while_the_job_runs_and_history_outlives_flower(
    steps: Any, court: Court, engine: Engine, programs: Programs, flower: Any, tmp_path: Path
) -> None:
    worker = programs.worker(options=(*QUICK, "-I", "tests.faults.jobs_progress"))
    node, shown = flower()
    worker.wait_for_log("enabled by remote", "Flower asks the worker for its events")
    go = tmp_path / "go"
    job = steps.delay(total=2, go=str(go))
    for n in (1, 2):
        seen = wait_for(
            lambda: (task := shown(job.id)) and task["result"] and task["result"].startswith(f"{n} of") and task,  # noqa: B023
            30,
            f"Flower shows step {n}",
        )
        assert (seen["state"], seen["result"]) == ("PROGRESS", f"{n} of 2 ({n * 50} %)")
        assert (seen["name"], seen["worker"]) == ("tests.steps", worker.hostname())
        (tmp_path / f"go-{n}").touch()
    court.wait_succeeded([job.id])
    done = wait_for(lambda: (task := shown(job.id)) and task["state"] == "SUCCESS" and task, 30, "Flower shows the end")
    assert f"job:{job.id} waited " in done["result"]
    with engine.connect() as connection:  # the reports of an attempt cost one write a second, not a thousand a step
        writes = connection.scalar(text("SELECT n_tup_upd FROM pg_stat_user_tables WHERE relname = 'jobs'"))
    assert writes is not None
    assert writes < 100

    failing = steps.delay(total=1, go=str(go), fails=True)
    failed = wait_for(lambda: (task := shown(failing.id)) and task["state"] == "FAILURE" and task, 30, "it has failed")
    assert f"deadsure show {failing.id}" in failed["exception"]
    saved = {file: file.stat().st_mtime_ns for file in tmp_path.glob("flower.db*") if ".tmp" not in file.name}
    wait_for(lambda: all(file.stat().st_mtime_ns > saved[file] for file in saved), 30, "Flower saves what it has seen")
    node.sigkill()
    _, shown = flower()
    assert (shown(job.id)["state"], shown(job.id)["result"]) == ("SUCCESS", done["result"])
