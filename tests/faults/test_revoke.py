"""Celery's words for stopping and trying again, on real workers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from kombu import Connection

from app.errors import JobCancelled
from tests.faults.conftest import Court
from tests.faults.effects import Effects
from tests.faults.points import QUICK
from tests.faults.test_shutdown import wait_running
from tests.faults.traces import wait_quarantined
from tests.nodes.marks import on_rabbitmq
from tests.nodes.programs import Programs
from tests.nodes.servers import BrokerNode
from tests.nodes.waiting import wait_for

pytestmark = [pytest.mark.usefixtures("settings"), on_rabbitmq]
APP = "tests.faults.jobs_edges"


@pytest.fixture
def edges(jobs: Any) -> Any:
    """`tests.faults.jobs_edges`, imported when the environment is there."""
    assert jobs
    import tests.faults.jobs_edges  # noqa: PLC0415

    return tests.faults.jobs_edges


def test_c26_cancelled_stays_cancelled(
    broker: BrokerNode, jobs: Any, court: Court, effects: Effects, start_worker: Any, start_relay: Any
) -> None:
    """Its message is in the broker already, the worker that heard of the cancel is gone, and it comes once more."""
    relay = start_relay()
    revoked = jobs.leased_effect.delay(n=1)
    court.wait_case(revoked.id, lambda case: case.count("published"), "its message waits")
    revoked.revoke()
    relay.sigkill()
    with Connection(broker.url) as connection:
        channel = connection.default_channel
        message = wait_for(lambda: channel.basic_get("jobs"), 10, "its message")
        for _ in range(2):
            channel.basic_publish(message, exchange="jobs", routing_key="jobs")
    first = start_worker(APP, options=QUICK)
    court.wait_case(revoked.id, lambda case: len(case.events("received")) == 3, "three messages find it cancelled")
    first.terminate(30)
    start_worker(APP, options=QUICK)
    court.wait_succeeded([jobs.leased_effect.delay(n=2).id])
    assert (revoked.state, effects.starts(revoked.id)) == ("REVOKED", 0)
    with pytest.raises(JobCancelled):
        revoked.get(timeout=5)


def test_running_job_is_asked_to_stop(
    edges: Any, jobs: Any, court: Court, effects: Effects, start_worker: Any, tmp_path: Path
) -> None:
    """One stops, one fails and is not tried again, one finishes before it looks; a later cancel changes nothing."""
    go = tmp_path / "go"
    start_worker(APP, concurrency=3, options=QUICK)
    asked = {then: edges.stubborn.delay(until=str(go), then=then) for then in ("stop", "retry", "finish")}
    wait_running(court, effects, [result.id for result in asked.values()])
    for result in asked.values():
        result.revoke(terminate=True)
    court.wait_case(asked["stop"].id, lambda case: case.state == "cancelled", "stops")
    go.touch()
    court.wait_case(asked["retry"].id, lambda case: case.state == "cancelled", "is not tried again")
    court.wait_succeeded([asked["finish"].id])
    asked["finish"].revoke()
    states = {then: result.state for then, result in asked.items()}
    assert states == {"stop": "REVOKED", "retry": "REVOKED", "finish": "SUCCESS"}
    assert {then: effects.count(result.id) for then, result in asked.items()} == {"stop": 0, "retry": 0, "finish": 1}
    assert all(effects.starts(result.id) == 1 for result in asked.values())
    court.wait_succeeded([jobs.leased_effect.delay(n=2).id])


def test_the_control_commands_cancel_too(
    edges: Any, jobs: Any, court: Court, effects: Effects, programs: Programs, tmp_path: Path
) -> None:
    """Celery's own would let each worker discard the message for ever, or shoot the handler."""
    programs.worker(APP, concurrency=2, options=QUICK)
    running = [edges.stubborn.delay(until=str(tmp_path / "never"), then="stop").id for _ in range(2)]
    waiting = jobs.leased_effect.apply_async(kwargs={"n": 1}, countdown=3600).id
    wait_running(court, effects, running)
    for command in (["revoke", running[0], waiting, str(uuid4())], ["terminate", "KILL", running[1]]):
        done = subprocess.run(
            [sys.executable, "-m", "celery", "-A", APP, "control", *command],
            env=programs.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    for job_id in (*running, waiting):
        case = court.wait_case(job_id, lambda case: case.state == "cancelled", "it is cancelled")
        assert case.crashes == 0
    assert effects.count() == 0
    court.wait_succeeded([jobs.leased_effect.delay(n=2).id])


def test_expires_retry_and_autoretry(edges: Any, jobs: Any, court: Court, effects: Effects, start_worker: Any) -> None:
    late = jobs.leased_effect.apply_async(kwargs={"n": 1}, expires=0.2)
    kept = jobs.leased_effect.apply_async(kwargs={"n": 1}, expires=3600)
    retried, auto, other = edges.fails.delay(n=2), edges.auto.delay(n=1), edges.auto.delay(n=-1)
    largest = edges.text_job.delay(text="x" * 65_000)
    start_worker(APP, options=QUICK)
    found = court.wait_succeeded([kept.id, retried.id, auto.id, largest.id])
    court.wait_case(late.id, lambda case: case.state == "cancelled", "it expired")
    assert (late.state, effects.starts(late.id)) == ("REVOKED", 0)
    assert retried.get(timeout=5) == {"tries": 3}
    assert largest.get(timeout=5) == 65_000
    assert (found[UUID(auto.id)].failures, effects.count(auto.id)) == (1, 1)
    wait_quarantined(court, [other.id], "permanent")
    assert effects.starts(other.id) == 1
