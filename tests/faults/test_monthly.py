"""`reports.monthly`: wherever its coordinator is killed or stopped, each active account gets one report.

And the month gets one summary, when all reports are there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, text

from tests.faults.conftest import Court
from tests.faults.inject import Fault
from tests.faults.judge import cases
from tests.faults.points import QUICK
from tests.nodes.marks import on_rabbitmq
from tests.nodes.waiting import wait_for

pytestmark = [on_rabbitmq, pytest.mark.usefixtures("settings")]
MONTH = "2026-10"
ACCOUNTS, ACTIVE = 60, 55  # three pages of `small_pages_app`
APP = "tests.faults.small_pages_app"
# (what the coordinator has done when it is killed, where that is, at which page)
POINTS = [
    ("a page is written, not committed", "after:app.batches.submit_children", 1),
    ("a page is committed", "after:app.batches.submit_page", 2),
    ("the source is exhausted, not committed", "after:app.batches.submit_children", 4),
    ("all is ordered", "before:app.finish.succeed", 1),
]


@pytest.fixture
def monthly(settings: object, engine: Engine) -> Any:
    """Makes the accounts; the task."""
    assert settings
    from tasks.monthly import monthly_reports  # noqa: PLC0415  reads the environment

    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO accounts (name, email, currency, active)"
                " SELECT 'Ada', 'a' || n || '@b', 'EUR', n % 12 <> 0 FROM generate_series(1, :n) AS n"
            ),
            {"n": ACCOUNTS},
        )
    return monthly_reports


def assert_one_report_each(engine: Engine, parent: UUID) -> None:
    """Every active account has one child, and nobody else has."""
    with engine.connect() as connection:
        ordered = connection.execute(
            text(
                "SELECT count(*), count(DISTINCT payload ->> 'account_id'),"
                "       bool_and(accounts.active), bool_and(payload ->> 'month' = :month),"
                "       bool_and(idempotency_key = :month AND scope = 'acct-' || account_id),"
                "       bool_and(parent_id = :parent AND batch_id = :parent)"
                "  FROM jobs JOIN accounts ON account_id = (payload ->> 'account_id')::bigint"
                " WHERE type = 'reports.export'"
            ),
            {"month": MONTH, "parent": parent},
        ).one()
    assert tuple(ordered) == (ACTIVE, ACTIVE, True, True, True, True)


def wait_summary(court: Court, engine: Engine, batch_id: UUID) -> None:
    """One summary comes, of all reports; its job is judged like any other."""
    with engine.connect() as connection:
        found = text("SELECT completion_id FROM batches WHERE batch_id = :batch_id")
        completion_id = connection.scalar(found, {"batch_id": batch_id})
        wait_for(lambda: completion_id in cases(engine), 90, "the completion job is there")
        court.wait_succeeded([completion_id])
        rows = connection.execute(text("SELECT batch_id, month, reports, missing FROM monthly_summaries")).all()
    assert [tuple(row) for row in rows] == [(batch_id, MONTH, ACTIVE, 0)]


def result(engine: Engine, job_id: UUID) -> Any:
    with engine.connect() as connection:
        return connection.scalar(text("SELECT result FROM jobs WHERE job_id = :job_id"), {"job_id": job_id})


@pytest.mark.parametrize(("at", "page"), [point[1:] for point in POINTS], ids=[f"{p[0]}-{p[2]}" for p in POINTS])
def test_killed_at_any_page(
    at: str, page: int, monthly: Any, court: Court, engine: Engine, start_worker: Any, tmp_path: Path
) -> None:
    struck = tmp_path / "struck"
    match = "type='reports.monthly'" if at.endswith("succeed") else None  # no report submits a page
    start_worker(APP, faults=[Fault(at, "kill", when=page, match=match, once_file=str(struck))], options=QUICK)
    job_id = UUID(monthly.delay(month=MONTH).id)
    case = court.wait_succeeded([job_id])[job_id]
    assert struck.exists()
    assert (case.attempt, case.crashes, case.failures) == (2, 1, 0)
    assert_one_report_each(engine, job_id)
    assert result(engine, job_id) == {"children": ACTIVE}
    wait_summary(court, engine, job_id)


def test_a_worker_that_leaves_hands_over_at_a_page(
    monthly: Any, court: Court, engine: Engine, start_worker: Any, tmp_path: Path
) -> None:
    saved, go = tmp_path / "saved", tmp_path / "go"
    hold = Fault("after:app.batches.submit_page", "wait_file", announce=str(saved), until=str(go))
    first = start_worker(APP, faults=[hold], options=QUICK)
    job_id = UUID(monthly.delay(month=MONTH).id)
    wait_for(saved.exists, 60, "the first page is saved")
    first.kill("SIGTERM")
    wait_for(lambda: "shutdown" in first.logs().lower(), 30, "it was asked to stop")
    go.touch()
    assert first.wait(90) == 0
    case = court.case(job_id)
    assert (case.state, case.releases, case.crashes) == ("queued", 1, 0)
    start_worker(APP, options=QUICK)
    case = court.wait_succeeded([job_id])[job_id]
    assert (case.attempt, case.releases, case.failures) == (2, 1, 0)
    assert_one_report_each(engine, job_id)
    assert result(engine, job_id) == {"children": ACTIVE}
    wait_summary(court, engine, job_id)
    assert monthly.delay(month=MONTH).id == str(job_id), "a second order of the month is the first one"
    assert_one_report_each(engine, job_id)
