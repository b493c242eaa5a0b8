"""submit: one job or none, under its own identity, in the right transaction."""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import psycopg2
import pytest
from celery import chain, chord, group
from psycopg2.extensions import cursor as PgCursor
from pydantic import BaseModel, ValidationError
from sqlalchemy import Engine, event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from app import settings as app_settings
from app import submit
from app.errors import IdempotencyConflict, InvalidPayload, PayloadTooLarge, UnsupportedOption
from app.job import current
from app.job_types import JobType
from app.settings import Settings
from app.states import State
from app.submit import NewJob, Submitted
from db.session import autocommit_pool, engine, one, rows
from tests.integration.scene import PLAIN, Background, Number, Scene, kill_sessions
from tests.nodes.proxy import Proxy
from tests.nodes.waiting import wait_for

POOL = "deadsure submit"


class Anything(BaseModel):
    data: Any = None


ANYTHING = JobType(name="scene.anything", payload=Anything)


def keyed(key: str | None, n: int = 0, scope: str = "", job_type: JobType = PLAIN) -> NewJob:
    return submit.prepare(job_type, Number(n=n), idempotency_key=key, scope=scope)


def jobs_in(scene: Scene) -> int:
    return int(scene.ask("SELECT count(*) FROM jobs"))


@pytest.fixture
def business(scene: Scene) -> Engine:
    """The caller's own engine."""
    return engine(scene.url)


@pytest.fixture
def nothing_written(scene: Scene) -> Iterator[None]:
    before = scene.picture()
    yield
    assert scene.picture() == before


# identity


def test_a_key_gives_a_uuid5_of_type_scope_and_key(scene: Scene, jobs: Any) -> None:
    result = jobs.leased_effect.apply_async(kwargs={"n": 1}, idempotency_key="oct", scope="acct-7")
    expected = uuid.uuid5(submit.NAMESPACE, json.dumps(["tests.leased_effect", "acct-7", "oct"]))
    assert uuid.UUID(result.id) == expected
    row = scene.row(expected)
    assert (row["scope"], row["idempotency_key"], row["type"]) == ("acct-7", "oct", "tests.leased_effect")


def test_without_a_key_the_id_is_a_uuid7_and_grows(jobs: Any) -> None:
    ids = [uuid.UUID(jobs.leased_effect.delay(n=1).id) for _ in range(3)]
    assert [job_id.version for job_id in ids] == [7, 7, 7]
    assert ids == sorted(ids)
    assert len(set(ids)) == 3


def test_the_types_own_key_is_the_default(scene: Scene) -> None:
    by_number = JobType(name="scene.by_number", payload=Number, key=lambda payload: f"n{payload.n}")
    first = submit.alone(submit.prepare(by_number, Number(n=1)))
    again = submit.alone(submit.prepare(by_number, Number(n=1)))
    other = submit.alone(submit.prepare(by_number, Number(n=2)))
    given = submit.alone(submit.prepare(by_number, Number(n=1), idempotency_key="mine"))
    assert first.job_id == again.job_id
    assert len({first.job_id, other.job_id, given.job_id}) == 3
    assert jobs_in(scene) == 3


def test_a_task_id_is_the_job_id(scene: Scene, jobs: Any) -> None:
    wanted = str(uuid.uuid4())
    assert jobs.leased_effect.apply_async(kwargs={"n": 1}, task_id=wanted).id == wanted
    assert scene.state(uuid.UUID(wanted)) == "queued"


# what is written


def test_a_new_job_its_debt_and_its_journal(scene: Scene, jobs: Any) -> None:
    job_id = uuid.UUID(jobs.leased_effect.delay(n=5).id)
    row, debt = scene.row(job_id), scene.debt(job_id)
    assert debt is not None
    canonical = b'{"n":5}'
    assert (row["state"], row["payload"], row["attempt"], row["not_before"]) == ("queued", {"n": 5}, 0, None)
    assert bytes(row["payload_digest"]) == hashlib.sha256(canonical).digest()
    assert (row["correlation_id"], row["queue"], row["priority"]) == (str(job_id), "jobs", 0)
    assert (debt["queue"], debt["type"], debt["sends"], debt["sent_at"]) == ("jobs", "tests.leased_effect", 0, None)
    assert debt["due_at"] <= scene.ask("SELECT clock_timestamp()")
    assert scene.journal(job_id) == ["submit"]


def test_the_terms_of_the_type_are_written_on_the_row(scene: Scene) -> None:
    special = JobType(name="scene.special", payload=Number, queue="mail", priority=3, max_crashes=1, expire_early=False)
    row = scene.row(submit.alone(submit.prepare(special, Number())).job_id)
    assert (row["queue"], row["priority"], row["max_crashes"], row["expire_early"]) == ("mail", 3, 1, False)


