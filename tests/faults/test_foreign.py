"""Messages of clients that have only the broker: adopted once, answered by the job that holds the key, or kept."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Engine

from tests.faults.effects import Effects
from tests.faults.outcomes import Outcomes
from tests.faults.points import QUICK
from tests.faults.raw_messages import Raw, body, envelope, our_headers, send, stranger
from tests.nodes.marks import on_rabbitmq
from tests.nodes.servers import BrokerNode
from tests.nodes.waiting import wait_for

pytestmark = pytest.mark.usefixtures("settings")
OPTIONS = (*QUICK, "-I", "tests.faults.jobs_messages")
LETTERS = "SELECT headers->>'id' AS id, job_id, reason FROM dead_letters ORDER BY dead_letter_id"


@pytest.fixture
def outcomes(engine: Engine) -> Outcomes:
    return Outcomes(engine)


@pytest.fixture
def messages(jobs: Any) -> Any:
    """`tests.faults.jobs_messages`, imported when the environment is there."""
    assert jobs
    import tests.faults.jobs_messages  # noqa: PLC0415

    return tests.faults.jobs_messages


@pytest.fixture
def client(broker: BrokerNode) -> Celery:
    """Somebody else's Celery: it has the broker and nothing of ours."""
    return stranger(broker)


def wait_letters(outcomes: Outcomes, ids: list[str]) -> dict[str, Any]:
    """Wait until a dead letter is there for each of these task ids, and for no other."""
    wait_for(lambda: len(outcomes.rows(LETTERS)) >= len(ids), 60, "the dead letters")
    found = outcomes.rows(LETTERS)
    assert sorted(row.id for row in found) == sorted(ids)
    return {row.id: row for row in found}


def test_c12_a_foreign_message_published_three_times_has_one_effect(
    messages: Any, client: Celery, outcomes: Outcomes, effects: Effects, start_worker: Any
) -> None:
    assert messages
    start_worker(options=OPTIONS)
    task_id = str(uuid.uuid4())
    for _ in range(3):
        answer = client.send_task("tests.foreign", kwargs={"n": 7}, task_id=task_id)
    assert messages.foreign.AsyncResult(answer.id).get(timeout=60) == {"n": 7}
    client.send_task("tests.foreign", args=[7], task_id=task_id)
    outcomes.wait_all_succeeded(1)
    acked = "SELECT count(*) FROM job_events WHERE event = 'submit'"
    assert outcomes.value(acked) == 1
    late = client.send_task("tests.foreign", kwargs={"n": 8})
    assert messages.foreign.AsyncResult(late.id).get(timeout=60) == {"n": 8}
    assert (effects.starts(task_id), effects.count(task_id)) == (1, 1)
    outcomes.assert_once(2)
    assert outcomes.rows(LETTERS) == []


@on_rabbitmq
def test_c12_our_own_message_published_three_times_has_one_effect(
    broker: BrokerNode, jobs: Any, outcomes: Outcomes, effects: Effects, start_worker: Any
) -> None:
    start_worker(options=OPTIONS)
    job_ids = [uuid.uuid4() for _ in range(2)]
    for job_id, task in zip(job_ids, (jobs.leased_effect, jobs.atomic), strict=True):
        send(broker, *[Raw(headers=our_headers(task.name, job_id)) for _ in range(3)])
        # They come before the job is there: no such job, so they are kept, and the job runs by its own debt.
        wait_for(lambda: outcomes.rows(LETTERS), 60, "dead letters of jobs that are not there")
        task.apply_async(kwargs={"n": 1}, task_id=str(job_id))
        send(broker, *[Raw(headers=our_headers(task.name, job_id)) for _ in range(3)])
    outcomes.wait_all_succeeded(2)
    send(broker, *[Raw(headers=our_headers(jobs.atomic.name, job_id)) for job_id in job_ids])
    wait_for(lambda: broker.depth("jobs") == 0, 30, "all were taken")
    late = jobs.leased_effect.delay(n=2)
    assert late.get(timeout=60) == {"n": 2}
    assert [effects.count(job_id) for job_id in job_ids] == [1, 1]
    outcomes.assert_once(3)


