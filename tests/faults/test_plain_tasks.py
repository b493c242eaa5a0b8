"""Celery stays Celery: plain tasks beside durable ones, retries, the quarantine queue, `inspect`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from app.errors import JobQuarantined
from tests.faults.conftest import Court
from tests.faults.effects import Effects
from tests.faults.outcomes import Outcomes
from tests.faults.traces import wait_both_traces
from tests.nodes.marks import on_rabbitmq
from tests.nodes.node import WorkerNode
from tests.nodes.programs import Programs
from tests.nodes.servers import BrokerNode
from tests.nodes.waiting import wait_for

pytestmark = pytest.mark.usefixtures("settings")
APP = "tests.faults.plain_jobs"
SEND = """
import sys
from tests.faults.plain_jobs import {name}
for task_id in sys.argv[1].split(","):
    {name}.apply_async(sys.argv[2:], task_id=task_id)
"""


@pytest.fixture
def outcomes(engine: Engine) -> Outcomes:
    return Outcomes(engine)


@pytest.fixture
def plain_jobs(jobs: Any) -> Any:
    """`tests.faults.plain_jobs`, imported when the environment is there."""
    assert jobs
    import tests.faults.plain_jobs  # noqa: PLC0415

    return tests.faults.plain_jobs


@pytest.fixture
def send(start_producer: Any) -> Callable[..., list[str]]:
    """Sends plain tasks from a client of its own, as any Celery client would; returns their ids."""

    def sent(name: str, *arguments: str, count: int = 1) -> list[str]:
        ids = [str(uuid.uuid4()) for _ in range(count)]
        assert start_producer(SEND.format(name=name), ",".join(ids), *arguments).wait(30) == 0
        return ids

    return sent


def celery(programs: Programs, *arguments: str) -> Any:
    """What `celery -A tasks …  --json` answers."""
    command = [sys.executable, "-m", "celery", "-A", "tasks", *arguments, "--json", "--timeout", "20"]
    done = subprocess.run(command, env=programs.environment, capture_output=True, text=True, check=False)
    return json.loads(done.stdout) if done.returncode == 0 else None


def test_plain_and_durable_tasks_share_a_worker(
    jobs: Any, outcomes: Outcomes, effects: Effects, start_worker: Any, send: Callable[..., list[str]]
) -> None:
    start_worker(APP)
    durable = [jobs.leased_effect.delay(n=1).id, jobs.atomic.delay(n=2).id]
    plain = send("plain", count=5)
    outcomes.wait_effects(7)
    assert [effects.count(task_id) for task_id in (*plain, *durable)] == [1] * 7
    assert outcomes.states() == {"succeeded": 2}
    assert {str(row.job_id) for row in outcomes.rows("SELECT job_id FROM job_events")} == set(durable)


@on_rabbitmq
def test_a_plain_task_is_acknowledged_late(
    broker: BrokerNode,
    outcomes: Outcomes,
    effects: Effects,
    start_worker: Any,
    send: Callable[..., list[str]],
    tmp_path: Path,
) -> None:
    until = tmp_path / "go"
    first: WorkerNode = start_worker(APP)
    (task,) = send("plain", str(until))
    wait_for(lambda: effects.starts(task) == 1, 30, "it runs")
    first.sigkill_group()
    assert first.exit_code() == 128 + signal.SIGKILL
    start_worker(APP)
    wait_for(lambda: effects.starts(task) == 2, 30, "it runs again")
    until.touch()
    wait_for(lambda: effects.count(task) == 1, 30, "it is done")
    (failed,) = send("broken")
    (letter,) = wait_for(lambda: dead_letters(outcomes), 30, "one that fails is kept, not acknowledged away")
    assert (letter.headers["id"], letter.headers["task"]) == (failed, "tests.broken")
    assert (letter.job_id, letter.episode, letter.reason) == (None, None, "foreign message")
    assert bytes(letter.body).startswith(b"[[")
    wait_for(lambda: broker.depth("quarantine") == 0, 30, "the intake has emptied the queue")


def dead_letters(outcomes: Outcomes) -> list[Any]:
    """What came through the dead-letter exchange and was stored."""
    return outcomes.rows("SELECT job_id, episode, copy, headers, body, reason, source FROM dead_letters")


@on_rabbitmq
def test_a_failing_job_is_retried_and_succeeds_once(
    broker: BrokerNode, plain_jobs: Any, outcomes: Outcomes, effects: Effects, start_worker: Any
) -> None:
    start_worker(APP)
    job = plain_jobs.failing.delay(n=1)
    assert job.get(timeout=60) is None
    assert (effects.starts(job.id), effects.count(job.id)) == (2, 1)
    assert outcomes.rows("SELECT state::text, failures, attempt FROM jobs") == [("succeeded", 1, 2)]
    assert broker.depth("quarantine") == 0
    assert dead_letters(outcomes) == []


@on_rabbitmq
def test_a_job_that_fails_too_often_is_quarantined_with_both_traces(
    broker: BrokerNode, plain_jobs: Any, outcomes: Outcomes, effects: Effects, court: Court, start_worker: Any
) -> None:
    start_worker(APP)
    job = plain_jobs.failing.delay(n=99)
    delay = "SELECT failures, extract(epoch FROM not_before - changed_at)::float8 FROM jobs WHERE state = 'retry_wait'"
    for failures in (1, 2):
        base_s = plain_jobs.RETRIES.first_s * 2 ** (failures - 1)
        waits = wait_for(lambda: [row for row in outcomes.rows(delay) if row[0] == failures], 30, "it waits")  # noqa: B023
        assert base_s / 2 - 0.01 <= waits[0][1] <= base_s + 0.01
        assert job.state == "RETRY"
    with pytest.raises(JobQuarantined, match="attempts_spent"):
        job.get(timeout=60)
    assert job.state == "FAILURE"
    assert (effects.starts(job.id), effects.count(job.id)) == (3, 0)
    traces = wait_both_traces(court, uuid.UUID(job.id))
    assert (traces.cause, traces.attempt) == ("attempts_spent", 3)
    (letter,) = dead_letters(outcomes)
    assert (str(letter.job_id), letter.episode, letter.copy) == (job.id, 1, 1)
    assert (letter.headers["id"], letter.headers["x-death"][0]["reason"]) == (job.id, "rejected")
    wait_for(lambda: broker.depth("quarantine") == 0, 30, "the intake has emptied the queue")
    claims, retries = outcomes.events("claim", job.id), outcomes.events("retry", job.id)
    pauses_s = [(claims[n + 1].at - retry.at).total_seconds() for n, retry in enumerate(retries)]
    assert [len(claims), len(retries)] == [3, 2]
    assert pauses_s[0] >= 0.5
    assert pauses_s[1] >= 1
    wait_for(lambda: outcomes.events("reject_sent", job.id), 30, "the reject is in the journal")


def test_inspect_shows_a_running_job_under_its_job_id(
    jobs: Any, outcomes: Outcomes, programs: Programs, tmp_path: Path
) -> None:
    worker = programs.worker()
    job = jobs.slow.delay(until=str(tmp_path / "go"))
    outcomes.wait_running(1)
    assert celery(programs, "inspect", "ping", "--destination", worker.hostname()) == {
        worker.hostname(): {"ok": "pong"}
    }
    (active,) = celery(programs, "inspect", "active", "--destination", worker.hostname())[worker.hostname()]
    assert (active["id"], active["name"]) == (job.id, "tests.slow")
    (tmp_path / "go").touch()
    outcomes.wait_all_succeeded(1)


@on_rabbitmq
def test_c21_a_result_store_that_is_down(
    jobs: Any, court: Court, outcomes: Outcomes, effects: Effects, start_worker: Any
) -> None:
    """A finished effect is neither quarantined nor repeated for it, and no slot of the worker is lost."""
    import tests.faults.jobs_messages as messages  # noqa: PLC0415

    worker = start_worker("tests.faults.dead_results_app", concurrency=1)
    good = [jobs.leased_effect.delay(n=1).id, jobs.atomic.delay(n=2).id]
    hopeless = messages.hopeless.delay(n=3).id
    wait_both_traces(court, hopeless)
    after = jobs.leased_effect.delay(n=4).id
    wait_for(lambda: all(effects.count(job_id) == 1 for job_id in (*good, after)), 60, "the worker serves on")
    wait_for(lambda: outcomes.states() == {"succeeded": 3, "quarantined": 1}, 30, "each has its end")
    assert (effects.starts(), effects.count()) == (4, 3)
    assert outcomes.debts() == 0
    assert worker.is_running()
