"""When jobs start: at once, never early, by priority, and no more in the broker than the window allows."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from statistics import median
from typing import Any

import pytest
from kombu import Connection
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from tests.faults.outcomes import Outcomes, submit_each
from tests.nodes.marks import on_rabbitmq
from tests.nodes.servers import BrokerNode
from tests.nodes.waiting import stays_true, wait_for

pytestmark = pytest.mark.usefixtures("settings")
STARTED_AFTER_S = """
SELECT extract(epoch FROM min(test_effects.at) - created_at)::float8
  FROM jobs JOIN test_effects USING (job_id) WHERE job_id = :job_id AND kind = 'start' GROUP BY created_at
"""
PUBLISHED = "SELECT priority FROM job_events JOIN jobs USING (job_id) WHERE event = 'published' ORDER BY event_id"


@pytest.fixture
def outcomes(engine: Engine) -> Outcomes:
    return Outcomes(engine)


def headers_of(broker: BrokerNode, count: int) -> list[dict[str, Any]]:
    """Headers of the first `count` messages in `jobs`; they go back."""
    with Connection(broker.url) as connection:
        channel = connection.default_channel
        found = [channel.basic_get("jobs") for _ in range(count)]
        return [message.headers for message in found if message is not None]


@pytest.mark.environment(DEADSURE_POLL_S="5", DEADSURE_RESEND_FIRST_S="60")
def test_a_job_submitted_to_an_idle_system_starts_at_once(jobs: Any, outcomes: Outcomes, start_worker: Any) -> None:
    start_worker()
    jobs.atomic.delay(n=0)
    outcomes.wait_all_succeeded(1)
    waited_s = []
    for count in range(2, 22):
        job = (jobs.atomic if count % 2 else jobs.leased_effect).delay(n=count)
        outcomes.wait_all_succeeded(count)
        waited_s.append(outcomes.value(STARTED_AFTER_S, job_id=job.id))
    print(f"from submit to start: median {median(waited_s) * 1000:.0f} ms, longest {max(waited_s) * 1000:.0f} ms")  # noqa: T201  for the reader of `-rP`
    assert max(waited_s) < 2
    outcomes.assert_once(21)


@on_rabbitmq
@pytest.mark.environment(DEADSURE_WINDOW="20", DEADSURE_RESEND_FIRST_S="60")
def test_no_more_messages_in_the_broker_than_the_window(
    broker: BrokerNode, engine: Engine, jobs: Any, outcomes: Outcomes, start_worker: Any, start_relay: Any
) -> None:
    start_relay()
    submit_each(engine, jobs, 100)
    wait_for(lambda: broker.depth("jobs") >= 20, 30, "the window is full", retry_on=(Exception,))
    stays_true(lambda: outcomes.sends() <= 20 and broker.depth("jobs") <= 20, 1, "the rest waits in the database")
    start_worker(options=["--without-relay"])
    outcomes.wait_all_succeeded(200)
    outcomes.assert_once(200)


@pytest.mark.environment(DEADSURE_RESEND_FIRST_S="60")
def test_a_job_for_later_waits_in_the_database_and_never_starts_early(
    broker: BrokerNode, jobs: Any, outcomes: Outcomes, start_worker: Any, start_relay: Any
) -> None:
    start_relay()
    eta = datetime.now(UTC) + timedelta(seconds=1.5)
    later = [
        jobs.leased_effect.apply_async(kwargs={"n": 1}, countdown=1.5),
        jobs.atomic.apply_async(kwargs={"n": 2}, countdown=1.5),
        jobs.leased_effect.apply_async(kwargs={"n": 3}, eta=eta),
    ]
    wait_for(lambda: len(outcomes.events("published")) == 3, 30, "all were published")
    for job in later:
        due = outcomes.value("SELECT not_before FROM jobs WHERE job_id = :job_id", job_id=job.id)
        assert outcomes.events("published", job.id)[0].at >= due
    if broker.is_rabbitmq:
        assert [header["eta"] for header in headers_of(broker, 3)] == [None, None, None]
    start_worker(options=["--without-relay"])
    outcomes.wait_all_succeeded(3)
    early = "SELECT jobs.job_id FROM jobs JOIN test_effects USING (job_id) WHERE test_effects.at < created_at + '1.4 s'"
    assert outcomes.rows(early) == []
    outcomes.assert_once(3)


@on_rabbitmq
@pytest.mark.environment(DEADSURE_WINDOW="8", DEADSURE_RESEND_FIRST_S="60")
def test_a_high_priority_overtakes_what_waits(
    broker: BrokerNode, engine: Engine, jobs: Any, outcomes: Outcomes, start_worker: Any, start_relay: Any
) -> None:
    start_relay()
    submit_each(engine, jobs, 50)
    wait_for(lambda: broker.depth("jobs") == 8, 30, "the window is full", retry_on=(Exception,))
    jobs.atomic.apply_async(kwargs={"n": 9}, priority=9)
    start_worker(options=["--without-relay"], concurrency=1)
    outcomes.wait_all_succeeded(101)
    outcomes.assert_once(101)
    assert [row.priority for row in outcomes.rows(PUBLISHED)].index(9) == 8, "the first after the full window"


@on_rabbitmq
def test_within_one_batch_a_high_priority_is_published_first(
    broker: BrokerNode, engine: Engine, jobs: Any, outcomes: Outcomes, start_relay: Any
) -> None:
    submit_each(engine, jobs, 20)
    with Session(engine) as session:
        jobs.leased_effect.submit_many(session, [{"n": 9}] * 5, priority=9)
        jobs.leased_effect.submit_many(session, [{"n": 5}] * 5, priority=5)
        session.commit()
    start_relay()
    wait_for(lambda: len(outcomes.events("published")) == 50, 30, "all were published")
    assert [row.priority for row in outcomes.rows(PUBLISHED)] == [9] * 5 + [5] * 5 + [0] * 40
    assert [header["task"] for header in headers_of(broker, 10)] == ["tests.leased_effect"] * 10
