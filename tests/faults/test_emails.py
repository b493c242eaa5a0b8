"""`emails.welcome` on a mail server that misbehaves: it can be asked nothing, so what is uncertain stays one mail."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, text

from tests.faults.conftest import Court
from tests.faults.far_side.mail_server import MailServer
from tests.faults.inject import Fault
from tests.faults.points import QUICK
from tests.faults.traces import calls, wait_both_traces
from tests.nodes.marks import on_own_postgres, on_rabbitmq
from tests.nodes.servers import ServerNode
from tests.nodes.waiting import wait_for

pytestmark = [on_rabbitmq, pytest.mark.usefixtures("settings")]
SENT = "after:app.domain.smtp.deliver"
RECORDED = "after:app.effects.Caller.finish"


@pytest.fixture
def server() -> Iterator[MailServer]:
    with MailServer() as made:
        yield made


@pytest.fixture
def environment(environment: dict[str, str], server: MailServer) -> dict[str, str]:
    return {**environment, "SMTP_URL": server.url, "DEADSURE_CALL_TIMEOUT_S": "1"}


@pytest.fixture
def welcome(settings: object, engine: Engine) -> Any:
    """Makes an account with this address and submits its welcome mail: the job's id."""
    assert settings
    from tasks.emails import welcome  # noqa: PLC0415  reads the environment

    def submit(address: str) -> UUID:
        return UUID(welcome.delay(account_id=account(engine, address)).id)

    return submit


def account(engine: Engine, address: str) -> int:
    with engine.begin() as connection:
        insert = text("INSERT INTO accounts (name, email, currency) VALUES ('Zoë', :e, 'EUR') RETURNING account_id")
        return int(connection.scalar(insert, {"e": address}))


@dataclass(frozen=True)
class Story:
    """What the server does with one recipient, and how the job ends; `cause` None: it succeeds."""

    behaviours: tuple[str, ...]
    mails: int
    failures: int
    cause: str | None = None
    always: str | None = None


STORIES = {
    "well": Story((), 1, 0),
    "put.off.twice": Story(("450", "451 after DATA"), 1, 2),
    "cut.before.data": Story(("drop at RCPT",), 1, 1),
    "no.such.user": Story(("550",), 0, 1, "permanent"),
    "taken.for.spam": Story(("554 after DATA",), 0, 1, "permanent"),
    "put.off.then.no": Story(("451 after DATA", "550"), 0, 2, "permanent"),
    "cut.before.accepting": Story(("drop before accepting",), 0, 1, "uncertain"),
    "cut.after.accepting": Story(("drop after accepting",), 1, 1, "uncertain"),
    "put.off.then.cut": Story(("450", "drop after accepting"), 1, 2, "uncertain"),
    "slow": Story(("slow",), 1, 1, "uncertain"),
    "nonsense": Story(("nonsense",), 1, 1, "uncertain"),
    "never": Story((), 0, 5, "attempts_spent", always="450"),
}


def test_whatever_the_server_does(
    server: MailServer, welcome: Any, court: Court, engine: Engine, start_worker: Any
) -> None:
    worker = start_worker(options=QUICK)
    jobs: dict[str, UUID] = {}
    for name, story in STORIES.items():
        address = f"{name}@example.com"
        server.behaviour.then(address, *story.behaviours)
        if story.always:
            server.behaviour.always(address, story.always)
        jobs[name] = welcome(address)
    good = [jobs[name] for name, story in STORIES.items() if story.cause is None]
    found = court.wait_succeeded(good)
    for name, story in STORIES.items():
        job_id = jobs[name]
        if story.cause is not None:
            traces = wait_both_traces(court, job_id)
            assert traces.cause == story.cause, name
        case = court.case(job_id)
        assert (case.failures, case.crashes, case.attempt) == (story.failures, 0, max(1, case.attempt)), name
        assert case.attempt == story.failures + (story.cause is None), name
        mails = server.to(f"{name}@example.com")
        assert len(mails) == story.mails, name
        assert {mail.message["Message-ID"] for mail in mails} <= {f"<{job_id}@localhost>"}, name
        expected = {None: [("smtp", "finished", case.attempt)], "uncertain": [("smtp", "started", case.attempt)]}
        assert calls(engine, job_id) == expected.get(story.cause, []), name
        if story.cause is None:
            assert found[job_id].result_key == f"<{job_id}@localhost>"
    court.wait_succeeded([welcome("next@example.com")])
    assert len(server.to("next@example.com")) == 1
    logs = worker.logs()
    for private in ("example.com", "Zoë", "ssword", "p@ss"):
        assert private not in logs


