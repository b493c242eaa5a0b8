"""A producer is killed at any moment of its submit: the job runs once, or was never there."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from sqlalchemy import Engine, text

from tests.faults.effects import Effects
from tests.faults.inject import Fault
from tests.faults.outcomes import Outcomes
from tests.nodes.marks import on_rabbitmq
from tests.nodes.waiting import wait_for

pytestmark = [pytest.mark.usefixtures("settings"), on_rabbitmq]
KILLED = 128 + signal.SIGKILL
ALONE = "from tests.faults.jobs import {task}; {task}.delay(n=1)"
# The job and a row of the caller's own, in the caller's transaction.
IN_SESSION = """
from sqlalchemy import text
from sqlalchemy.orm import Session
from app.settings import settings
from db.session import engine
from tests.faults.jobs import {task}
with Session(engine(settings().database_url)) as session:
    session.execute(text(
        "INSERT INTO accounts (name, email, currency) VALUES ('n', gen_random_uuid() || '@example.org', 'EUR')"
    ))
    {task}.submit(session, n=1)
    session.commit()
"""
STATEMENT = "deadsure.created"  # stands in the one statement that submits a job alone
BEFORE = {
    "alone, before its statement": (ALONE, Fault("before:db.session.one", "kill", match=STATEMENT)),
    "in a session, before its insert": (IN_SESSION, Fault("before:app.submit.within", "kill")),
    "in a session, before the commit": (IN_SESSION, Fault("before:sqlalchemy.orm.Session.commit", "kill")),
}
AFTER = {
    "alone, right after the commit": (ALONE, Fault("after:db.session.one", "kill", match=STATEMENT)),
    "in a session, after the commit before NOTIFY": (IN_SESSION, Fault("before:app.submit.wake_after_commit", "kill")),
    "in a session, after NOTIFY": (IN_SESSION, Fault("after:sqlalchemy.orm.Session.commit", "kill")),
}


@pytest.fixture
def outcomes(engine: Engine) -> Outcomes:
    return Outcomes(engine)


def accounts(outcomes: Outcomes) -> int:
    return int(outcomes.value("SELECT count(*) FROM accounts"))


def test_killed_before_its_commit_nothing_is_there(start_producer: Any, outcomes: Outcomes) -> None:
    for moment, (code, fault) in BEFORE.items():
        producer = start_producer(code.format(task="leased_effect"), faults=[fault])
        assert producer.wait(30) == KILLED, moment
        assert (outcomes.states(), outcomes.debts(), accounts(outcomes)) == ({}, 0, 0), moment
        assert outcomes.events("submit") == []


def test_killed_after_its_commit_the_job_runs_once(start_worker: Any, start_producer: Any, outcomes: Outcomes) -> None:
    start_worker()
    for count, (moment, (code, fault)) in enumerate(AFTER.items(), start=1):
        producer = start_producer(code.format(task="atomic" if count % 2 else "leased_effect"), faults=[fault])
        assert producer.wait(30) == KILLED, moment
        outcomes.wait_all_succeeded(count)
        outcomes.assert_once(count)
    assert accounts(outcomes) == 2


def test_killed_in_the_middle_of_its_statement_all_or_nothing(
    engine: Engine, start_worker: Any, start_producer: Any, outcomes: Outcomes, effects: Effects
) -> None:
    start_worker()
    blocked = "SELECT pid FROM pg_stat_activity WHERE application_name = 'deadsure submit' AND wait_event_type = 'Lock'"
    with engine.connect() as lock:
        lock.execute(text("LOCK TABLE outbox IN SHARE MODE"))
        producer = start_producer(ALONE.format(task="atomic"))
        wait_for(
            lambda: outcomes.rows(f"{blocked} AND datname = current_database()"), 30, "the insert is at the server"
        )
        producer.kill()
        assert producer.wait(30) == KILLED
        lock.commit()
    gone = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'deadsure submit'"
    wait_for(lambda: not outcomes.rows(gone), 30, "the server has ended the dead producer's session")
    count = outcomes.states().total()
    assert count <= 1
    assert len(outcomes.events("submit")) == count
    wait_for(lambda: outcomes.states()["succeeded"] == count, 60, "the job, if it is there, succeeds")
    assert effects.count() == count
