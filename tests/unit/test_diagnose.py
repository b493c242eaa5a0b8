"""The rules of `deadsure diagnose` as a pure function, above all those that a test cannot bring about quickly."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from app.diagnose import BY_STATE, diagnose, unknown
from app.diagnose.facts import Action, Batch, Broker, Debt, Entry, Event, Facts, Fleet, JobRow, Line, Owner
from app.settings import Settings

NOW = datetime(2026, 10, 1, 12, tzinfo=UTC)
JOB_ID, WORKER_ID, BATCH_ID = UUID(int=1), UUID(int=2), UUID(int=3)
LIVE = Fleet(live=2, consuming=2, knowing=2, versions=("a.b@1",), relays=(1, 1), sweepers=(1, 1), busy=1)
POOLED = replace(LIVE, relays=None, sweepers=None, busy=None)
CALM = Broker("rabbitmq", reachable=True, exists=True, ready=0, consumers=2, unacknowledged=1)
MANUAL = Path(__file__).parents[2] / "docs/operations.md"


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


def job(state: str, **changed: Any) -> JobRow:
    plain: dict[str, Any] = {
        **dict.fromkeys(JobRow.__dataclass_fields__),
        **dict.fromkeys(("priority", "attempt", "failures", "crashes", "stalls", "releases", "episode"), 0),
        "job_id": JOB_ID,
        "type": "a.b",
        "schema_version": 1,
        "state": state,
        "queue": "jobs",
        "max_failures": 5,
        "max_crashes": 3,
        "max_stalls": 3,
        "expire_early": True,
        "cancel_requested": False,
        "created_at": ago(100),
        "changed_at": ago(60),
    }
    return JobRow(**{**plain, **changed})


def debt(**changed: Any) -> Debt:
    plain: dict[str, Any] = {"kind": "wake", "episode": 1, "sends": 1, "due_at": ago(-30), "sent_at": ago(20)}
    return Debt(**{**plain, "returned_at": None, "returned_reason": None, "created_at": ago(60), **changed})


def owner(**changed: Any) -> Owner:
    plain: dict[str, Any] = {"worker_id": WORKER_ID, "name": "w@h", "hostname": "h", "pid": 7, "session": True}
    times = {"lease_until": ago(-29), "renewed_at": ago(1), "lost_at": None, "lost_cause": None, "stopped_at": None}
    return Owner(**{**plain, **times, **changed})


def facts(found: JobRow | None, **changed: Any) -> Facts:
    plain: dict[str, Any] = {"asked": JOB_ID, "now": NOW, "settings": Settings(), "fleet": LIVE, "broker": CALM}
    return Facts(**{**plain, "job": found, **changed})


QUEUED, RUNNING = job("queued"), job("running", attempt=1, worker_id=WORKER_ID)
QUARANTINED = job("quarantined", attempt=5, episode=1, cause="attempts_spent", reason="E in f")
DONE = job("succeeded", attempt=1, result_key="k", finished_at=ago(50))
ENTRY = Entry(1, "attempts_spent", "abc", "E in f", 5, ago(50), ago(49), None)
SUCCEED = Event(ago(50), "succeed", attempt=1, copy=1, delivery_tag="4", worker_id=WORKER_ID)
ACK = replace(SUCCEED, event="ack_sent")
FULL = Line(ahead=9, unpaid=900, running=4)
READY = replace(CALM, ready=3)

CASES: dict[str, tuple[str, bool, Facts]] = {
    "just submitted": ("waiting_for_delivery", False, facts(QUEUED, debt=debt(sends=0, due_at=NOW, sent_at=None))),
    "sessions hidden": ("relay_not_sending", True, facts(QUEUED, fleet=POOLED, debt=debt(sends=0, due_at=ago(60)))),
    "frozen relay": (
        "relay_stopped",
        True,
        facts(QUEUED, fleet=replace(LIVE, relays=(1, 0)), debt=debt(sends=0, due_at=ago(60))),
    ),
    "resend is late, queue empty": ("relay_not_sending", True, facts(QUEUED, debt=debt(due_at=ago(60)))),
    "resend is late, queue full": ("waiting_backlog", False, facts(QUEUED, broker=READY, debt=debt(due_at=ago(60)))),
    "window": ("waiting_behind_window", False, facts(QUEUED, line=FULL, debt=debt(sends=0, due_at=ago(60)))),
    "sent again and again": ("waiting_in_worker", True, facts(QUEUED, debt=debt(sends=4))),
    "frozen consumers": (
        "consumers_take_nothing",
        True,
        facts(QUEUED, fleet=replace(LIVE, busy=0), broker=READY, debt=debt()),
    ),
    "handlers at work": ("waiting_backlog", False, facts(QUEUED, broker=READY, debt=debt())),
    "broker not asked": ("waiting_for_delivery", False, facts(QUEUED, broker=None, debt=debt())),
    "workers of other queues": (
        "waiting_no_consumer",
        True,
        facts(QUEUED, fleet=replace(LIVE, consuming=0), broker=replace(CALM, consumers=None), debt=debt()),
    ),
    "queue gone": (
        "waiting_no_consumer",
        True,
        facts(QUEUED, broker=replace(CALM, exists=False, ready=None, consumers=0), debt=debt()),
    ),
    "return of an earlier debt": (
        "waiting_for_delivery",
        False,
        facts(QUEUED, debt=debt(sends=0, sent_at=None, due_at=NOW, returned_at=ago(90))),
    ),
    "parked, known by now": ("waiting_in_worker", False, facts(job("queued", parked_at=ago(60)), debt=debt())),
    "retry": (
        "waiting_not_before",
        False,
        facts(job("retry_wait", failures=1, not_before=ago(-5)), debt=debt(sends=0, due_at=ago(-5))),
    ),
    "stalls": ("crashes_growing", True, facts(job("queued", stalls=2), debt=debt())),
    "alive": ("running", False, facts(RUNNING, owner=owner())),
    "alive behind a pooler": ("running", False, facts(RUNNING, owner=owner(session=None, renewed_at=None))),
    "half of the lease": ("owner_frozen", True, facts(RUNNING, owner=owner(lease_until=ago(-12), renewed_at=ago(18)))),
    "over, pooled": (
        "lease_over",
        True,
        facts(RUNNING, fleet=POOLED, owner=owner(session=None, renewed_at=None, lease_until=ago(2))),
    ),
    "dead, effect not to be repeated": (
        "worker_lost",
        True,
        facts(replace(RUNNING, expire_early=False), owner=owner(session=False)),
    ),
    "declared lost, nobody there": (
        "worker_lost_not_swept",
        True,
        facts(RUNNING, fleet=replace(LIVE, sweepers=(1, 0)), owner=owner(lost_at=ago(1), lost_cause="stalled")),
    ),
    "known again": (
        "quarantined",
        True,
        facts(replace(QUARANTINED, cause="unknown_type"), entries=(ENTRY,)),
    ),
    "broker down": (
        "quarantine_trace_missing",
        True,
        facts(
            QUARANTINED,
            entries=(replace(ENTRY, dead_lettered_at=None),),
            debt=debt(kind="trace", sends=2),
            broker=Broker("rabbitmq", reachable=False),
        ),
    ),
    "batch": (
        "quarantined_blocks_batch",
        True,
        facts(
            QUARANTINED,
            entries=(ENTRY,),
            batch=Batch(BATCH_ID, WORKER_ID, True, None, None, {"quarantined": 1}, (JOB_ID,)),
        ),
    ),
    "batch cancelled": (
        "quarantined",
        True,
        facts(QUARANTINED, entries=(ENTRY,), batch=Batch(BATCH_ID, WORKER_ID, True, None, ago(9), {}, ())),
    ),
    "acknowledged": ("succeeded", False, facts(DONE, events=(SUCCEED, ACK), owner=owner())),
    "not acknowledged": ("succeeded_not_acked", False, facts(DONE, events=(SUCCEED,), owner=owner(session=False))),
    "without a broker (eager)": ("succeeded", False, facts(DONE, events=(replace(SUCCEED, delivery_tag=None),))),
    "settled": ("settled", False, facts(DONE, actions=(Action(1, "settle", "ada", "it is there", ago(50)),))),
}


@pytest.mark.parametrize("name", CASES)
def test_cause(name: str) -> None:
    cause, wrong, given = CASES[name]
    found = diagnose(given)
    assert (found.cause, found.wrong) == (cause, wrong), found.explanation
    assert found.next.startswith(("deadsure ", "celery -A tasks ", "ps ", "kill "))
    assert "None" not in found.explanation


def test_explanations_that_depend_on_more_than_their_cause() -> None:
    def said(name: str) -> str:
        return diagnose(CASES[name][2]).explanation

    assert "stand still" in said("frozen relay")
    assert "must not be repeated early" in said("dead, effect not to be repeated")
    assert "The broker does not answer." in said("broker down")
    assert (
        diagnose(CASES["known again"][2]).next
        == f"deadsure quarantine replay {JOB_ID} --reason 'its type is known now'"
    )
    twice = facts(replace(QUARANTINED, episode=2), entries=(ENTRY, replace(ENTRY, episode=2)))
    assert "again (2 of 2 times with this fingerprint)" in diagnose(twice).explanation
    assert "no sweeper is alive" not in said("over, pooled"), "where sessions cannot be seen nobody is missed"
    lost_note = facts(DONE, events=(SUCCEED,), owner=owner(), broker=replace(CALM, unacknowledged=0))
    assert "only the note was lost" in diagnose(lost_note).explanation


def test_each_rule_is_named_once_and_stands_in_the_manual() -> None:
    rules = {rule for of_state in BY_STATE.values() for rule in of_state} | set(unknown.RULES)
    names = [rule.__name__ for rule in rules]
    assert len(names) == len(set(names))
    told = MANUAL.read_text()
    plain = {"succeeded", "settled", "cancelled", "expired"}
    rare = {"debt_missing", "waiting_expired", "waiting_for_delivery", "owner_unknown", "lease_over"}
    rest = {"batch_waits_for_children", "job_missing_for_messages"}
    assert [name for name in names if f"`{name}`" not in told and name not in plain | rare | rest] == []
