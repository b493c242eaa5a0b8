"""The harness on the real app: test jobs run, a fault strikes where it was asked to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pytest_celery import CeleryTestSetup

from tests.faults.effects import Effects
from tests.faults.inject import Fault
from tests.nodes.waiting import wait_for

pytestmark = pytest.mark.usefixtures("settings")


@pytest.fixture
def jobs(settings: object) -> Any:
    """`tests.faults.jobs`, imported when the environment is there."""
    assert settings
    import tests.faults.jobs  # noqa: PLC0415

    return tests.faults.jobs


def test_each_test_job_takes_effect_once(
    jobs: Any, celery_setup: CeleryTestSetup, effects: Effects, tmp_path: Path
) -> None:
    assert celery_setup.ready()
    until = tmp_path / "go"
    slow = jobs.slow.delay(until=str(until))
    others = [jobs.atomic.delay(n=1), jobs.leased_effect.delay(n=2), jobs.parent.delay(children=2)]
    wait_for(lambda: effects.count() == 5, 30, "all but the slow job are done")
    assert (effects.starts(slow.id), effects.count(slow.id)) == (1, 0)
    until.touch()
    wait_for(lambda: effects.count(slow.id), 10, "the slow job is done")
    assert [effects.count(job.id) for job in others] == [1, 1, 1]
    assert effects.doubled() == {}


def test_a_fault_kills_the_worker_where_it_was_told_to(
    jobs: Any, start_worker: Any, effects: Effects, tmp_path: Path
) -> None:
    kill = Fault("before:tests.faults.jobs.finish", "kill", who="main", once_file=str(tmp_path / "killed"))
    first = start_worker(faults=[kill])
    job = jobs.leased_effect.delay(n=1)
    assert first.wait(30) == 137
    assert effects.count(job.id) == 0
    start_worker()
    wait_for(lambda: job.state == "SUCCESS", 40, "the job succeeds")
    assert (effects.starts(job.id), effects.count(job.id)) == (2, 1)


def test_a_relay_alone_feeds_workers_without_one(
    jobs: Any, start_worker: Any, start_relay: Any, effects: Effects
) -> None:
    worker = start_worker(options=["--without-relay"])
    relay = start_relay()
    job = jobs.atomic.delay(n=1)
    wait_for(lambda: effects.count(job.id), 30, "the job is done")
    assert relay.terminate() == 0
    assert worker.terminate() == 0
