"""Redis/Valkey lists hold whatever anybody pushes: what is no message at all is kept, and stops nothing."""

from __future__ import annotations

import base64
import json
import uuid
from pathlib import Path
from typing import Any

import pytest
import redis
from sqlalchemy import Engine

from tests.faults.effects import Effects
from tests.faults.inject import Fault
from tests.faults.outcomes import Outcomes
from tests.faults.points import QUICK
from tests.faults.raw_messages import GOOD, PRIVATE, envelope
from tests.nodes.marks import on_valkey
from tests.nodes.servers import BrokerNode
from tests.nodes.waiting import wait_for

pytestmark = [pytest.mark.usefixtures("settings"), on_valkey]
OPTIONS = (*QUICK, "-I", "tests.faults.jobs_messages")
LETTERS = "SELECT body, reason, source, headers FROM dead_letters ORDER BY dead_letter_id"
QUEUE, QUARANTINE = "jobs", "quarantine"


@pytest.fixture
def outcomes(engine: Engine) -> Outcomes:
    return Outcomes(engine)


def message(**changed: Any) -> dict[str, Any]:
    """A message as kombu writes it into a list; `...` leaves a field out."""
    made = {
        "body": base64.b64encode(GOOD).decode(),
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": envelope(),
        "properties": properties(),
        **changed,
    }
    return {name: value for name, value in made.items() if value is not ...}


def properties(**changed: Any) -> dict[str, Any]:
    """The properties of a message in a list."""
    made = {
        "body_encoding": "base64",
        "delivery_info": {"exchange": "", "routing_key": QUEUE},
        "delivery_tag": str(uuid.uuid4()),
        "priority": 0,
        **changed,
    }
    return {name: value for name, value in made.items() if value is not ...}


def entries() -> dict[str, bytes]:
    """What somebody may push by hand, by name."""
    shapes: dict[str, Any] = {
        "null": None,
        "a number": 5,
        "a text": PRIVATE,
        "a list": [PRIVATE],
        "an empty map": {},
        "protocol 1, without an envelope": {"task": "tests.foreign", "id": "x", "args": [], "kwargs": {}},
        "no properties": message(properties=...),
        "properties in a list": message(properties=[1]),
        "no delivery tag": message(properties=properties(delivery_tag=...)),
        "a table as delivery tag": message(properties=properties(delivery_tag={"a": 1})),
        "no delivery info": message(properties=properties(delivery_info=...)),
        "delivery info is a text": message(properties=properties(delivery_info=PRIVATE)),
        "no exchange": message(properties=properties(delivery_info={"routing_key": QUEUE})),
        "priority is infinite": message(properties=properties(priority=float("inf"))),
        "correlation id is a table": message(properties=properties(correlation_id={"a": 1})),
        "no headers": message(headers=...),
        "headers are null": message(headers=None),
        "headers in a list": message(headers=[1]),
        "headers are a text": message(headers=PRIVATE),
        "body is a list": message(body=[1]),
        "body is no base64": message(body="abc"),
        "body is base64 with something in between": message(body="bnVs!bA=="),
        "body is not ASCII": message(body="n\u00fcll"),
        "unknown body encoding": message(properties=properties(body_encoding="rot13")),
        "body encoding is a number": message(properties=properties(body_encoding=5)),
        "an unknown tag": message(headers={**envelope(), "a": {"__type__": "trap", "__value__": 1}}),
        "a tag that cannot be read": message(headers={**envelope(), "a": {"__type__": "uuid", "__value__": 1}}),
    }
    return {
        "garbage": b"\x00\xff\xfe\x80 " + PRIVATE.encode(),
        "empty": b"",
        "broken JSON": b'{"body": "' + PRIVATE.encode(),
        "nested 100,000 deep": b"[" * 100_000,
        "a lone surrogate": b'"\\ud800"',
        **{name: json.dumps(shape).encode() for name, shape in shapes.items()},
    }


