"""Time limits and our own outages: a wait for the database is not counted, and after it the limit is back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.faults.conftest import Court
from tests.faults.effects import Effects
from tests.faults.jobs_limits import HARD_S
from tests.faults.points import QUICK, park, wait_parked
from tests.faults.traces import wait_quarantined
from tests.nodes.marks import on_rabbitmq
from tests.nodes.proxy import Proxy
from tests.nodes.waiting import stays_true, wait_for

pytestmark = [
    pytest.mark.usefixtures("settings"),
    pytest.mark.environment(DEADSURE_LEASE_S="30"),
    on_rabbitmq,
]
APP = "tests.faults.jobs_limits"
IN_HANDLER = ("arrow", "commit", "checkpoint", "call", "effect")


@pytest.fixture
def proxy(database_url: str) -> Iterator[Proxy]:
    """Between the workers and PostgreSQL; the test itself goes past it."""
    with Proxy.before(database_url) as made:
        yield made


@pytest.fixture
def limited(jobs: Any) -> Any:
    """`tests.faults.jobs_limits`, imported when the environment is there."""
    assert jobs
    import tests.faults.jobs_limits  # noqa: PLC0415

    return tests.faults.jobs_limits


@pytest.mark.parametrize("outage", ["refused", "silent"])
def test_an_outage_longer_than_the_limit_is_no_crash_and_no_failure(
    outage: str,
    limited: Any,
    court: Court,
    effects: Effects,
    database_url: str,
    start_worker: Any,
    proxy: Proxy,
    tmp_path: Path,
) -> None:
    """Met at the claim, in the handler's own SQL, in a checkpoint, in the ledger, at the arrow and in its commit."""
    at_claim = {how: uuid4() for how in ("claim", "overrun")}
    faults = [park("before:app.attempt.win", job_id, tmp_path) for job_id in at_claim.values()]
    worker = start_worker(
        APP,
        concurrency=len(at_claim) + len(IN_HANDLER) + 1,
        environment={"DATABASE_URL": proxy.url(database_url)},
        faults=faults,
        options=QUICK,
    )
    children = sorted(worker.children())
    for how, job_id in at_claim.items():
        limited.limited.apply_async(kwargs={"how": how, "road": str(tmp_path)}, task_id=str(job_id))
    wait_parked(tmp_path, *at_claim.values())
    held = [limited.limited.delay(how=how, road=str(tmp_path)).id for how in IN_HANDLER]
    held.append(limited.limited_atomic.delay(how="atomic", road=str(tmp_path)).id)
    wait_for(lambda: len(list(tmp_path.glob("there-*"))) == len(held), 30, "all handlers are at work", poll_s=0.02)
    proxy.refuse() if outage == "refused" else proxy.blackhole()
    for name in ("go", *(f"go-{job_id}" for job_id in at_claim.values())):
        (tmp_path / name).touch()
    stays_true(lambda: sorted(worker.children()) == children, HARD_S * 2.5, "no child is shot")
    if outage == "silent":
        proxy.cut()
    proxy.heal()
    found = court.wait_succeeded([*held, at_claim["claim"]])
    blamed = {case.job_id: (case.failures, case.crashes, case.stalls) for case in found.values()}
    overran = wait_quarantined(court, [str(at_claim["overrun"])], "killed_worker")[at_claim["overrun"]]
    del blamed[at_claim["overrun"]]
    assert set(blamed.values()) == {(0, 0, 0)}
    assert (overran.crashes, effects.starts(overran.job_id)) == (1, 1)
    assert effects.doubled() == {}
