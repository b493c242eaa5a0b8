"""`job.stop()`: the attempt leaves nothing behind, spends no budget, and the job comes back at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from app import attempt, submit
from app.ending import Outcome
from app.job import Job
from app.job_types import REGISTRY, JobType
from app.lease import Keeper
from app.seat import Seat
from app.settings import settings
from db.session import rows
from tests.integration.scene import Number, Scene

EFFECT = "INSERT INTO test_effects (kind, job_id, attempt, pid) VALUES ('effect', %s, %s, 0)"
SOON = "SELECT due_at <= clock_timestamp() FROM outbox"
LATER = "UPDATE outbox SET due_at = clock_timestamp() + interval '15 min' RETURNING 1"


@pytest.fixture
def seat(scene: Scene) -> Iterator[Seat]:
    keeper = Keeper(settings(), "stopping", [])
    keeper.start_lease()
    made = Seat(keeper.shared, scene.url)
    yield made
    made.drop()
    keeper.stop()


@pytest.fixture(params=["leased", "atomic"])
def job_type(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> JobType:
    """A type whose first attempt writes something and stops."""
    made = JobType(name="stop.once", payload=Number, mode=request.param, time_limit_s=30)
    asked: list[Any] = []

    def stop_once(job: Job, _payload: Number) -> None:
        job.execute(EFFECT, (str(job.job_id), job.attempt))
        asked.append(job.job_id)
        if len(asked) == 1:
            job.stop()

    monkeypatch.setitem(REGISTRY, (made.name, made.version), made)
    monkeypatch.setitem(attempt.HANDLERS, (made.name, made.version), stop_once)
    return made


def test_it_comes_back_at_once_and_is_done_once(scene: Scene, seat: Seat, job_type: JobType) -> None:
    new = submit.prepare(job_type, Number())
    submit.within(lambda sql, values: rows(scene.eyes, sql, values), [new])
    scene.sent(new.job_id)
    scene.ask(LATER)
    ending = attempt.run(seat, scene.delivery(new.job_id), job_type)
    assert ending.outcome is Outcome.RELEASED
    row = scene.row(new.job_id)
    assert (row["state"], row["failures"], row["crashes"], row["stalls"]) == ("queued", 0, 0, 0)
    assert scene.ask(SOON), "its debt is due"
    assert scene.ask("SELECT count(*) FROM test_effects") == 0
    expected = ["received"] if job_type.mode == "atomic" else ["received", "claim", "release"]
    assert scene.journal(new.job_id) == ["submit", *expected]
    scene.sent(new.job_id, sends=2)
    again = attempt.run(seat, scene.delivery(new.job_id, copy=2), job_type)
    assert again.outcome is Outcome.SUCCEEDED
    assert scene.ask("SELECT count(*) FROM test_effects") == 1


def test_a_debt_that_somebody_paid_meanwhile_stays_paid(scene: Scene, seat: Seat, job_type: JobType) -> None:
    new = submit.prepare(job_type, Number())
    submit.within(lambda sql, values: rows(scene.eyes, sql, values), [new])
    scene.sent(new.job_id)
    attempt.run(seat, scene.delivery(new.job_id), job_type)
    other = scene.claimed(scene.worker(), new.job_id)
    before = scene.picture()
    late = attempt.run(seat, scene.delivery(new.job_id, redelivered=True), job_type)
    assert late.outcome is not Outcome.SUCCEEDED
    assert scene.picture(but="job_events") == [part for n, part in enumerate(before) if n != 2]
    assert other.claimed.committed