def push(broker: BrokerNode, *pushed: bytes, queue: str = QUEUE) -> None:
    """LPUSH by hand."""
    with redis.Redis.from_url(broker.url) as client:
        client.lpush(queue, *pushed)


def bodies(outcomes: Outcomes) -> list[bytes]:
    """The bytes of the dead letters."""
    return [bytes(row.body) for row in outcomes.rows(LETTERS)]


def test_what_is_no_message_is_kept_with_its_bytes_and_stops_nothing(
    broker: BrokerNode, jobs: Any, outcomes: Outcomes, effects: Effects, start_worker: Any
) -> None:
    pushed = entries()
    push(broker, *pushed.values())
    worker = start_worker(options=OPTIONS, concurrency=1)
    pid = worker.pid
    push(broker, b"later " + PRIVATE.encode())
    push(broker, b"in the quarantine " + PRIVATE.encode(), queue=QUARANTINE)
    wanted = [*pushed.values(), b"later " + PRIVATE.encode(), b"in the quarantine " + PRIVATE.encode()]

    def missing() -> list[str]:
        found = bodies(outcomes)
        return [name for name, body in pushed.items() if body not in found]

    try:
        wait_for(lambda: len(bodies(outcomes)) >= len(wanted), 60, "the dead letters")
    except AssertionError:
        raise AssertionError(f"missing: {missing()}, worker alive: {worker.is_running()}") from None
    assert sorted(bodies(outcomes)) == sorted(wanted)
    assert {row.source for row in outcomes.rows(LETTERS)} == {"task layer", "broker"}
    assert not [row.reason for row in outcomes.rows(LETTERS) if not row.reason or PRIVATE in row.reason]
    good = [jobs.leased_effect.delay(n=1), jobs.atomic.delay(n=2)]
    outcomes.wait_all_succeeded(2)
    assert [effects.count(job.id) for job in good] == [1, 1]
    assert (worker.pid, worker.is_running()) == (pid, True)
    assert PRIVATE not in worker.logs()


def test_a_worker_killed_in_the_middle_of_it_leaves_a_copy(
    broker: BrokerNode, jobs: Any, outcomes: Outcomes, start_worker: Any, tmp_path: Path
) -> None:
    """Whoever comes next finds it among what the dead one had not acknowledged."""
    nowhere = properties(delivery_info={"exchange": "nowhere", "routing_key": "nowhere"})
    strange = [b"\xff before its copy", json.dumps(message(properties=nowhere, body="bnVsbA==")).encode()]
    faults = [Fault("before:tasks.intake.publish_copy", "kill", who="group", once_file=str(tmp_path / "1"))]
    again = [Fault("after:tasks.intake.publish_copy", "kill", who="group", once_file=str(tmp_path / "2"))]
    soon = {"VISIBILITY_TIMEOUT_S": "1"}
    for entry, fault in zip(strange, (faults, again), strict=True):
        push(broker, entry)
        dying = start_worker("tests.faults.visible_app", options=OPTIONS, faults=fault, environment=soon, ready=False)
        assert dying.wait(60) == 137
    start_worker("tests.faults.visible_app", options=OPTIONS, environment=soon)
    wait_for(lambda: set(bodies(outcomes)) == {strange[0], b"null"}, 60, "both are kept")
    assert jobs.leased_effect.delay(n=1).get(timeout=60) == {"n": 1}


def test_a_message_on_the_control_channel_that_is_none_is_dropped(
    broker: BrokerNode, jobs: Any, start_worker: Any
) -> None:
    worker = start_worker(options=OPTIONS, concurrency=1)
    with redis.Redis.from_url(broker.url) as client:
        number = client.connection_pool.connection_kwargs["db"]
        channel = f"/{number}.celery.pidbox"
        for entry in entries().values():
            assert client.publish(channel, entry) == 1
    assert jobs.leased_effect.delay(n=1).get(timeout=60) == {"n": 1}
    assert worker.is_running()
