"""Periodic jobs on the database: one job for each tick, the policies, two beats at once, and clocks that go back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import psycopg2
import pytest
from pydantic import ValidationError

from app import periodic
from app.periodic import CatchUp, Due, Entry, FromTick, due, look, submit_due
from app.submit import prepare, within
from app.ticks import Every
from db.session import rows
from tests.integration.scene import PLAIN, Background, Number, Scene

DAY = timedelta(days=1)  # long enough that no tick falls into a test, but at midnight UTC
ENTRY = Entry("daily", PLAIN, Every(DAY), catch_up=CatchUp.ALL)


@pytest.fixture
def behind(scene: Scene) -> Callable[..., datetime]:
    """Puts an entry's `last_tick` so many days before its newest tick; returns that tick."""

    def put(days: int, entry: Entry = ENTRY) -> datetime:
        seen = look(scene.eyes, [entry])
        newest = next(entry.ticks.between(seen.now - 2 * DAY, seen.now))
        scene.ask("UPDATE periodic_ticks SET last_tick = %s RETURNING 1", (newest - days * DAY,))
        return newest

    return put


def turn(scene: Scene, entry: Entry = ENTRY, connection: Any = None) -> Due | None:
    """What a beat does with an entry at one look."""
    session = connection or scene.eyes
    seen = look(session, [entry])
    last = seen.last[entry.name, entry.schedule]
    what = due(entry, last, seen.now)
    if what is not None:
        submit_due(session, entry, last, what)
    return what


def keys(scene: Scene) -> list[str]:
    return [row[0] for row in rows(scene.eyes, "SELECT idempotency_key FROM jobs ORDER BY 1")]


def last_tick(scene: Scene) -> datetime:
    found: datetime = scene.ask("SELECT last_tick FROM periodic_ticks")
    return found


def test_a_new_entry_begins_now(scene: Scene) -> None:
    assert turn(scene, replace(ENTRY, ticks=Every(timedelta(days=7)))) is None
    assert keys(scene) == []


def test_the_job_of_a_tick(scene: Scene, behind: Any) -> None:
    newest = behind(1)
    turn(scene)
    assert keys(scene) == [f"daily {newest.isoformat()}"]
    assert newest.isoformat().endswith("+00:00")
    (job,) = scene.records("SELECT * FROM jobs")
    assert (job["type"], job["state"]) == (PLAIN.name, "queued")
    assert scene.owed(job["job_id"]) == "wake 1"
    assert scene.journal(job["job_id"]) == ["submit"]
    assert last_tick(scene) == newest
    assert turn(scene) is None


@pytest.mark.parametrize(
    ("policy", "expected"),
    [(CatchUp.ALL, [2, 1, 0]), (CatchUp.LAST, [0]), (CatchUp.SKIP, [])],
)
def test_what_was_missed_comes_by_policy(scene: Scene, behind: Any, policy: CatchUp, expected: list[int]) -> None:
    entry = replace(ENTRY, catch_up=policy)
    newest = behind(3)
    what = turn(scene, entry)
    assert what is not None
    assert what.left_out is (policy is not CatchUp.ALL)
    assert keys(scene) == [f"daily {(newest - n * DAY).isoformat()}" for n in expected]
    assert turn(scene, entry) is None


def test_skip_still_submits_what_is_a_moment_late() -> None:
    """A restart of beat is no down time."""
    entry = replace(ENTRY, catch_up=CatchUp.SKIP)
    tick = datetime(2026, 10, 1, tzinfo=UTC)
    before = tick - DAY
    assert due(entry, before, tick + timedelta(seconds=59)) == Due((tick,), tick, left_out=False)
    assert due(entry, before, tick + timedelta(seconds=61)) == Due((), tick, left_out=True)


