"""Waiting to be tried again: nobody comes early, all do not come together, and nobody who waits is in the way."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from tests.faults.conftest import Court
from tests.faults.effects import Effects
from tests.faults.points import QUICK
from tests.nodes.marks import on_rabbitmq
from tests.nodes.servers import BrokerNode
from tests.nodes.waiting import stays_true, wait_for

pytestmark = pytest.mark.usefixtures("settings")
APP = "tests.faults.jobs_herd"
HERD = 250
WAITS_S = """
SELECT extract(epoch FROM not_before - changed_at)::float8, extract(epoch FROM not_before)::float8
  FROM jobs WHERE type = 'tests.away' AND state = 'retry_wait' AND failures = 1
"""
EARLY = """
SELECT count(*) FROM job_events claim
  JOIN job_events scheduled ON scheduled.job_id = claim.job_id AND scheduled.attempt = claim.attempt - 1
                           AND scheduled.event = 'retry_scheduled'
 WHERE claim.event = 'claim'
   AND claim.at < scheduled.at + make_interval(secs => substring(scheduled.reason FROM 'in ([0-9.]+) s')::float8 - 0.01)
"""


@pytest.fixture
def herd(jobs: Any) -> Any:
    """`tests.faults.jobs_herd`, imported when the environment is there."""
    assert jobs
    import tests.faults.jobs_herd  # noqa: PLC0415

    return tests.faults.jobs_herd


def rows(engine: Engine, statement: str, **parameters: Any) -> list[Any]:
    with engine.connect() as connection:
        return list(connection.execute(text(statement), parameters))


@on_rabbitmq
@pytest.mark.parametrize("ask_s", [None, 12.0], ids=["jitter", "retry_after"])
def test_c32_a_herd_is_spread(
    ask_s: float | None, herd: Any, court: Court, effects: Effects, engine: Engine, start_worker: Any, tmp_path: Path
) -> None:
    back = tmp_path / "back"
    with Session(engine) as session:
        made = herd.away.submit_many(session, [{"back": str(back), "ask_s": ask_s}] * HERD)
        session.commit()
    start_worker(APP, options=QUICK, environment={"DEADSURE_LOG_LEVEL": "ERROR"})
    first: dict[float, float] = {}

    def all_wait() -> bool:
        first.update({due: wait for wait, due in rows(engine, WAITS_S)})
        return len(rows(engine, "SELECT FROM job_events WHERE event = 'retry' AND attempt = 1")) == HERD

    wait_for(all_wait, 60, "all have failed once", poll_s=0.1)
    waits = list(first.values())
    assert len(waits) > HERD * 0.9, "seen while they wait"
    low, high = ((ask_s or 0) + herd.WINDOW_S / 2, (ask_s or 0) + herd.WINDOW_S)
    assert all(low - 0.01 <= wait <= high + 0.01 for wait in waits)
    parts = Counter(min(3, int((wait - low) / (high - low) * 4)) for wait in waits)
    assert min(parts[n] for n in range(4)) > len(waits) / 4 * 0.5, f"spread over the window: {parts}"
    back.touch()
    found = court.wait_succeeded([job.job_id for job in made])
    assert effects.count() == HERD
    assert {(case.failures, case.attempt) for case in found.values()} == {(1, 2)}
    assert rows(engine, EARLY) == [(0,)]


@on_rabbitmq
def test_c15_no_delay_ends_early(herd: Any, court: Court, effects: Effects, engine: Engine, start_worker: Any) -> None:
    """0.3 s, 40 days, and twenty in a row."""
    start_worker(APP, options=QUICK)
    short = herd.patient.delay(times=1, delay_s=0.3).id
    many = herd.patient.delay(times=20).id
    days = herd.patient.delay(times=1, delay_s=40 * herd.DAY_S).id
    found = court.wait_succeeded([short, many])
    assert [(found[UUID(job_id)].failures, effects.starts(job_id)) for job_id in (short, many)] == [(1, 2), (20, 21)]
    assert rows(engine, "SELECT count(*) FROM job_events WHERE event = 'retry_scheduled'") == [(22,)]
    assert rows(engine, EARLY) == [(0,)]
    due = "SELECT extract(epoch FROM not_before - clock_timestamp()) / 86400, state::text FROM jobs WHERE job_id = :id"
    ((in_days, state),) = rows(engine, due, id=days)
    assert state == "retry_wait"
    assert 39.9 < in_days < 40.1
    stays_true(lambda: effects.starts(days) == 1, 0.5)
    with engine.begin() as connection:  # forty days pass
        connection.execute(text("UPDATE jobs SET not_before = clock_timestamp() WHERE job_id = :id"), {"id": days})
        connection.execute(text("UPDATE outbox SET due_at = clock_timestamp() WHERE job_id = :id"), {"id": days})
    court.wait_succeeded([days])


@on_rabbitmq
@pytest.mark.environment(DEADSURE_PREFETCH="2", DEADSURE_WINDOW="20")
def test_c14_those_who_wait_are_not_in_the_way(
    broker: BrokerNode, herd: Any, jobs: Any, court: Court, effects: Effects, engine: Engine, start_worker: Any
) -> None:
    """More jobs to be tried again in half an hour than prefetch and window hold: the next one starts at once."""
    start_worker(APP, concurrency=1, options=QUICK)
    waiting = [herd.patient.delay(times=1, delay_s=1800).id for _ in range(40)]
    for job_id in waiting:
        court.wait_case(job_id, lambda case: case.state == "retry_wait", "waits")
    assert broker.depth("jobs") == 0
    urgent = jobs.leased_effect.delay(n=1).id
    court.wait_succeeded([urgent])
    took = (
        "SELECT extract(epoch FROM min(test_effects.at) - created_at)::float8 FROM jobs JOIN test_effects"
        " USING (job_id) WHERE job_id = :id GROUP BY created_at"
    )
    ((took_s,),) = rows(engine, took, id=urgent)
    assert took_s < 3
    assert effects.starts() == 41
