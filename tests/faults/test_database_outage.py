"""PostgreSQL restarts, dies, is away at the claim, or loses its answer to COMMIT: held, never blamed, done once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text

from tests.faults.effects import Effects
from tests.faults.inject import Fault
from tests.faults.outcomes import Outcomes, submit_each
from tests.nodes.marks import on_own_postgres, on_rabbitmq
from tests.nodes.proxy import Proxy
from tests.nodes.servers import BrokerNode, ServerNode
from tests.nodes.waiting import stays_true, wait_for

pytestmark = pytest.mark.usefixtures("settings")
EACH = 100  # jobs of each mode
LONG_JOBS = 20
# A statement of an attempt that waits for a lock; its session is the one that runs the attempt.
BLOCKED = """
SELECT pid FROM pg_stat_activity
 WHERE datname = current_database() AND application_name LIKE 'deadsure job %' AND wait_event_type = 'Lock'
"""


@pytest.fixture
def outcomes(engine: Engine) -> Outcomes:
    return Outcomes(engine)


def fast(postgres: ServerNode) -> None:
    postgres.server.restart()


def kill9(postgres: ServerNode) -> None:
    """The postmaster alone: its backends notice by themselves."""
    assert postgres.server.pid
    os.kill(postgres.server.pid, signal.SIGKILL)
    wait_for(lambda: not postgres.server.running, 10, "the postmaster is dead")
    postgres.server.start()


@on_own_postgres
@on_rabbitmq
@pytest.mark.parametrize("outage", [fast, kill9])
def test_postgres_restarted_under_load(
    postgres: ServerNode,
    broker: BrokerNode,
    engine: Engine,
    jobs: Any,
    outcomes: Outcomes,
    start_worker: Any,
    start_relay: Any,
    outage: Any,
) -> None:
    worker, relay = start_worker(options=["--without-relay"]), start_relay()
    numbers = (worker.pid, relay.pid, sorted(worker.children()))
    submit_each(engine, jobs, EACH)
    outcomes.wait_effects(EACH // 5)
    assert outcomes.states()["queued"] > EACH // 2, "the outage comes in the middle"
    outage(postgres)
    submit_each(engine, jobs, EACH // 5)
    outcomes.wait_all_succeeded(EACH * 2 + EACH // 5 * 2)
    outcomes.assert_once(EACH * 2 + EACH // 5 * 2)
    assert (worker.pid, relay.pid, sorted(worker.children())) == numbers
    assert relay.is_running()
    assert broker.depth("quarantine") == 0


@on_own_postgres
@on_rabbitmq
@pytest.mark.environment(DEADSURE_PREFETCH="1")
def test_long_jobs_are_neither_blamed_nor_started_twice(
    postgres: ServerNode,
    broker: BrokerNode,
    jobs: Any,
    outcomes: Outcomes,
    effects: Effects,
    programs: Any,
    tmp_path: Path,
) -> None:
    until = tmp_path / "go"
    workers = programs.workers(2, concurrency=LONG_JOBS // 2)
    for _ in range(LONG_JOBS):
        jobs.slow.delay(until=str(until))
    outcomes.wait_running(LONG_JOBS)
    fast(postgres)
    # Each worker has a lease again, longer than the old one was: no sweep after this blames the outage.
    renewed = "SELECT count(*) FROM workers WHERE lease_until > clock_timestamp() + interval '3 s' AND lost_at IS NULL"
    wait_for(lambda: outcomes.value(renewed) == 2, 20, "both workers renew their lease")
    kill9(postgres)
    wait_for(lambda: outcomes.value(renewed) == 2, 20, "both workers renew their lease")
    stays_true(lambda: outcomes.states() == {"running": LONG_JOBS}, 2, "all go on")
    until.touch()
    outcomes.wait_all_succeeded(LONG_JOBS)
    outcomes.assert_once(LONG_JOBS)
    assert effects.starts() == LONG_JOBS
    assert outcomes.value("SELECT max(attempt) FROM jobs") == 1
    assert all(worker.is_running() for worker in workers)
    assert broker.depth("quarantine") == 0


@on_own_postgres
@on_rabbitmq
def test_an_outage_longer_than_the_lease_blames_nobody(
    postgres: ServerNode,
    broker: BrokerNode,
    jobs: Any,
    outcomes: Outcomes,
    effects: Effects,
    start_worker: Any,
    start_relay: Any,
    tmp_path: Path,
) -> None:
    until = tmp_path / "go"
    worker = start_worker(options=["--without-relay"])
    relay = start_relay()
    running = [jobs.slow.delay(until=str(until)) for _ in range(2)]
    outcomes.wait_running(2)
    postgres.stop()
    stays_true(lambda: worker.is_running() and relay.is_running(), 5, "the lease of four seconds runs out")
    postgres.start()
    renewed = "SELECT count(*) FROM workers WHERE lease_until > clock_timestamp() + interval '3 s' AND lost_at IS NULL"
    wait_for(lambda: outcomes.value(renewed) == 1, 20, "the worker renews its lease")
    until.touch()
    outcomes.wait_all_succeeded(2)
    outcomes.assert_once(2)
    assert [effects.starts(job.id) for job in running] == [1, 1]
    assert broker.depth("quarantine") == 0


@on_own_postgres
@on_rabbitmq
def test_away_at_the_claim_the_deliveries_are_held(
    postgres: ServerNode,
    broker: BrokerNode,
    engine: Engine,
    jobs: Any,
    outcomes: Outcomes,
    start_worker: Any,
    start_relay: Any,
    tmp_path: Path,
) -> None:
    at_the_claim, go = tmp_path / "at-the-claim", tmp_path / "go"
    hold = Fault("before:app.attempt.win", "wait_file", announce=str(at_the_claim), until=str(go), when=0)
    start_relay()
    submit_each(engine, jobs, 5)
    wait_for(lambda: len(outcomes.events("published")) == 10, 30, "all are in the queue")
    worker = start_worker(faults=[hold], options=["--without-relay"])
    wait_for(at_the_claim.exists, 30, "a child is about to claim")
    postgres.stop()
    go.touch()
    worker.wait_for_log("database.away")
    stays_true(lambda: broker.depth("quarantine") == 0 and worker.is_running(), 2, "nothing is rejected")
    postgres.start()
    outcomes.wait_all_succeeded(10)
    outcomes.assert_once(10)
    assert outcomes.events("reject_sent") == []
    assert broker.depth("quarantine") == 0


@on_own_postgres
@on_rabbitmq
def test_a_worker_that_starts_without_the_database_waits_for_it(
    postgres: ServerNode, engine: Engine, jobs: Any, outcomes: Outcomes, start_worker: Any
) -> None:
    submit_each(engine, jobs, 2)
    postgres.stop()
    worker = start_worker(ready=False)
    worker.wait_for_log("the worker waits for it")
    postgres.start()
    outcomes.wait_all_succeeded(4)
    outcomes.assert_once(4)


@pytest.fixture
def proxy(database_url: str) -> Iterator[Proxy]:
    """Between the workers and PostgreSQL; the test itself goes past it."""
    with Proxy.before(database_url) as made:
        yield made


@pytest.mark.parametrize("mode", ["leased_effect", "atomic"])
@pytest.mark.parametrize("answer", ["lost", "refused"])
@on_rabbitmq
def test_the_answer_to_the_finishing_commit_is_lost(
    broker: BrokerNode,
    database_url: str,
    jobs: Any,
    outcomes: Outcomes,
    effects: Effects,
    start_worker: Any,
    proxy: Proxy,
    tmp_path: Path,
    mode: str,
    answer: str,
) -> None:
    finishing, go = tmp_path / "finishing", tmp_path / "go"
    hold = Fault("before:app.finish.succeed", "wait_file", announce=str(finishing), until=str(go))
    start_worker(faults=[hold], environment={"DATABASE_URL": proxy.url(database_url)}, concurrency=1)
    job = getattr(jobs, mode).delay(n=1)
    wait_for(finishing.exists, 30, "the handler is done")
    locking = create_engine(database_url)
    with locking.connect() as lock:
        lock.execute(text("LOCK TABLE job_events IN SHARE MODE"))
        go.touch()
        backend = wait_for(lambda: outcomes.rows(BLOCKED), 30, "the finishing statement is at the server")[0][0]
        if answer == "lost":
            proxy.blackhole()
        else:
            lock.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": backend})
        lock.commit()
    locking.dispose()
    if answer == "lost":
        wait_for(lambda: outcomes.states() == {"succeeded": 1}, 10, "the commit is done, its answer on the way")
        proxy.cut()
        proxy.heal()
    outcomes.wait_all_succeeded(1)
    wait_for(lambda: len(outcomes.events("ack_sent", job.id)) >= 1, 30, "the delivery is acknowledged")
    outcomes.assert_once(1)
    assert effects.starts(job.id) == (1 if answer == "lost" else 2)
    assert len(outcomes.events("succeed", job.id)) == 1
    assert outcomes.events("retry", job.id) == []
    assert broker.depth("quarantine") == 0
