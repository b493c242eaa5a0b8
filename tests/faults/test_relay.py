"""The relay dies between any two of its steps, runs alone, or twice: every job runs once."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from sqlalchemy import Engine

from tests.faults.effects import Effects
from tests.faults.inject import Fault
from tests.faults.outcomes import Outcomes, submit_each
from tests.nodes.marks import on_rabbitmq
from tests.nodes.servers import BrokerNode
from tests.nodes.waiting import wait_for

pytestmark = pytest.mark.usefixtures("settings")
KILLED = 128 + signal.SIGKILL
EACH = 5
PUBLISH = "tasks.publisher.Publisher.publish"
ANY_BROKER = {
    "after take, before publish": f"before:{PUBLISH}",
    "after the confirms, before the note": f"after:{PUBLISH}",
}
RABBITMQ = {
    "after the first of ten publishes": "after:amqp.channel.Channel.basic_publish",
    "after all publishes, before the first confirm is seen": "before:tasks.publisher.Publisher._settled",
}


@pytest.fixture
def outcomes(engine: Engine) -> Outcomes:
    return Outcomes(engine)


def killed_at(
    moments: dict[str, str],
    engine: Engine,
    jobs: Any,
    outcomes: Outcomes,
    start_worker: Any,
    start_relay: Any,
) -> None:
    """At each moment a relay dies over ten jobs; the next relay pays what it left, and dies too."""
    start_worker(options=["--without-relay"])
    for moment, at in moments.items():
        before = outcomes.states().total()
        relay = start_relay(faults=[Fault(at, "kill")], ready_prompt="relay.ready")
        submit_each(engine, jobs, EACH)
        assert relay.wait(60) == KILLED, moment
        assert outcomes.states().total() == before + 2 * EACH
    start_relay()
    outcomes.wait_all_succeeded(2 * EACH * len(moments))
    outcomes.assert_once(2 * EACH * len(moments))


def test_killed_between_take_publish_and_note(
    engine: Engine, jobs: Any, outcomes: Outcomes, start_worker: Any, start_relay: Any
) -> None:
    killed_at(ANY_BROKER, engine, jobs, outcomes, start_worker, start_relay)


@on_rabbitmq
def test_killed_between_publish_and_confirm(
    broker: BrokerNode, engine: Engine, jobs: Any, outcomes: Outcomes, start_worker: Any, start_relay: Any
) -> None:
    killed_at(RABBITMQ, engine, jobs, outcomes, start_worker, start_relay)
    assert broker.depth("quarantine") == 0


@pytest.mark.environment(DEADSURE_RESEND_FIRST_S="60")
def test_two_relays_publish_each_job_once_and_no_worker_is_needed(
    broker: BrokerNode, engine: Engine, jobs: Any, outcomes: Outcomes, start_worker: Any, start_relay: Any
) -> None:
    relays = [start_relay(), start_relay()]
    for relay in relays:
        relay.wait_for_log("relay.ready", "both are there")
    for _ in range(10):
        submit_each(engine, jobs, 10)
    wait_for(lambda: len(outcomes.events("published")) >= 200, 30, "all were published")
    assert (len(outcomes.events("published")), outcomes.sends()) == (200, 200)
    assert broker.depth("jobs") <= 200
    assert {event.copy for event in outcomes.events("published")} == {1}
    assert len({event.job_id for event in outcomes.events("published")}) == 200
    assert outcomes.states() == {"queued": 200}
    assert [relay.terminate() for relay in relays] == [0, 0]
    start_worker(options=["--without-relay"])
    outcomes.wait_all_succeeded(200)
    outcomes.assert_once(200)


@on_rabbitmq
def test_a_worker_without_relay_does_not_publish(
    jobs: Any, outcomes: Outcomes, effects: Effects, start_worker: Any, start_relay: Any
) -> None:
    worker = start_worker(options=["--without-relay"])
    job = jobs.leased_effect.delay(n=1)
    plain = wait_for(lambda: outcomes.rows("SELECT 1 FROM workers WHERE lease_until > clock_timestamp()"), 30)
    assert plain
    assert outcomes.sends() == 0
    assert effects.starts() == 0
    start_relay()
    outcomes.wait_all_succeeded(1)
    outcomes.assert_once(1)
    assert effects.starts(job.id) == 1
    assert worker.is_running()