def test_down_for_a_while(server: MailServer, welcome: Any, court: Court, start_worker: Any) -> None:
    server.stop()
    start_worker(options=QUICK)
    job_id = welcome("ada@example.com")
    court.wait_case(job_id, lambda case: case.failures >= 2, "is put off")
    server.start()
    case = court.wait_succeeded([job_id])[job_id]
    assert case.events("retry_scheduled")[0].reason is not None
    assert "MailServerAway in smtp.py" in str(case.events("retry_scheduled")[0].reason)
    assert len(server.accepted) == 1


def test_one_mail_for_an_account_however_often_it_is_asked_for(
    server: MailServer, court: Court, engine: Engine, start_worker: Any
) -> None:
    from tasks.emails import welcome  # noqa: PLC0415  reads the environment

    number = account(engine, "ada@example.com")
    first = [welcome.delay(account_id=number).id for _ in range(3)]
    start_worker(options=QUICK)
    court.wait_succeeded(first)
    again = welcome.delay(account_id=number)
    assert {*first, again.id} == {first[0]}
    assert again.get(timeout=10) == {"message_id": f"<{first[0]}@localhost>"}
    assert len(server.accepted) == 1


def test_no_account_and_no_address(server: MailServer, welcome: Any, court: Court, start_worker: Any) -> None:
    from tasks.emails import welcome as task  # noqa: PLC0415  reads the environment

    start_worker(options=QUICK)
    nobody, nowhere = UUID(task.delay(account_id=4711).id), welcome("a@b, c@d")
    assert "UnknownAccount" in wait_both_traces(court, nobody).reason
    assert "UndeliverableAddress" in wait_both_traces(court, nowhere).reason
    assert server.sessions == 0


@pytest.mark.parametrize("who", ["self", "main"])
def test_killed_after_the_mail_was_sent(
    who: Any, server: MailServer, welcome: Any, court: Court, engine: Engine, start_worker: Any, tmp_path: Path
) -> None:
    """Nobody can say whether it was: the mail stays one mail, and a person decides."""
    worker = start_worker(faults=[Fault(SENT, "kill", who=who, once_file=str(tmp_path / "once"))], options=QUICK)
    job_id = welcome("ada@example.com")
    if who == "main":
        assert worker.wait(60) == 137
        start_worker(options=QUICK)
    traces = wait_both_traces(court, job_id)
    assert (traces.cause, traces.attempt) == ("uncertain", 2)
    case = court.case(job_id)
    assert (case.failures, case.crashes + case.stalls) == (1, 1)
    assert calls(engine, job_id) == [("smtp", "started", 1)]
    court.wait_succeeded([welcome("next@example.com")])
    assert [len(server.to(f"{name}@example.com")) for name in ("ada", "next")] == [1, 1]


@pytest.mark.parametrize("who", ["self", "main"])
def test_killed_after_the_call_was_recorded(
    who: Any, server: MailServer, welcome: Any, court: Court, engine: Engine, start_worker: Any, tmp_path: Path
) -> None:
    """The next attempt finds the result, and sends nothing."""
    worker = start_worker(faults=[Fault(RECORDED, "kill", who=who, once_file=str(tmp_path / "once"))], options=QUICK)
    job_id = welcome("ada@example.com")
    if who == "main":
        assert worker.wait(60) == 137
        start_worker(options=QUICK)
    case = court.wait_succeeded([job_id])[job_id]
    assert (case.attempt, case.failures, case.crashes + case.stalls) == (2, 0, 1)
    assert calls(engine, job_id) == [("smtp", "finished", 1)]
    assert len(server.accepted) == 1


@on_own_postgres
def test_the_database_restarts_between_the_mail_and_its_record(
    postgres: ServerNode, server: MailServer, welcome: Any, court: Court, start_worker: Any, tmp_path: Path
) -> None:
    """The worker keeps what it knows until the ledger has it; nobody is blamed, nothing is uncertain."""
    sent, go = tmp_path / "sent", tmp_path / "go"
    start_worker(faults=[Fault(SENT, "wait_file", announce=str(sent), until=str(go))], options=QUICK)
    job_id = welcome("ada@example.com")
    wait_for(sent.exists, 60, "the mail is sent")
    postgres.kill()
    go.touch()
    postgres.start()
    case = court.wait_succeeded([job_id])[job_id]
    assert (case.failures, case.crashes) == (0, 0)
    assert len(server.accepted) == 1