def test_countdown_counts_from_the_insert(scene: Scene, jobs: Any) -> None:
    job_id = uuid.UUID(jobs.leased_effect.apply_async(kwargs={"n": 1}, countdown=90).id)
    row, debt = scene.row(job_id), scene.debt(job_id)
    assert debt is not None
    assert debt["due_at"] == row["not_before"]
    assert (row["not_before"] - row["created_at"]).total_seconds() == pytest.approx(90, abs=0.5)


def test_eta_is_a_moment_whatever_its_zone(scene: Scene, jobs: Any) -> None:
    eta = datetime(2031, 5, 6, 7, 8, 9, tzinfo=UTC) + timedelta(hours=1)
    job_id = uuid.UUID(jobs.leased_effect.apply_async(kwargs={"n": 1}, eta=eta).id)
    assert scene.row(job_id)["not_before"] == eta
    debt = scene.debt(job_id)
    assert debt is not None
    assert debt["due_at"] == eta


def test_priority_reaches_the_debt(scene: Scene, jobs: Any) -> None:
    job_id = uuid.UUID(jobs.leased_effect.apply_async(kwargs={"n": 1}, priority=9).id)
    debt = scene.debt(job_id)
    assert debt is not None
    assert (scene.row(job_id)["priority"], debt["priority"]) == (9, 9)


def test_positional_arguments_take_the_payloads_order(scene: Scene, jobs: Any) -> None:
    assert scene.row(uuid.UUID(jobs.leased_effect.delay(8).id))["payload"] == {"n": 8}
    with pytest.raises(TypeError, match="given twice"):
        jobs.leased_effect.delay(8, n=9)
    with pytest.raises(TypeError, match="at most 1"):
        jobs.leased_effect.delay(8, 9)
    assert jobs_in(scene) == 1


def test_a_signature_submits_as_the_task_does(scene: Scene, jobs: Any) -> None:
    result = jobs.leased_effect.s(n=4).apply_async(idempotency_key="sig")
    assert scene.row(uuid.UUID(result.id))["idempotency_key"] == "sig"


# the same key again


@pytest.mark.parametrize(
    ("columns", "state"),
    [
        ({}, State.QUEUED),
        ({"state": "succeeded", "result_key": "k", "finished_at": "now"}, State.SUCCEEDED),
        ({"state": "cancelled", "finished_at": "now"}, State.CANCELLED),
        ({"state": "quarantined", "cause": "c", "episode": 1}, State.QUARANTINED),
    ],
    ids=["queued", "succeeded", "cancelled", "quarantined"],
)
def test_the_same_key_and_payload_answer_with_the_job_and_its_state(
    scene: Scene, columns: dict[str, Any], state: State
) -> None:
    first = submit.alone(keyed("a", 1))
    scene.change(first.job_id, **columns)
    before = scene.picture()
    assert submit.alone(keyed("a", 1)) == Submitted(first.job_id, created=False, state=state)
    assert scene.picture() == before


def test_the_order_of_the_fields_is_no_other_payload(scene: Scene) -> None:
    first = submit.alone(submit.prepare(ANYTHING, Anything(data={"a": 1, "b": 2}), idempotency_key="k"))
    again = submit.alone(submit.prepare(ANYTHING, Anything(data={"b": 2, "a": 1}), idempotency_key="k"))
    assert (first.job_id, jobs_in(scene)) == (again.job_id, 1)


def test_the_same_key_with_another_payload_names_the_job(scene: Scene, jobs: Any) -> None:
    first = jobs.leased_effect.apply_async(kwargs={"n": 1}, idempotency_key="oct")
    before = scene.picture()
    with pytest.raises(IdempotencyConflict, match=f"'oct' belongs to job {first.id}") as conflict:
        jobs.leased_effect.apply_async(kwargs={"n": 2}, idempotency_key="oct")
    assert str(conflict.value.job_id) == first.id
    assert "{" not in str(conflict.value)
    assert scene.picture() == before


def test_another_scope_or_type_is_another_job(scene: Scene) -> None:
    other = JobType(name="scene.other", payload=Number)
    made = [keyed("a"), keyed("a", scope="s"), keyed("a", job_type=other), keyed("b")]
    assert len({submit.alone(job).job_id for job in made}) == 4
    assert jobs_in(scene) == 4


