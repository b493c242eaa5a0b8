"""Real beats: one job for each tick however many run, none lost when they are killed, and nothing stops the others."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, text

from tests.faults.conftest import Court
from tests.faults.effects import Effects
from tests.faults.inject import Fault
from tests.nodes.marks import on_rabbitmq
from tests.nodes.process import ROOT
from tests.nodes.programs import Programs
from tests.nodes.waiting import wait_for

pytestmark = [on_rabbitmq, pytest.mark.usefixtures("settings")]
APP = "tests.faults.beat_app"
SECOND = timedelta(seconds=1)
NO_BROKER = "amqp://nobody:nothing@127.0.0.1:9//"
KEYS = "SELECT idempotency_key FROM jobs WHERE idempotency_key LIKE :entry ORDER BY 1"


@pytest.fixture
def ticks(engine: Engine) -> Callable[[str], list[datetime]]:
    """The ticks of which an entry has a job, one for each job, oldest first."""

    def of(entry: str) -> list[datetime]:
        with engine.connect() as connection:
            keys = connection.execute(text(KEYS), {"entry": f"{entry} %"}).scalars()
            return [datetime.fromisoformat(key.removeprefix(f"{entry} ")) for key in keys]

    return of


def grows(ticks: Callable[[str], list[datetime]], by: int) -> None:
    """Wait until the entry `all` has so many jobs more."""
    before = len(ticks("all"))
    wait_for(lambda: len(ticks("all")) >= before + by, 30, f"{by} more ticks")


def test_two_beats_and_their_deaths(
    programs: Programs, ticks: Any, effects: Effects, court: Court, engine: Engine
) -> None:
    """Killed after the commit and before it, then all of them for some seconds: each tick has its job, and one."""
    first = programs.beat(APP, faults=[Fault("after:app.periodic.submit_due", "kill", when=5)], ready=False)
    second = programs.beat(APP, faults=[Fault("before:app.periodic.submit_due", "kill", when=12)])
    worker = programs.worker(APP, ready=False)
    assert first.wait(60) == second.wait(60) == 137
    gone_at = ticks("all")[-1]
    with engine.connect() as connection:
        passed = text("SELECT clock_timestamp() > CAST(:gone_at AS timestamptz) + interval '3 s'")
        wait_for(lambda: connection.execute(passed, {"gone_at": gone_at}).scalar(), 30, "beat is away for 3 s")
    last_before = ticks("last")[-1]

    third = programs.beat(APP, environment={"BROKER_URL": NO_BROKER})  # no beat needs it for a durable entry
    wait_for(lambda: ticks("all")[-1] > gone_at + 3 * SECOND, 30, "it caught up")
    grows(ticks, 2)
    third.terminate()
    assert third.wait(20) == 0
    worker.ready()

    found = ticks("all")
    assert found == [found[0] + n * SECOND for n in range(len(found))]
    caught_up = [tick for tick in ticks("last") if tick > last_before]
    assert caught_up[0] >= last_before + 3 * SECOND  # of those that were missed only the newest
    assert len(set(ticks("last"))) == len(ticks("last"))
    assert ticks("failing") == ticks("unknown") == ticks("invalid") == []
    told = third.logs()
    assert all(said in told for said in ("no.such.task", "n: Input should be a valid integer", "fails_in_service"))
    assert "no number" not in told

    with engine.connect() as connection:
        ids = connection.execute(text("SELECT job_id FROM jobs")).scalars().all()
    court.wait_succeeded(ids)
    assert [effects.count(job_id) for job_id in ids] == [1] * len(ids)
    plain = {row.job_id for row in effects.rows()} - set(ids)
    assert plain, "the plain task beside them ran too"
    assert not list(ROOT.glob("celerybeat-schedule*"))
