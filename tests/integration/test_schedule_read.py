"""Celery's `beat_schedule` read: what is wrong is named with its entry, and stops no other."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery.beat import BeatLazyFunc
from celery.schedules import crontab, schedule
from click.testing import CliRunner

from app.periodic import CatchUp, FromTick, look
from tests.integration.scene import Scene

GOOD = {"task": "tests.leased_effect", "schedule": 60}


@pytest.fixture
def read(jobs: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`tasks.schedule.read` of the given entries."""
    assert jobs
    from tasks import app  # noqa: PLC0415  both read the environment
    from tasks import schedule as schedules  # noqa: PLC0415

    def given(entries: Mapping[str, Any]) -> Any:
        monkeypatch.setitem(app.conf.changes, "beat_schedule", entries)
        return schedules.read(app)

    yield given
    app.conf.changes.pop("beat_schedule", None)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"task": "no.such.task"}, "no task 'no.such.task' is registered here"),
        ({"task": "tests.leased_effect", "schedule": None}, "a crontab or an interval"),
        ({**GOOD, "kwargs": {"n": "five"}}, "n: "),
        ({**GOOD, "kwargs": {"n": FromTick(lambda _: "five")}}, "n: "),
        ({**GOOD, "kwargs": {"n": FromTick(lambda _: 1 // 0)}}, "ZeroDivisionError"),
        ({**GOOD, "args": (1, 2)}, "at most 1 positional"),
        ({**GOOD, "options": {"queue": "other"}}, "'queue' is not for a periodic job"),
        ({**GOOD, "options": {"link": ["x"]}}, "'link' is not for a periodic job"),
        ({**GOOD, "options": {"catch_up": "most"}}, "skip, last, all"),
        ({**GOOD, "options": {"timezone": "Berlin"}}, "as Europe/Berlin is one"),
        ({**GOOD, "options": {"idempotency_key": "always"}}, "all ticks one job"),
        ({**GOOD, "options": {"priority": 12}}, "priority=12"),
        ({**GOOD, "schedule": 0.5}, "shorter than a second"),
        ({**GOOD, "schedule": schedule(60, relative=True)}, "relative=True"),
        ({**GOOD, "schedule": crontab(nowfun=lambda: datetime.now(UTC))}, "nowfun"),
        ({**GOOD, "schedule": "hourly"}, ""),
        ({"schedule": 60}, "'task' is missing"),
        ({"task": "tests.leased_effect"}, "'schedule' is missing"),
    ],
)
def test_a_wrong_entry_is_named_and_the_others_stay(read: Any, entry: Mapping[str, Any], said: str) -> None:
    found = read({"wrong": entry, "right": GOOD})
    assert [one.name for one in found.durable] == ["right"]
    assert said in found.wrong["wrong"]
    assert "five" not in found.wrong["wrong"]  # no value of a payload


def test_a_whole_entry(read: Any) -> None:
    options = {"catch_up": "all", "timezone": "Europe/Berlin", "priority": 3, "expires": 60, "scope": "acct-7"}
    found = read({"a": {**GOOD, "schedule": crontab(0, 3, day_of_month=1), "args": (5,), "options": options}})
    (entry,) = found.durable
    assert entry.schedule == "crontab 0 3 1 * * Europe/Berlin"
    assert entry.catch_up is CatchUp.ALL
    job = entry.job(datetime(2026, 10, 1, 1, tzinfo=UTC))
    assert (job.payload, job.key, job.priority, job.scope) == ('{"n":5}', "a 2026-10-01T01:00:00+00:00", 3, "acct-7")
    assert job.expires == 60


def test_an_interval_in_each_of_celerys_ways(read: Any) -> None:
    ways = [60, 60.0, timedelta(minutes=1), schedule(60)]
    found = read({str(n): {**GOOD, "schedule": way} for n, way in enumerate(ways)})
    assert {entry.schedule for entry in found.durable} == {"every 0:01:00"}
    assert len(found.durable) == 4


def test_celerys_own_late_values(read: Any) -> None:
    (entry,) = read({"a": {**GOOD, "kwargs": {"n": BeatLazyFunc(lambda: 7)}}}).durable
    assert entry.job(datetime.now(UTC)).payload == '{"n":7}'


def test_plain_tasks_are_left_to_celery(read: Any) -> None:
    entries = {
        "here": {"task": "celery.backend_cleanup", "schedule": schedule(60, relative=True)},
        "elsewhere": {"task": "other.task", "schedule": 60, "options": {"queue": "other"}},
    }
    found = read(entries)
    assert (list(found.plain), found.durable, found.wrong) == (["here", "elsewhere"], [], {})


def test_the_command_shows_entries_and_fails_for_a_wrong_one(read: Any, scene: Scene) -> None:
    from tasks.commands import deadsure  # noqa: PLC0415  reads the environment

    def shown(*options: str) -> Any:
        return CliRunner().invoke(deadsure, ["periodic", *options], prog_name="deadsure")

    entry = read({"right": GOOD}).durable[0]
    look(scene.eyes, [entry])
    answer = json.loads(shown("--json").output)
    assert (answer["wrong"], answer["plain"]) == ({}, [])
    (listed,) = answer["entries"]
    assert (listed["entry"], listed["schedule"], listed["catch_up"]) == ("right", "every 0:01:00", "last")
    assert listed["last_tick"] is not None
    assert listed["next_tick"] > listed["last_tick"]
    assert shown().exit_code == 0
    read({"right": GOOD, "wrong": {"task": "no.such.task"}})
    assert shown().exit_code == 1
    assert "left out: entry 'wrong'" in shown().output