def prune(scene: Scene, job_id: uuid.UUID) -> None:
    rows(
        scene.eyes,
        "WITH old AS (DELETE FROM jobs WHERE job_id = %(id)s RETURNING *), debt AS (DELETE FROM outbox"
        " WHERE job_id = %(id)s) INSERT INTO job_tombstones (job_id, type, state, payload_digest)"
        " SELECT job_id, type, 'succeeded', payload_digest FROM old",
        {"id": str(job_id)},
    )


@pytest.mark.parametrize("way", ["alone", "in_session"])
def test_the_key_of_a_pruned_job_stays_taken(scene: Scene, business: Engine, way: str) -> None:
    old = submit.alone(keyed("a", 1))
    prune(scene, old.job_id)

    def again(job: NewJob) -> Submitted:
        if way == "alone":
            return submit.alone(job)
        with Session(business) as session, session.begin():
            return submit.in_session(session, [job])[0]

    assert again(keyed("a", 1)) == Submitted(old.job_id, created=False, state=State.SUCCEEDED)
    with pytest.raises(IdempotencyConflict, match=str(old.job_id)):
        again(keyed("a", 2))
    assert jobs_in(scene) == 0
    assert scene.ask("SELECT count(*) FROM outbox") == 0


# many at once


def test_many_in_one_call(scene: Scene, jobs: Any, business: Engine) -> None:
    with Session(business) as session, session.begin():
        answers = jobs.leased_effect.submit_many(session, [{"n": n} for n in range(2500)], priority=2, scope="s")
    assert len({answer.job_id for answer in answers}) == 2500
    assert all(answer.created for answer in answers)
    for table in ("jobs", "outbox", "job_events"):
        assert scene.ask(f"SELECT count(*) FROM {table}") == 2500
    assert scene.row(answers[1234].job_id)["payload"] == {"n": 1234}


def test_many_with_keys_of_which_some_are_there(scene: Scene, jobs: Any, business: Engine) -> None:
    first = jobs.leased_effect.apply_async(kwargs={"n": 1}, idempotency_key="k1")
    with Session(business) as session, session.begin():
        answers = jobs.leased_effect.submit_many(session, [{"n": n} for n in range(3)], keys=["k0", "k1", "k2"])
    assert [answer.created for answer in answers] == [True, False, True]
    assert str(answers[1].job_id) == first.id
    assert jobs_in(scene) == 3


def test_one_key_twice_in_a_call_is_one_job(scene: Scene, jobs: Any, business: Engine) -> None:
    with Session(business) as session, session.begin():
        answers = jobs.leased_effect.submit_many(session, [{"n": 1}, {"n": 1}], keys=["k", "k"])
    assert answers[0].job_id == answers[1].job_id
    assert jobs_in(scene) == 1


@pytest.mark.parametrize("known_before", [False, True])
def test_one_key_with_two_payloads_in_a_call_is_a_conflict(
    scene: Scene, jobs: Any, business: Engine, known_before: bool
) -> None:
    if known_before:
        jobs.leased_effect.apply_async(kwargs={"n": 1}, idempotency_key="k")
    before = scene.picture()
    with (
        pytest.raises(IdempotencyConflict, match="'k'"),
        Session(business) as session,
        session.begin(),
    ):
        jobs.leased_effect.submit_many(session, [{"n": 0}, {"n": 1}, {"n": 2}], keys=["j", "k", "k"])
    assert scene.picture() == before


@pytest.mark.usefixtures("nothing_written")
def test_an_invalid_payload_among_many_writes_none(jobs: Any, business: Engine) -> None:
    with Session(business) as session, session.begin():
        with pytest.raises(ValidationError):
            jobs.leased_effect.submit_many(session, [{"n": 1}, {"n": "x"}])
        with pytest.raises(ValueError, match="1 keys and 2 scopes for 2 payloads"):
            jobs.leased_effect.submit_many(session, [{"n": 1}, {"n": 2}], keys=["a"])
        with pytest.raises(ValueError, match="2 keys and 1 scopes for 2 payloads"):
            jobs.leased_effect.submit_many(session, [{"n": 1}, {"n": 2}], scopes=["a"])


# nothing is written


@pytest.mark.usefixtures("nothing_written")
def test_an_invalid_payload(jobs: Any) -> None:
    with pytest.raises(ValidationError):
        jobs.leased_effect.delay(n="not a number")


LIMIT = Settings().payload_limit
FRAME = len('{"data":""}')


