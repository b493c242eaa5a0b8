"""Messages that cannot be read: each ends as a dead letter with its bytes, none is executed, none stops a worker."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from app.dead_letters import BODY_LIMIT, ITEMS_LIMIT, TEXT_LIMIT
from tests.faults.effects import Effects
from tests.faults.outcomes import Outcomes
from tests.faults.points import QUICK
from tests.faults.raw_messages import PRIVATE, Raw, broken, envelope, send
from tests.nodes.marks import on_rabbitmq
from tests.nodes.node import WorkerNode
from tests.nodes.servers import BrokerNode
from tests.nodes.waiting import wait_for

pytestmark = pytest.mark.usefixtures("settings")
OPTIONS = (*QUICK, "-I", "tests.faults.jobs_messages,tests.faults.plain_jobs")
LETTERS = (
    "SELECT job_id, headers, properties, body, truncated, reason, source FROM dead_letters ORDER BY dead_letter_id"
)
NAME = "case"  # a header that tells the test's messages apart


@pytest.fixture
def outcomes(engine: Engine) -> Outcomes:
    return Outcomes(engine)


def named(messages: Mapping[str, Raw]) -> list[Raw]:
    """The messages with their names in a header."""
    return [Raw(r.body, {NAME: name, **r.headers}, r.content_type, r.content_encoding) for name, r in messages.items()]


def wait_letters(outcomes: Outcomes, names: set[str]) -> dict[str, Any]:
    """Wait for one dead letter of each name; a failure says which are missing."""
    found: dict[str, Any] = {}

    def complete() -> bool:
        rows = outcomes.rows(LETTERS)
        found.update({row.headers.get(NAME, f"nameless: {row.reason}"): row for row in rows})
        return len(rows) >= len(names)

    try:
        wait_for(complete, 60, "the dead letters")
    except AssertionError:
        raise AssertionError(f"missing: {sorted(names - set(found))}; strange: {sorted(set(found) - names)}") from None
    assert set(found) == names
    assert len(outcomes.rows(LETTERS)) == len(names)
    return found


def wrong_with(letter: Any, sent: Raw, source: str) -> list[str]:
    """What a dead letter lacks of its message, and what its reason gives away."""
    wrong = []
    if bytes(letter.body) != sent.body[:BODY_LIMIT]:
        wrong.append(f"its bytes are {bytes(letter.body)[:60]!r}")
    if letter.truncated != (len(sent.body) > BODY_LIMIT):
        wrong.append("truncated is not true to it")
    kept = letter.headers
    for name, value in sent.headers.items() if len(sent.headers) < ITEMS_LIMIT else ():
        if isinstance(value, str) and "\x00" not in value and not whole_or_cut(kept.get(name), value):
            wrong.append(f"header {name} is {kept.get(name)!r}")
    if not letter.reason or PRIVATE in letter.reason:
        wrong.append(f"its reason is {letter.reason!r}")
    if letter.source != source:
        wrong.append(f"its source is {letter.source!r}")
    nameless = None if source == "broker" else "application/data"  # kombu's name for it, where it publishes the copy
    if letter.properties.get("content_type") != (sent.content_type or nameless):
        wrong.append(f"its content type is {letter.properties.get('content_type')!r}")
    return wrong


def whole_or_cut(kept: Any, sent: str) -> bool:
    """Whether a header is there as it was sent, or marked as cut."""
    return bool(kept == sent or (kept and kept.startswith(f"{sent[:TEXT_LIMIT]}…") and len(sent) > TEXT_LIMIT))


def test_c08_c09_c10_unreadable_messages_right_after_ready_become_dead_letters(
    broker: BrokerNode, jobs: Any, outcomes: Outcomes, effects: Effects, start_worker: Any, tmp_path: Path
) -> None:
    trap = tmp_path / "executed"
    messages = broken(str(trap))
    send(broker, *named(messages))
    worker: WorkerNode = start_worker(options=OPTIONS, concurrency=1)
    pid = worker.pid
    letters = wait_letters(outcomes, set(messages))
    source = "broker" if broker.is_rabbitmq else "task layer"
    wrong = {name: found for name, raw in messages.items() if (found := wrong_with(letters[name], raw, source))}
    assert not wrong, "\n".join(f"{name}: {found}" for name, found in wrong.items())
    good = [jobs.leased_effect.delay(n=1).id, jobs.atomic.delay(n=2).id]
    outcomes.wait_all_succeeded(2)
    assert (effects.starts(), [effects.count(job_id) for job_id in good]) == (2, [1, 1])
    assert not trap.exists()
    assert (worker.pid, worker.is_running()) == (pid, True)
    assert PRIVATE not in worker.logs()
    assert outcomes.debts() == 0
    wait_for(lambda: outcomes.events("ack_sent", good[0]), 30, "the journal still writes")


@on_rabbitmq
def test_c09_unreadable_messages_among_a_thousand_good_jobs_and_three_workers(
    broker: BrokerNode,
    engine: Engine,
    jobs: Any,
    outcomes: Outcomes,
    effects: Effects,
    programs: Any,
    tmp_path: Path,
) -> None:
    first, second, late = (broken(str(tmp_path / "executed")) for _ in range(3))
    rounds = {"1": first, "2": {name: raw for name, raw in second.items() if len(raw.body) < 1000}, "late": late}
    each = {number: {f"{name}/{number}": raw for name, raw in found.items()} for number, found in rounds.items()}
    with Session(engine) as session:
        jobs.atomic.submit_many(session, [{"n": n} for n in range(1000)])
        session.commit()
    send(broker, *named(each["1"]), *named(each["2"]))
    workers = programs.workers(3, options=OPTIONS, concurrency=1)
    pids = [worker.pid for worker in workers]
    send(broker, *named(each["late"]))
    outcomes.wait_all_succeeded(1000)
    wait_letters(outcomes, {name for found in each.values() for name in found})
    outcomes.assert_once(1000)
    assert effects.starts() == 1000
    assert [worker.pid for worker in workers if worker.is_running()] == pids
    assert not (tmp_path / "executed").exists()


def test_c09_values_that_are_odd_but_legal_do_not_harm_a_plain_task(
    broker: BrokerNode, outcomes: Outcomes, effects: Effects, start_worker: Any
) -> None:
    start_worker(options=OPTIONS)
    ids = [str(uuid.uuid4()) for _ in range(4)]
    options = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
    body = json.dumps([[], {}, options]).encode()
    odd: list[dict[str, Any]] = [{}, {"shadow": "x"}, {"expires": None}, {"timelimit": [None, 5]}]
    for task_id, changed in zip(ids, odd, strict=True):
        send(broker, Raw(body, envelope("tests.plain", id=task_id, **changed)))
    wait_for(lambda: all(effects.count(task_id) == 1 for task_id in ids), 60, "they ran")
    assert outcomes.rows(LETTERS) == []
