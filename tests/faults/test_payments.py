"""`payments.charge` on a payment service that misbehaves: it answers for its keys, so every way ends in one charge."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, text

from tests.faults.conftest import Court
from tests.faults.far_side.payment_service import PaymentService
from tests.faults.inject import Fault
from tests.faults.judge import Case
from tests.faults.points import QUICK
from tests.faults.traces import calls, wait_both_traces
from tests.nodes.marks import on_own_postgres, on_rabbitmq
from tests.nodes.servers import ServerNode
from tests.nodes.waiting import wait_for

pytestmark = [on_rabbitmq, pytest.mark.usefixtures("settings")]
CHARGED = "after:app.domain.payments.charge"
AMOUNT = 733_137


@pytest.fixture
def service() -> Iterator[PaymentService]:
    with PaymentService() as made:
        yield made


@pytest.fixture
def environment(environment: dict[str, str], service: PaymentService) -> dict[str, str]:
    return {**environment, "PAYMENTS_URL": service.url, "DEADSURE_CALL_TIMEOUT_S": "1"}


@pytest.fixture
def charge(settings: object, engine: Engine) -> Any:
    """Submits a charge: the job's id."""
    assert settings
    from tasks.payments import charge_account  # noqa: PLC0415  reads the environment

    with engine.begin() as connection:
        insert = text("INSERT INTO accounts (name, email, currency) VALUES ('Ada', 'a@b', 'EUR') RETURNING account_id")
        number = int(connection.scalar(insert))

    def submit(charge_id: str, account_id: int = number) -> UUID:
        submitted = charge_account.delay(
            charge_id=charge_id, account_id=account_id, amount_cents=AMOUNT, currency="EUR"
        )
        return UUID(submitted.id)

    return submit


@dataclass(frozen=True)
class Story:
    """What the service does with one charge, what it is asked and tells, how the job ends; `cause` None: well."""

    behaviours: tuple[str, ...]
    requests: tuple[tuple[str, int | None], ...]
    cause: str | None = None
    charges: int = 1
    status: str | None = None
    always: str | None = None


POST, GET = "POST", "GET"
STORIES = {
    "well": Story((), ((POST, 201),)),
    "broken": Story(("500", "503"), ((POST, 500), (GET, 404), (POST, 503), (GET, 404), (POST, 201))),
    "busy": Story(("429 3",), ((POST, 429), (POST, 201))),
    "invalid": Story(("422",), ((POST, 422),), "permanent", 0),
    "timeout": Story(("time out after applying",), ((POST, None), (GET, 200))),
    "cut-before": Story(("drop before applying",), ((POST, None), (GET, 404), (POST, 201))),
    "cut-after": Story(("drop after applying",), ((POST, None), (GET, 200))),
    "broken-after": Story(("500 after applying",), ((POST, 500), (GET, 200))),
    "nonsense": Story(("nonsense after applying",), ((POST, 200), (GET, 200))),
    "in-flight": Story(("409",), ((POST, 409), (GET, 404), (POST, 201))),
    "no-status": Story(("time out after applying",), ((POST, None), (GET, 500), (POST, 201)), status="500"),
    "never": Story((), ((POST, 503), *((GET, 404), (POST, 503)) * 4), "attempts_spent", 0, always="503"),
}


def failures(story: Story) -> int:
    posts = [told for what, told in story.requests if what == POST]
    answered = [told for _, told in story.requests[-1:] if told in (200, 201)]
    return len(posts) if not answered or story.requests[-1][0] == GET else len(posts) - 1


def retries_and_claims(case: Case) -> list[tuple[Any, Any]]:
    """When each retry was written, and when the attempt after it was claimed."""
    return [(retry.at, claim.at) for retry, claim in zip(case.events("retry"), case.events("claim")[1:], strict=False)]


def test_whatever_the_service_does(
    service: PaymentService, charge: Any, court: Court, engine: Engine, start_worker: Any
) -> None:
    worker = start_worker(options=QUICK)
    jobs: dict[str, UUID] = {}
    for charge_id, story in STORIES.items():
        service.behaviour.then(charge_id, *story.behaviours)
        if story.always:
            service.behaviour.always(charge_id, story.always)
        if story.status:
            service.behaviour.always(f"GET {charge_id}", story.status)
        jobs[charge_id] = charge(charge_id)
    found = court.wait_succeeded(jobs[charge_id] for charge_id, story in STORIES.items() if story.cause is None)
    for charge_id, story in STORIES.items():
        job_id = jobs[charge_id]
        if story.cause is not None:
            assert wait_both_traces(court, job_id).cause == story.cause, charge_id
        case = court.case(job_id)
        assert service.requests(charge_id) == list(story.requests), charge_id
        made = service.charges(charge_id)
        assert len(made) == story.charges, charge_id
        assert {asked.key for asked in service.asked if asked.charge_id == charge_id} == {f"{job_id}:charge"}
        assert (case.failures, case.crashes) == (failures(story), 0), charge_id
        assert recorded(engine, job_id) == [(charge_id, AMOUNT, "EUR")] * story.charges, charge_id
        if story.cause is None:
            assert found[job_id].result_key == f"charge:ch_{service.applied.index(made[0])}", charge_id
    ((failed, again),) = retries_and_claims(court.case(jobs["busy"]))
    assert again - failed >= timedelta(seconds=3), "not before Retry-After"
    court.wait_succeeded([charge("next")])
    logs = worker.logs()
    for private in ("t0ken", str(AMOUNT)):
        assert private not in logs