def test_a_key_is_answered_by_the_job_that_holds_it(
    messages: Any, client: Celery, outcomes: Outcomes, effects: Effects, start_worker: Any
) -> None:
    start_worker(options=OPTIONS)
    holder = messages.foreign_keyed.delay(n=5)
    assert holder.get(timeout=60) == {"n": 5}
    asked = [client.send_task("tests.foreign_keyed", kwargs={"n": 5}).id for _ in range(2)]
    new = client.send_task("tests.foreign_keyed", kwargs={"n": 6}).id
    for task_id in asked:
        assert messages.foreign_keyed.AsyncResult(task_id).get(timeout=60) == {"n": 5}
    assert messages.foreign_keyed.AsyncResult(new).get(timeout=60) == {"n": 6}
    outcomes.wait_all_succeeded(2)
    aliases = outcomes.rows("SELECT alias_id::text, job_id::text FROM job_aliases WHERE alias_id <> :new", new=new)
    assert sorted(map(tuple, aliases)) == sorted((task_id, holder.id) for task_id in asked)
    assert effects.count() == 2


@on_rabbitmq
@pytest.mark.environment(DEADSURE_PARK_GRACE_S="0.5")
def test_what_cannot_be_adopted_becomes_a_dead_letter(
    broker: BrokerNode, messages: Any, client: Celery, outcomes: Outcomes, effects: Effects, start_worker: Any
) -> None:
    assert messages
    start_worker(options=OPTIONS)
    linked = {"callbacks": [{"task": "tests.foreign", "args": []}], "errbacks": None, "chain": None, "chord": None}
    pruned = uuid.uuid4()
    sent = {
        "invalid payload": client.send_task("tests.foreign", kwargs={"n": "many"}).id,
        "too many arguments": client.send_task("tests.foreign", args=[1, 2, 3]).id,
        "given twice": client.send_task("tests.foreign", args=[1], kwargs={"n": 2}).id,
        "not opted in": client.send_task("tests.leased_effect", kwargs={"n": 1}).id,
        "no UUID": client.send_task("tests.foreign", kwargs={"n": 1}, task_id="mine-1").id,
        "a task that nobody knows": client.send_task("tests.unheard_of", kwargs={"n": 1}).id,
        "with a callback": str(uuid.uuid4()),
        "our headers, no such job": str(pruned),
        "our headers, unknown type, no such job": str(uuid.uuid4()),
    }
    send(
        broker,
        Raw(body([], {"n": 1}, linked), envelope(id=sent["with a callback"])),
        Raw(body([], {"n": 1}, None), our_headers("tests.foreign", pruned)),
        Raw(
            body([], {"n": 1}, None),
            our_headers("tests.unheard_of", sent["our headers, unknown type, no such job"], version=7),
        ),
    )
    found = wait_letters(outcomes, list(sent.values()))
    assert all(row.reason for row in found.values())
    assert outcomes.states() == {}
    assert effects.starts() == 0
    assert messages.foreign.delay(n=1).get(timeout=60) == {"n": 1}


@on_rabbitmq
def test_an_adopted_message_keeps_its_times_and_its_priority(
    messages: Any, client: Celery, outcomes: Outcomes, effects: Effects, start_worker: Any
) -> None:
    start_worker(options=OPTIONS)
    later = client.send_task("tests.foreign", kwargs={"n": 1}, countdown=3600, priority=6).id
    never = client.send_task("tests.foreign", kwargs={"n": 2}, expires=datetime.now(UTC) - timedelta(hours=1)).id
    assert messages.foreign.AsyncResult(client.send_task("tests.foreign").id).get(timeout=60) == {"n": 0}
    due = (
        "SELECT state::text, priority, extract(epoch FROM not_before - created_at)::float8"
        " FROM jobs WHERE job_id = :job_id"
    )
    ((state, priority, wait_s),) = wait_for(lambda: outcomes.rows(due, job_id=later), 30, "it is adopted")
    assert (state, priority) == ("queued", 6)
    assert 3500 < wait_s <= 3600
    wait_for(lambda: messages.foreign.AsyncResult(never).state == "REVOKED", 30, "it is not started any more")
    assert effects.starts() == 1