@pytest.mark.usefixtures("nothing_written")
@pytest.mark.parametrize("data", ["x" * (LIMIT - FRAME + 1), "é" * ((LIMIT - FRAME) // 2 + 1)], ids=["ascii", "utf-8"])
def test_a_payload_of_one_byte_too_much(data: str) -> None:
    with pytest.raises(PayloadTooLarge, match=rf"{LIMIT + 1} bytes of JSON, at most {LIMIT}") as refused:
        submit.alone(submit.prepare(ANYTHING, Anything(data=data)))
    assert len(str(refused.value)) < 200


def test_a_payload_of_just_the_limit(scene: Scene) -> None:
    submit.alone(submit.prepare(ANYTHING, Anything(data="x" * (LIMIT - FRAME))))
    assert jobs_in(scene) == 1


def nested(depth: int) -> Any:
    value: Any = None
    for _ in range(depth):
        value = [value]
    return value


UNSTORABLE = {
    "nul": "a\0b",
    "nul in a key": {"\0": 1},
    "lone surrogate": "\ud83d",
    "lone surrogate in a key": {"\udc00": 1},
    "nan": math.nan,
    "infinity": [math.inf],
    "too deep": nested(100_000),
    "huge number": 10**5000,
}


@pytest.mark.usefixtures("nothing_written")
@pytest.mark.parametrize("what", UNSTORABLE)
def test_a_payload_that_json_cannot_carry(what: str) -> None:
    with pytest.raises(InvalidPayload, match="cannot be stored as JSON"):
        submit.alone(submit.prepare(ANYTHING, Anything(data=UNSTORABLE[what])))


class Measured(BaseModel):
    value: float


@pytest.mark.usefixtures("nothing_written")
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none(value: float) -> None:
    measured = JobType(name="scene.measured", payload=Measured)
    with pytest.raises(InvalidPayload):
        submit.prepare(measured, Measured(value=value))


@pytest.mark.parametrize("data", ["\\u0000", "\\\\u0000", "😀", "\x7f", 10**300, 1e-300, nested(200), {"": ""}])
def test_a_payload_that_only_looks_as_if(scene: Scene, data: Any) -> None:
    answer = submit.alone(submit.prepare(ANYTHING, Anything(data=data)))
    assert scene.row(answer.job_id)["payload"] == {"data": data}


@pytest.mark.usefixtures("nothing_written")
@pytest.mark.parametrize(
    "options",
    [
        {"priority": 10},
        {"priority": -1},
        {"countdown": 1, "eta": datetime(2031, 1, 1, tzinfo=UTC)},
        {"eta": datetime(2031, 1, 1)},  # noqa: DTZ001  that is what is refused
        {"idempotency_key": ""},
        {"idempotency_key": "a\0"},
        {"idempotency_key": "k" * 513},
        {"idempotency_key": "\ud800"},
        {"scope": "a\0"},
        {"scope": "\ud800"},
        {"task_id": "no-uuid"},
    ],
    ids=str,
)
def test_options_that_make_no_sense(jobs: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  UnicodeError among them
        jobs.leased_effect.apply_async(kwargs={"n": 1}, **options)


@pytest.mark.parametrize("options", [{"countdown": math.inf}, {"countdown": math.nan}, {"countdown": 1e300}], ids=str)
def test_a_countdown_without_end(scene: Scene, jobs: Any, options: dict[str, Any]) -> None:
    with pytest.raises((ValueError, psycopg2.DataError)):
        jobs.leased_effect.apply_async(kwargs={"n": 1}, **options)
    assert jobs_in(scene) == 0
    jobs.leased_effect.delay(n=1)
    assert jobs_in(scene) == 1


# expires


def expires_in_s(scene: Scene, job_id: str) -> float:
    """Seconds from the submit to the job's last moment to start."""
    row = scene.row(uuid.UUID(job_id))
    return float((row["expires_at"] - row["created_at"]).total_seconds())


@pytest.mark.parametrize("seconds", [0, 60, 0.5], ids=str)
def test_expires_in_seconds_counts_from_the_submit(scene: Scene, jobs: Any, seconds: float) -> None:
    answer = jobs.leased_effect.apply_async(kwargs={"n": 1}, expires=seconds)
    assert expires_in_s(scene, answer.id) == pytest.approx(seconds, abs=0.5)


def test_expires_at_a_time(scene: Scene, jobs: Any) -> None:
    at = datetime(2041, 1, 1, tzinfo=UTC)
    answer = jobs.leased_effect.apply_async(kwargs={"n": 1}, expires=at)
    assert scene.row(uuid.UUID(answer.id))["expires_at"] == at


def test_without_expires_a_job_never_expires(scene: Scene, jobs: Any) -> None:
    answer = jobs.leased_effect.delay(n=1)
    assert scene.row(uuid.UUID(answer.id))["expires_at"] is None


@pytest.mark.usefixtures("nothing_written")
def test_expires_without_a_time_zone_is_refused(jobs: Any) -> None:
    with pytest.raises(ValueError, match="time zone"):
        jobs.leased_effect.apply_async(kwargs={"n": 1}, expires=datetime(2041, 1, 1))  # noqa: DTZ001  that is refused


@pytest.mark.parametrize("way", ["submit", "submit_many"])
def test_expires_in_the_callers_transaction(scene: Scene, jobs: Any, business: Engine, way: str) -> None:
    with Session(business) as session, session.begin():
        if way == "submit":
            answer = jobs.leased_effect.submit(session, n=1, expires=60)
        else:
            (answer,) = jobs.leased_effect.submit_many(session, [{"n": 1}], expires=60)
    assert expires_in_s(scene, str(answer.job_id)) == pytest.approx(60, abs=0.5)


Refused = Callable[[Any], Any]
REFUSED: dict[str, Refused] = {
    "link": lambda task: task.apply_async(kwargs={"n": 1}, link=task.s()),
    "link_error": lambda task: task.apply_async(kwargs={"n": 1}, link_error=task.s()),
    "queue": lambda task: task.apply_async(kwargs={"n": 1}, queue="jbos"),
    "routing_key": lambda task: task.apply_async(kwargs={"n": 1}, routing_key="jbos"),
    "exchange": lambda task: task.apply_async(kwargs={"n": 1}, exchange="jbos"),
    "headers": lambda task: task.apply_async(kwargs={"n": 1}, headers={"a": 1}),
    "typo": lambda task: task.apply_async(kwargs={"n": 1}, idempotencykey="k"),
    "time_limit": lambda task: task.apply_async(kwargs={"n": 1}, time_limit=3),
    "chain": lambda task: chain(task.si(n=1), task.si(n=2)).apply_async(),
    "chord": lambda task: chord([task.si(n=1), task.si(n=2)], task.si(n=3)).apply_async(),
    "group": lambda task: group(task.si(n=1), task.si(n=2)).apply_async(),
    "called": lambda task: task(n=1),
    "apply": lambda task: task.apply(kwargs={"n": 1}, throw=True),
}


@pytest.mark.usefixtures("nothing_written")
@pytest.mark.parametrize("what", REFUSED)
def test_what_a_durable_task_cannot_honour_is_refused(jobs: Any, what: str) -> None:
    with pytest.raises(UnsupportedOption):
        REFUSED[what](jobs.leased_effect)


@pytest.fixture
def eager(jobs: Any) -> Iterator[None]:
    """Celery's setting that runs tasks in the caller."""
    conf = jobs.leased_effect.app.conf
    conf.task_always_eager = True
    yield
    conf.task_always_eager = False


@pytest.mark.usefixtures("nothing_written", "eager")
@pytest.mark.parametrize("way", ["submit", "submit_many"])
def test_always_eager_is_refused_in_a_session_too(jobs: Any, business: Engine, way: str) -> None:
    submit_one: Callable[[Session], Any] = {
        "submit": lambda session: jobs.leased_effect.submit(session, n=1),
        "submit_many": lambda session: jobs.leased_effect.submit_many(session, [{"n": 1}]),
    }[way]
    with Session(business) as session, pytest.raises(UnsupportedOption, match="always_eager"):
        submit_one(session)


# the caller's transaction


def test_a_rollback_leaves_no_job_no_message_no_journal(scene: Scene, jobs: Any, business: Engine) -> None:
    before = scene.picture()
    with Session(business) as session:
        answer = jobs.leased_effect.submit(session, n=1, idempotency_key="k")
        jobs.leased_effect.submit_many(session, [{"n": 2}, {"n": 3}])
        assert answer.created
        assert scene.picture() == before
        session.rollback()
    assert scene.picture() == before
    with Session(business) as session, session.begin():
        assert jobs.leased_effect.submit(session, n=1, idempotency_key="k").created


def test_what_a_handler_submits_in_a_session_names_its_parent(scene: Scene, jobs: Any, business: Engine) -> None:
    parent: Any = SimpleNamespace(job_id=uuid.uuid4(), correlation_id="order 7", trace_context=None)
    token = current.set(parent)
    try:
        with Session(business) as session, session.begin():
            one_job = jobs.leased_effect.submit(session, n=1)
            (other,) = jobs.leased_effect.submit_many(session, [{"n": 2}])
    finally:
        current.reset(token)
    for answer in (one_job, other):
        row = scene.row(answer.job_id)
        assert (row["parent_id"], row["correlation_id"]) == (str(parent.job_id), "order 7")


def test_a_commit_takes_job_and_business_together(scene: Scene, jobs: Any, business: Engine) -> None:
    with Session(business) as session, session.begin():
        answer = jobs.leased_effect.submit(session, n=1)
        session.execute(
            text("INSERT INTO test_effects (kind, job_id, attempt, pid) VALUES ('effect', :job_id, 0, 0)"),
            {"job_id": answer.job_id},
        )
    same = scene.ask(
        "SELECT count(DISTINCT xid) FROM (SELECT xmin::text AS xid FROM jobs UNION ALL SELECT xmin::text FROM outbox"
        " UNION ALL SELECT xmin::text FROM job_events UNION ALL SELECT xmin::text FROM test_effects) AS written"
    )
    assert same == 1


def test_a_savepoint_takes_its_jobs_along(scene: Scene, jobs: Any, business: Engine) -> None:
    with Session(business) as session, session.begin():
        jobs.leased_effect.submit(session, n=1)
        savepoint = session.begin_nested()
        jobs.leased_effect.submit(session, n=2)
        savepoint.rollback()
        with session.begin_nested():
            jobs.leased_effect.submit(session, n=3)
    assert sorted(row["payload"]["n"] for row in scene.records("SELECT payload FROM jobs")) == [1, 3]


# round trips and commits


class CountingCursor(PgCursor):
    """Each `execute` is one message to the server."""

    sent = 0

    def execute(self, *arguments: Any) -> None:
        type(self).sent += 1
        super().execute(*arguments)


@pytest.fixture
def counted(scene: Scene) -> Iterator[type[CountingCursor]]:
    """Statements of this process' submits, once its connection is there."""
    submit.alone(keyed(None))
    pool = autocommit_pool(scene.url, app_settings.settings().submit_timeout_s)

    def count(connection: Any, *_: object) -> None:
        connection.cursor_factory = CountingCursor

    event.listen(pool, "checkout", count)
    CountingCursor.sent = 0
    yield CountingCursor
    event.remove(pool, "checkout", count)


@pytest.mark.parametrize("key", [None, "k"])
def test_a_new_job_takes_one_round_trip_and_one_commit(
    scene: Scene, counted: type[CountingCursor], jobs: Any, key: str | None
) -> None:
    job_id = jobs.leased_effect.apply_async(kwargs={"n": 1}, idempotency_key=key).id
    assert counted.sent == 1
    xids = {
        scene.ask(f"SELECT xmin::text FROM {table} WHERE job_id = %s", (job_id,))
        for table in ("jobs", "outbox", "job_events")
    }
    assert len(xids) == 1


def test_a_repeat_takes_two(counted: type[CountingCursor]) -> None:
    submit.alone(keyed("k"))
    counted.sent = 0
    submit.alone(keyed("k"))
    assert counted.sent == 2


def test_a_submit_in_a_session_takes_one_statement(jobs: Any, business: Engine) -> None:
    with Session(business) as session, session.begin():
        session.connection()
        seen: list[str] = []
        event.listen(session.connection(), "before_cursor_execute", lambda *call: seen.append(call[2]))
        jobs.leased_effect.submit(session, n=1)
        jobs.leased_effect.submit_many(session, [{"n": n} for n in range(100)])
    assert len(seen) == 2


# NOTIFY


@pytest.fixture
def told(scene: Scene) -> Callable[[], int]:
    """How many times a relay has been woken by now."""
    listener = scene.connect()
    rows(listener, f"LISTEN {submit.CHANNEL}")

    def count() -> int:
        rows(listener, "SELECT 1")  # what was sent before comes with this answer at the latest
        return len(listener.notifies)

    return count


def test_a_submit_wakes_the_relay_after_its_commit(scene: Scene, told: Callable[[], int], jobs: Any) -> None:
    jobs.leased_effect.delay(n=1)
    wait_for(told, 5, "a NOTIFY", poll_s=0.005)
    assert jobs_in(scene) == 1


def test_a_caller_wakes_the_relay_after_its_commit_only(told: Callable[[], int], jobs: Any, business: Engine) -> None:
    with Session(business) as session:
        jobs.leased_effect.submit(session, n=1)
        with session.begin_nested():
            jobs.leased_effect.submit(session, n=2)
        assert told() == 0
        session.commit()
        wait_for(told, 5, "a NOTIFY", poll_s=0.005)


def test_a_caller_that_rolls_back_wakes_nobody(told: Callable[[], int], jobs: Any, business: Engine) -> None:
    with Session(business) as session:
        jobs.leased_effect.submit(session, n=1)
        session.rollback()
        assert told() == 0
        session.execute(text("SELECT 1"))
        session.commit()
        assert told() == 0


def test_the_callers_transaction_holds_no_notify(scene: Scene, jobs: Any, business: Engine) -> None:
    """A NOTIFY inside it would take a lock that all committing transactions of all databases share."""
    with Session(business) as session:
        seen: list[str] = []
        event.listen(session.connection(), "before_cursor_execute", lambda *call: seen.append(call[2]))
        jobs.leased_effect.submit(session, n=1)
        session.commit()
    assert not any("notify" in statement.lower() for statement in seen)
    assert jobs_in(scene) == 1


def test_a_wake_up_that_fails_does_not_fail_the_commit(
    scene: Scene, jobs: Any, business: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job is committed by then: the caller must not believe otherwise."""
    with Session(business) as session:
        jobs.leased_effect.submit(session, n=1)
        monkeypatch.setenv("DATABASE_URL", "postgresql+psycopg2://x@127.0.0.1:1/x")
        app_settings.settings.cache_clear()
        session.commit()
    assert jobs_in(scene) == 1


# two at once


def in_own_session(business: Engine, job: NewJob) -> Submitted:
    with Session(business) as session, session.begin():
        return submit.in_session(session, [job])[0]


@pytest.mark.parametrize("second", ["alone", "in_session"])
@pytest.mark.parametrize("first", ["commits", "rolls back"])
def test_the_second_submit_of_a_key_waits_for_the_first(
    scene: Scene, business: Engine, first: str, second: str
) -> None:
    job = keyed("k", 1)
    again = partial(submit.alone, job) if second == "alone" else partial(in_own_session, business, job)
    with Session(business) as session:
        made = submit.in_session(session, [keyed("k", 1)])[0]
        other = Background(again)
        scene.wait_until_blocked()
        assert not other.ended
        session.commit() if first == "commits" else session.rollback()
    answer = other.result()
    assert answer == Submitted(made.job_id, created=first == "rolls back", state=State.QUEUED)
    assert jobs_in(scene) == 1
    assert scene.journal(made.job_id) == ["submit"]


def test_the_second_submit_with_another_payload_waits_and_conflicts(scene: Scene, business: Engine) -> None:
    with Session(business) as session:
        submit.in_session(session, [keyed("k", 1)])
        other = Background(partial(submit.alone, keyed("k", 2)))
        scene.wait_until_blocked()
        session.commit()
    with pytest.raises(IdempotencyConflict):
        other.result()
    assert jobs_in(scene) == 1


def test_many_threads_with_one_key_make_one_job(scene: Scene) -> None:
    answers = scene.at_once(*[partial(submit.alone, keyed("k", 1))] * 8)
    assert sum(answer.created for answer in answers) == 1
    assert jobs_in(scene) == 1


# outages


@pytest.fixture
def database_at(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Point this process to another address."""

    def point(url: str, **more: str) -> None:
        monkeypatch.setenv("DATABASE_URL", url)
        for name, value in more.items():
            monkeypatch.setenv(name, value)
        app_settings.settings.cache_clear()

    return point


def test_a_closed_port_is_told_at_once(database_at: Callable[..., None], jobs: Any) -> None:
    database_at("postgresql+psycopg2://x@127.0.0.1:1/x")
    started = time.monotonic()
    with pytest.raises(psycopg2.OperationalError):
        jobs.leased_effect.delay(n=1)
    assert time.monotonic() - started < 3


def test_a_port_that_accepts_and_never_answers_is_told_in_time(database_at: Callable[..., None], jobs: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        database_at(f"postgresql+psycopg2://x@127.0.0.1:{mute.getsockname()[1]}/x")
        started = time.monotonic()
        with pytest.raises(psycopg2.OperationalError):
            jobs.leased_effect.delay(n=1)
        assert time.monotonic() - started < 12


def test_a_database_that_falls_silent_is_told_in_time(
    scene: Scene, database_at: Callable[..., None], jobs: Any
) -> None:
    """The connection stays open and nothing comes: a frozen server, a route that is gone."""
    with Proxy.before(scene.url) as proxy:
        database_at(proxy.url(scene.url), DEADSURE_SUBMIT_TIMEOUT_S="1")
        jobs.leased_effect.delay(n=1)
        proxy.blackhole()
        waiting = Background(partial(jobs.leased_effect.delay, n=2))
        wait_for(lambda: waiting.ended, 15, "the submit gives up")
        with pytest.raises(psycopg2.OperationalError):
            waiting.result()


def test_a_locked_table_is_told_in_time(scene: Scene, database_at: Callable[..., None], jobs: Any) -> None:
    database_at(scene.url, DEADSURE_SUBMIT_TIMEOUT_S="0.5")
    blocker = scene.connect()
    rows(blocker, "BEGIN; LOCK TABLE jobs IN ACCESS EXCLUSIVE MODE")
    started = time.monotonic()
    with pytest.raises(psycopg2.OperationalError):
        jobs.leased_effect.delay(n=1)
    assert time.monotonic() - started < 5
    rows(blocker, "ROLLBACK")
    assert jobs_in(scene) == 0
    jobs.leased_effect.delay(n=1)
    assert jobs_in(scene) == 1


def test_a_connection_that_was_killed_between_two_submits(scene: Scene, jobs: Any) -> None:
    jobs.leased_effect.delay(n=1)
    assert kill_sessions(scene.eyes, POOL) == 1
    jobs.leased_effect.delay(n=2)
    assert jobs_in(scene) == 2
    assert scene.ask("SELECT count(*) FROM job_events WHERE event = 'submit'") == 2


def test_all_pooled_connections_were_killed(scene: Scene, jobs: Any) -> None:
    """A PostgreSQL restart under a producer with threads: no submit fails once the server is back."""
    pool = autocommit_pool(scene.url, app_settings.settings().submit_timeout_s)
    borrowed = [pool.raw_connection() for _ in range(4)]
    for connection in borrowed:
        connection.close()
    assert kill_sessions(scene.eyes, POOL) == 4
    for n in range(4):
        jobs.leased_effect.delay(n=n)
    assert jobs_in(scene) == 4


def test_the_callers_session_was_killed_before_its_commit(scene: Scene, jobs: Any, business: Engine) -> None:
    before = scene.picture()
    with Session(business) as session:
        jobs.leased_effect.submit(session, n=1)
        pid = session.execute(text("SELECT pg_backend_pid()")).scalar_one()
        rows(scene.eyes, "SELECT pg_terminate_backend(%s, 5000)", (pid,))
        with pytest.raises(DBAPIError):
            session.commit()
    assert scene.picture() == before


def test_an_answer_that_was_lost_after_the_commit_makes_one_job(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, jobs: Any
) -> None:
    """The connection breaks when the job is committed and the caller has not heard of it."""
    jobs.leased_effect.delay(n=0)
    calls: list[str] = []

    def breaking(connection: Any, sql: str, values: Any) -> Any:
        answer = one(connection, sql, values)
        if not calls:
            calls.append(sql)
            connection.close()
            raise psycopg2.OperationalError("server closed the connection unexpectedly")
        return answer

    monkeypatch.setattr("app.submit.one", breaking)
    job_id = jobs.leased_effect.delay(n=1).id
    assert jobs_in(scene) == 2
    assert scene.journal(uuid.UUID(job_id)) == ["submit"]


# fork


def submit_in_child(task: Any, ids: Any) -> None:
    ids.put([task.delay(n=n).id for n in (10, 11)])


def test_a_forked_child_submits_on_a_connection_of_its_own(scene: Scene, jobs: Any) -> None:
    ids = [jobs.leased_effect.delay(n=1).id]
    sessions = "SELECT array_agg(pid ORDER BY pid) FROM pg_stat_activity WHERE application_name = %s"
    before = scene.ask(sessions, (POOL,))
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    children = [context.Process(target=submit_in_child, args=(jobs.leased_effect, queue)) for _ in range(2)]
    for child in children:
        child.start()
    ids += [jobs.leased_effect.delay(n=2).id]
    for _ in children:
        ids += queue.get(timeout=30)
    for child in children:
        child.join(30)
        assert child.exitcode == 0
    ids += [jobs.leased_effect.delay(n=3).id]
    assert len(set(ids)) == 7
    assert {row["job_id"] for row in scene.records("SELECT job_id::text FROM jobs")} == set(ids)
    wait_for(lambda: scene.ask(sessions, (POOL,)) == before, 10, "the parent's session alone is left")


def test_a_child_that_ends_in_good_order_leaves_the_parents_session_alone(scene: Scene, jobs: Any) -> None:
    jobs.leased_effect.delay(n=1)
    pid = os.fork()
    if pid == 0:
        import gc  # noqa: PLC0415

        from db import session  # noqa: PLC0415

        session._engines.clear()
        gc.collect()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    sessions = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s"
    assert scene.ask(sessions, (POOL,)) == 1
    jobs.leased_effect.delay(n=2)
    assert jobs_in(scene) == 2
