"""Errors that do not travel, values that are not JSON, forks, and a connection closed under the job's own feet."""

from __future__ import annotations

from typing import Any

import pytest

from app.attempt import RERUNS
from tests.faults.conftest import Court
from tests.faults.effects import Effects
from tests.faults.points import QUICK
from tests.faults.traces import wait_quarantined
from tests.nodes.marks import on_rabbitmq

pytestmark = pytest.mark.usefixtures("settings")
APP = "tests.faults.jobs_deaths"


@on_rabbitmq
def test_c05_errors_that_do_not_travel(
    deadly: Any, jobs: Any, court: Court, effects: Effects, start_worker: Any
) -> None:
    worker = start_worker(APP, options=QUICK)
    pid = worker.pid
    failing = {how: deadly.awkward.delay(how=how).id for how in deadly.AWKWARD}
    found = wait_quarantined(court, failing.values(), "attempts_spent")
    for how, job_id in failing.items():
        assert (how, effects.starts(job_id), effects.count(job_id)) == (how, 2, 0)
    assert {(case.failures, case.crashes, case.attempt) for case in found.values()} == {(2, 0, 2)}
    assert (worker.pid, worker.is_running()) == (pid, True)
    court.wait_succeeded([jobs.leased_effect.delay(n=9).id, jobs.atomic.delay(n=9).id])


@on_rabbitmq
def test_c07_return_value_that_is_not_json(
    deadly: Any, jobs: Any, court: Court, effects: Effects, start_worker: Any
) -> None:
    """The effect stands and is not repeated; null is stored, and the log says so."""
    worker = start_worker(APP, options=QUICK)
    odd = {how: deadly.odd_result.delay(how=how) for how in deadly.ODD}
    found = court.wait_succeeded([result.id for result in odd.values()])
    for how, result in odd.items():
        assert (how, effects.starts(result.id), effects.count(result.id)) == (how, 1, 1)
        assert result.get(timeout=5) is None
    assert {(case.failures, case.crashes, case.attempt) for case in found.values()} == {(0, 0, 1)}
    worker.wait_for_log("result.dropped")
    court.wait_succeeded([jobs.leased_effect.delay(n=9).id])


@on_rabbitmq
@pytest.mark.parametrize("how", ["exits", "writes", "raises", "sys_exit"])
def test_handler_that_forks(how: str, deadly: Any, court: Court, effects: Effects, start_worker: Any) -> None:
    """The fork comes back into the worker's code with sockets that are not its own: it writes nothing and ends."""
    worker = start_worker(APP, concurrency=1, options=QUICK)
    forked = [deadly.forker.delay(how=how) for _ in range(3)]
    found = court.wait_succeeded([result.id for result in forked])
    assert {(case.attempt, case.failures, case.crashes) for case in found.values()} == {(1, 0, 0)}
    assert [effects.count(result.id) for result in forked] == [1, 1, 1]
    assert [result.get(timeout=5) for result in forked] == [{"child": 0}] * 3
    assert worker.is_running()


@on_rabbitmq
def test_handler_that_closes_the_shared_connection(
    deadly: Any, jobs: Any, court: Court, effects: Effects, start_worker: Any
) -> None:
    """Run again as after an outage, but the database answers: soon it counts as a failure, and the failures end."""
    worker = start_worker(APP, options=QUICK)
    closers = [deadly.closer.delay(how="close").id, deadly.atomic_closer.delay(how="close").id]
    found = wait_quarantined(court, closers, "attempts_spent")
    assert {(case.failures, case.crashes, case.stalls) for case in found.values()} == {(2, 0, 0)}
    assert all(2 <= effects.starts(job_id) <= 2 * RERUNS for job_id in closers)
    assert effects.count() == 0
    assert worker.is_running()
    court.wait_succeeded([jobs.leased_effect.delay(n=9).id, jobs.atomic.delay(n=9).id])