def recorded(engine: Engine, job_id: UUID) -> list[tuple[Any, ...]]:
    with engine.connect() as connection:
        query = text("SELECT charge_id, amount_cents, currency FROM charges WHERE job_id = :job_id")
        return [tuple(row) for row in connection.execute(query, {"job_id": job_id})]


def test_down_for_a_while(service: PaymentService, charge: Any, court: Court, start_worker: Any) -> None:
    service.stop()
    start_worker(options=QUICK)
    job_id = charge("c-1")
    court.wait_case(job_id, lambda case: case.failures >= 2, "is put off")
    service.start()
    court.wait_succeeded([job_id])
    assert service.requests("c-1") == [("POST", 201)]


def test_one_charge_however_often_it_is_asked_for(
    service: PaymentService, charge: Any, court: Court, start_worker: Any
) -> None:
    jobs = {charge("c-1") for _ in range(3)}
    assert len(jobs) == 1
    start_worker(options=QUICK)
    court.wait_succeeded(jobs)
    assert charge("c-1") in jobs
    assert len(service.applied) == 1


def test_no_account_no_request(service: PaymentService, charge: Any, court: Court, start_worker: Any) -> None:
    start_worker(options=QUICK)
    traces = wait_both_traces(court, charge("c-1", account_id=4711))
    assert (traces.cause, "UnknownAccount" in traces.reason) == ("permanent", True)
    assert service.asked == []


@pytest.mark.parametrize("who", ["self", "main"])
def test_killed_after_the_charge_was_made(
    who: Any, service: PaymentService, charge: Any, court: Court, engine: Engine, start_worker: Any, tmp_path: Path
) -> None:
    """The next attempt asks by the key, and charges nothing."""
    worker = start_worker(faults=[Fault(CHARGED, "kill", who=who, once_file=str(tmp_path / "once"))], options=QUICK)
    job_id = charge("c-1")
    if who == "main":
        assert worker.wait(60) == 137
        start_worker(options=QUICK)
    case = court.wait_succeeded([job_id])[job_id]
    assert (case.attempt, case.failures, case.crashes) == (2, 0, 1)
    assert calls(engine, job_id) == [("charge", "finished", 2)]
    assert service.requests("c-1") == [("POST", 201), ("GET", 200)]
    assert len(service.applied) == 1


def test_killed_again_and_again_in_the_call(
    service: PaymentService, charge: Any, court: Court, engine: Engine, start_worker: Any
) -> None:
    """A call that kills its workers is quarantined as such; the ledger still says that it was started."""
    start_worker(faults=[Fault("before:app.domain.payments.charge", "kill", match="'c-1'")], options=QUICK)
    job_id = charge("c-1")
    traces = wait_both_traces(court, job_id)
    case = court.case(job_id)
    assert (traces.cause, case.crashes, case.attempt) == ("killed_worker", 3, 3)
    assert calls(engine, job_id) == [("charge", "started", 3)]
    court.wait_succeeded([charge("c-2")])
    assert [len(service.charges(charge_id)) for charge_id in ("c-1", "c-2")] == [0, 1]


@on_own_postgres
def test_the_database_restarts_between_the_charge_and_its_record(
    postgres: ServerNode, service: PaymentService, charge: Any, court: Court, start_worker: Any, tmp_path: Path
) -> None:
    made, go = tmp_path / "made", tmp_path / "go"
    start_worker(faults=[Fault(CHARGED, "wait_file", announce=str(made), until=str(go))], options=QUICK)
    job_id = charge("c-1")
    wait_for(made.exists, 60, "the charge is made")
    postgres.kill()
    go.touch()
    postgres.start()
    case = court.wait_succeeded([job_id])[job_id]
    assert (case.failures, case.crashes) == (0, 0)
    assert service.requests("c-1") == [("POST", 201)]
