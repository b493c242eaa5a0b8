"""The broker restarts, dies, loses its disk, its queue or its exchange (C18 to C20): every job succeeds, once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kombu import Connection
from sqlalchemy import Engine

from tests.conftest import Scale
from tests.faults.effects import Effects
from tests.faults.outcomes import Outcomes, submit_each
from tests.faults.points import QUICK
from tests.nodes.marks import on_own_rabbitmq, on_own_valkey, on_rabbitmq
from tests.nodes.servers import BrokerNode
from tests.nodes.waiting import wait_for

pytestmark = pytest.mark.usefixtures("settings")
GAPS_ARE_LONG = pytest.mark.environment(DEADSURE_RESEND_FIRST_S="60", DEADSURE_EVIDENCE_AGE_S="0.5")


@pytest.fixture
def outcomes(engine: Engine) -> Outcomes:
    return Outcomes(engine)


def under_load(
    broker: BrokerNode,
    engine: Engine,
    jobs: Any,
    outcomes: Outcomes,
    start_worker: Any,
    start_relay: Any,
    outage: Any,
    scale: Scale,
) -> None:
    """Worker and relay at work; the outage strikes in the middle, jobs are submitted before, in and after it."""
    each = scale.published
    worker, relay = start_worker(options=["--without-relay"]), start_relay()
    numbers = (worker.pid, relay.pid)
    submit_each(engine, jobs, each)
    outcomes.wait_effects(each // 5)
    assert outcomes.states()["queued"] > each // 2, "the outage comes in the middle"
    unsent = outcomes.value("SELECT count(*) FROM outbox WHERE sends = 0")
    outage(broker)
    submit_each(engine, jobs, each // 5)
    outcomes.wait_all_succeeded(each * 2 + each // 5 * 2, 90 * scale.patience)
    outcomes.assert_once(each * 2 + each // 5 * 2)
    assert worker.is_running()
    assert relay.is_running()
    assert (worker.pid, relay.pid) == numbers
    assert unsent > 0, "it comes while jobs are being published"
    print(f"broker outage under load: {each * 2 + each // 5 * 2} jobs, {unsent} not yet published when it came")  # noqa: T201  for the reader of `-rP`


def orderly(broker: BrokerNode) -> None:
    broker.stop()
    broker.start()


def kill9(broker: BrokerNode) -> None:
    broker.server.wait_quorum_queue_on_disk("jobs")  # type: ignore[attr-defined]  # or it never gets a leader again
    broker.kill()
    broker.start()


@pytest.mark.soak
@on_own_rabbitmq
@pytest.mark.environment(DEADSURE_WINDOW="50")
@pytest.mark.parametrize("outage", [orderly, kill9], ids=["orderly", "kill9"])
def test_c18_rabbitmq_restarted_while_jobs_are_published(
    broker: BrokerNode,
    engine: Engine,
    jobs: Any,
    outcomes: Outcomes,
    start_worker: Any,
    start_relay: Any,
    outage: Any,
    scale: Scale,
) -> None:
    under_load(broker, engine, jobs, outcomes, start_worker, start_relay, outage, scale)
    assert broker.depth("quarantine") == 0


@pytest.mark.soak
@on_own_valkey
@pytest.mark.environment(DEADSURE_RESEND_FIRST_S="60", DEADSURE_EVIDENCE_AGE_S="0.5", DEADSURE_WINDOW="50")
def test_c18_c20_valkey_killed_without_its_data_while_jobs_are_published(
    broker: BrokerNode, engine: Engine, jobs: Any, outcomes: Outcomes, start_worker: Any, start_relay: Any, scale: Scale
) -> None:
    under_load(broker, engine, jobs, outcomes, start_worker, start_relay, lambda node: node.lose_disk(), scale)


@on_own_valkey
@pytest.mark.environment(VISIBILITY_TIMEOUT_S="1", DEADSURE_EVIDENCE_AGE_S="0.5")
def test_c20_a_job_longer_than_the_visibility_timeout_and_a_restart_without_data(
    broker: BrokerNode, jobs: Any, outcomes: Outcomes, effects: Effects, start_worker: Any, tmp_path: Path
) -> None:
    """Redis/Valkey gives the message out again and again while its job runs: each time somebody owns it already."""
    go = tmp_path / "go"
    start_worker("tests.faults.visible_app", options=QUICK)
    job = jobs.slow.delay(until=str(go)).id
    outcomes.wait_running(1)
    again = "SELECT count(*) FROM job_events WHERE event = 'received' AND reason = 'owned by a live worker'"
    wait_for(lambda: outcomes.value(again) >= 1, 60, "the message was given out again")
    broker.lose_disk()
    late = jobs.leased_effect.delay(n=1).id
    wait_for(lambda: effects.count(late) == 1, 60, "the worker serves the next job")
    go.touch()
    outcomes.wait_all_succeeded(2)
    outcomes.assert_once(2)
    assert effects.starts(job) == 1


@on_own_rabbitmq
@GAPS_ARE_LONG
def test_c18_rabbitmq_loses_its_disk_while_jobs_wait(
    broker: BrokerNode,
    engine: Engine,
    jobs: Any,
    outcomes: Outcomes,
    effects: Effects,
    start_worker: Any,
    start_relay: Any,
    tmp_path: Path,
) -> None:
    until = tmp_path / "go"
    worker, relay = start_worker(options=["--without-relay"]), start_relay()
    busy = [jobs.slow.delay(until=str(until)) for _ in range(2)]
    outcomes.wait_running(2)
    submit_each(engine, jobs, 20)
    wait_for(lambda: len(outcomes.events("published")) == 42, 30, "all were published")
    broker.lose_disk()
    wait_for(lambda: len(outcomes.events("published")) >= 82, 60, "what waited was published again")
    until.touch()
    outcomes.wait_all_succeeded(42)
    outcomes.assert_once(42)
    assert [effects.starts(job.id) for job in busy] == [1, 1]
    assert worker.is_running()
    assert relay.is_running()

    assert worker.terminate() == 0
    submit_each(engine, jobs, 20)
    wait_for(lambda: outcomes.sends() == 40, 30, "all are in the broker, no worker is there")
    wait_for(lambda: broker.depth("jobs") >= 20, 30, "they wait in the queue, some in one message")
    broker.lose_disk()
    start_worker(options=["--without-relay"])
    outcomes.wait_all_succeeded(82)
    outcomes.assert_once(82)
    assert broker.depth("quarantine") == 0


@on_rabbitmq
def test_the_work_queue_is_purged(
    broker: BrokerNode, engine: Engine, jobs: Any, outcomes: Outcomes, start_worker: Any, start_relay: Any
) -> None:
    start_relay()
    submit_each(engine, jobs, 10)
    wait_for(lambda: len(outcomes.events("published")) == 20, 30, "all were published")
    assert broker.purge("jobs") == 20
    start_worker(options=["--without-relay"])
    outcomes.wait_all_succeeded(20)
    outcomes.assert_once(20)


@on_rabbitmq
@GAPS_ARE_LONG
def test_c19_the_work_queue_is_deleted_while_the_relay_runs(
    broker: BrokerNode, jobs: Any, outcomes: Outcomes, start_worker: Any, start_relay: Any
) -> None:
    relay = start_relay()
    lost = jobs.leased_effect.delay(n=1)
    wait_for(lambda: outcomes.events("published", lost.id), 30, "the first was published")
    with Connection(broker.url) as connection:
        connection.default_channel.queue_delete("jobs")
    unroutable = jobs.atomic.delay(n=2)
    reason = "SELECT returned_reason FROM outbox WHERE job_id = :job_id AND returned_at IS NOT NULL"
    seen = wait_for(lambda: outcomes.rows(reason, job_id=unroutable.id), 30, "the row says it came back", poll_s=0.02)
    assert "NO_ROUTE" in seen[0][0]
    assert "routing key 'jobs'" in seen[0][0]
    wait_for(lambda: outcomes.events("returned", unroutable.id), 30, "the journal says it came back")
    wait_for(lambda: outcomes.events("published", unroutable.id), 30, "it was published again")
    assert {event.copy for event in outcomes.events("returned", unroutable.id)} == {1}
    assert {event.copy for event in outcomes.events("published", unroutable.id)} == {2}, "what came back is not kept"
    wait_for(lambda: len(outcomes.events("published", lost.id)) > 1, 30, "so was what the queue had held")
    start_worker(options=["--without-relay"])
    outcomes.wait_all_succeeded(2)
    outcomes.assert_once(2)
    assert relay.is_running()


@on_rabbitmq
@GAPS_ARE_LONG
def test_c19_the_exchange_is_deleted_while_the_relay_runs(
    broker: BrokerNode, engine: Engine, jobs: Any, outcomes: Outcomes, start_worker: Any
) -> None:
    worker = start_worker()
    submit_each(engine, jobs, 2)
    outcomes.wait_all_succeeded(4)
    with Connection(broker.url) as connection:
        connection.default_channel.exchange_delete("jobs")
    submit_each(engine, jobs, 5)
    outcomes.wait_all_succeeded(14)
    outcomes.assert_once(14)
    assert worker.is_running()
