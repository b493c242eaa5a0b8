"""Nothing spins: not with debts that nobody pays, not with a full window, not with nothing to do at all."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from sqlalchemy import Engine, create_engine, make_url, pool, text

from tests.faults.outcomes import Outcomes, submit_each
from tests.nodes.marks import on_rabbitmq
from tests.nodes.waiting import stays_true, wait_for

pytestmark = pytest.mark.usefixtures("settings")
WINDOW_S = 4
POLLS_PER_S = 5  # DEADSURE_POLL_S is 0.2 here
# Two looks of the relay at each poll, one of the sweeper, two renewals, what the test asks itself; and half as much.
STATEMENTS_PER_S = (POLLS_PER_S * 2 + 1 + 2 + 5) * 1.5
FIRST_GAP_S = 0.5


@pytest.fixture
def outcomes(engine: Engine) -> Outcomes:
    return Outcomes(engine)


@pytest.fixture
def statements(engine: Engine, shared_postgres: Any) -> Callable[[], int]:
    """Transactions that the test's database has seen, asked from another database."""
    database = make_url(engine.url).database
    outside = create_engine(shared_postgres.url, poolclass=pool.NullPool)

    def count() -> int:
        with outside.connect() as connection:
            asked = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = :name"
            return int(connection.execute(text(asked), {"name": database}).scalar_one())

    return count


def most_sends(passed_s: float) -> int:
    """Copies of one debt that gaps of 0.5, 1, 2, … seconds allow in so many seconds."""
    return 1 + math.floor(math.log2(passed_s / FIRST_GAP_S + 1))


@on_rabbitmq
@pytest.mark.environment(DEADSURE_RESEND_FIRST_S=str(FIRST_GAP_S))
def test_unpaid_debts_are_sent_again_with_a_growing_gap(
    engine: Engine, jobs: Any, outcomes: Outcomes, statements: Callable[[], int], start_relay: Any
) -> None:
    relay = start_relay(ready_prompt="relay.ready")
    started, before = time.monotonic(), statements()
    submit_each(engine, jobs, 3)
    wait_for(lambda: outcomes.sends() >= 6 * 3, 30, "each job is sent three times", poll_s=0.5)
    stays_true(lambda: outcomes.sends() <= 6 * most_sends(time.monotonic() - started), WINDOW_S, poll_s=0.5)
    wait_for(lambda: len(outcomes.events("published")) == outcomes.sends(), 10, "the journal counts the same")
    passed_s = time.monotonic() - started
    assert outcomes.sends() <= 6 * most_sends(passed_s)
    assert statements() - before < STATEMENTS_PER_S * passed_s
    assert relay.is_running()


@on_rabbitmq
@pytest.mark.environment(DEADSURE_RESEND_FIRST_S="60", DEADSURE_WINDOW="4")
def test_a_full_window_is_waited_for(
    engine: Engine, jobs: Any, outcomes: Outcomes, statements: Callable[[], int], start_relay: Any
) -> None:
    relay = start_relay(ready_prompt="relay.ready")
    submit_each(engine, jobs, 20)
    wait_for(lambda: outcomes.sends() == 4, 30, "the window is full")
    started, before = time.monotonic(), statements()
    used_s = psutil.Process(relay.pid).cpu_times()
    stays_true(lambda: outcomes.sends() == 4, WINDOW_S, "nothing more is sent", poll_s=0.5)
    now_s = psutil.Process(relay.pid).cpu_times()
    passed_s = time.monotonic() - started
    assert statements() - before < STATEMENTS_PER_S * passed_s
    assert now_s.user + now_s.system - used_s.user - used_s.system < 0.2 * passed_s


def test_an_idle_worker_is_idle(outcomes: Outcomes, statements: Callable[[], int], start_worker: Any) -> None:
    worker = start_worker()
    renewed = "SELECT count(*) FROM workers WHERE lease_until > started_at + interval '5 s'"
    wait_for(lambda: outcomes.value(renewed) == 1, 30, "it has settled")
    started, before = time.monotonic(), statements()
    used_s = psutil.Process(worker.pid).cpu_times()
    stays_true(worker.is_running, WINDOW_S, poll_s=0.5)
    now_s = psutil.Process(worker.pid).cpu_times()
    passed_s = time.monotonic() - started
    rate = (statements() - before) / passed_s
    load = (now_s.user + now_s.system - used_s.user - used_s.system) / passed_s
    print(f"idle worker: {rate:.1f} statements/s, {load:.1%} of a processor")  # noqa: T201  for the reader of `-rP`
    assert rate < STATEMENTS_PER_S
    assert load < 0.15
    assert outcomes.rows("SELECT event FROM job_events") == []