def test_all_is_bounded_and_takes_the_newest(scene: Scene, behind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(periodic, "MOST", 2)
    newest = behind(5)
    what = turn(scene)
    assert what == Due((newest - DAY, newest), newest, left_out=True)
    assert len(keys(scene)) == 2


def test_two_beats_that_saw_the_same_tick(scene: Scene, behind: Any) -> None:
    """Both looked, both submit: the second finds that `last_tick` has moved and writes nothing."""
    behind(3)
    sessions = [scene.connect(), scene.connect()]
    seen = [look(session, [ENTRY]) for session in sessions]
    last = seen[0].last[ENTRY.name, ENTRY.schedule]
    what = due(ENTRY, last, seen[0].now)
    assert what is not None
    created = scene.at_once(*(partial(submit_due, session, ENTRY, last, what) for session in sessions))
    assert sorted(created, key=str) == [3, None]
    assert len(keys(scene)) == 3


def test_ten_beats_at_once(scene: Scene, behind: Any) -> None:
    behind(7)
    sessions = [scene.connect() for _ in range(10)]
    scene.at_once(*(partial(turn, scene, ENTRY, session) for session in sessions))
    assert len(keys(scene)) == len(set(keys(scene))) >= 7
    assert scene.ask("SELECT count(*) FROM job_events WHERE event = 'submit'") == len(keys(scene))


def test_a_beat_that_dies_in_between_leaves_nothing(scene: Scene, behind: Any) -> None:
    """It has moved `last_tick` and waits in the middle of its message: with its session both are undone."""
    newest = behind(2)
    blocker, dying = scene.connect(), scene.connect("deadsure dying")
    key = ENTRY.job(newest)
    rows(blocker, "BEGIN; LOCK TABLE jobs IN EXCLUSIVE MODE")
    seen = look(dying, [ENTRY])
    last = seen.last[ENTRY.name, ENTRY.schedule]
    what = due(ENTRY, last, seen.now)
    assert what is not None
    running = Background(lambda: submit_due(dying, ENTRY, last, what))
    scene.wait_until_blocked(dying)
    scene.ask("SELECT pg_terminate_backend(%s, 5000)", (dying.info.backend_pid,))
    with pytest.raises(psycopg2.OperationalError):
        running.result()
    rows(blocker, "ROLLBACK")
    assert (last_tick(scene), keys(scene)) == (newest - 2 * DAY, [])
    turn(scene)
    assert len(keys(scene)) >= 2
    assert scene.row(key.job_id)["state"] == "queued"


def test_a_clock_that_goes_back_neither_stops_nor_doubles(scene: Scene, behind: Any) -> None:
    """A year ahead by mistake, then right again: ticks go on from now, and one that was submitted stays one job."""
    newest = behind(1)
    turn(scene)
    scene.ask("UPDATE periodic_ticks SET last_tick = last_tick + interval '1 year' RETURNING 1")
    assert turn(scene) is not None
    assert last_tick(scene) < newest + 2 * DAY
    scene.ask("UPDATE periodic_ticks SET last_tick = %s RETURNING 1", (newest - DAY,))
    turn(scene)
    assert keys(scene).count(f"daily {newest.isoformat()}") == 1
    assert scene.ask("SELECT count(*) FROM job_events WHERE event = 'submit'") == len(keys(scene))


def test_another_schedule_for_an_entry_begins_now(scene: Scene, behind: Any) -> None:
    """And the old release's beat, which still runs, goes on with the old one: neither moves the other's row."""
    behind(5)
    changed = replace(ENTRY, ticks=Every(DAY * 2))
    assert turn(scene, changed) is None
    assert keys(scene) == []
    turn(scene)
    assert len(keys(scene)) >= 5
    assert turn(scene, changed) is None


def test_an_entry_that_comes_back_catches_up(scene: Scene, behind: Any) -> None:
    entry = replace(ENTRY, catch_up=CatchUp.LAST)
    behind(5)
    look(scene.eyes, [replace(ENTRY, name="another")])
    turn(scene, entry)
    assert len(keys(scene)) == 1


def test_the_tick_fills_in_the_payload(scene: Scene, behind: Any) -> None:
    newest = behind(2)
    turn(scene, replace(ENTRY, fields={"n": FromTick(lambda tick: tick.day)}))
    found = {job["payload"]["n"] for job in scene.records("SELECT payload FROM jobs")}
    assert {newest.day, (newest - DAY).day} <= found


def test_a_payload_that_cannot_be_made_moves_nothing(scene: Scene, behind: Any) -> None:
    """It waits for the release that mends it, and then catches up."""
    newest = behind(2)
    with pytest.raises(ValidationError):
        turn(scene, replace(ENTRY, fields={"n": FromTick(lambda _: "no number")}))
    assert (last_tick(scene), keys(scene)) == (newest - 2 * DAY, [])
    turn(scene)
    assert len(keys(scene)) >= 2


def test_a_key_of_its_own(scene: Scene, behind: Any) -> None:
    """Submitted by hand before: the tick finds the job, and goes on."""
    newest = behind(1)
    by_hand = replace(ENTRY, key=lambda tick: tick.strftime("%d"))
    session_jobs = [prepare(PLAIN, Number(), idempotency_key=newest.strftime("%d"))]
    within(partial(rows, scene.eyes), session_jobs)
    turn(scene, by_hand)
    assert scene.ask("SELECT count(*) FROM jobs WHERE idempotency_key = %s", (newest.strftime("%d"),)) == 1
    assert last_tick(scene) >= newest
