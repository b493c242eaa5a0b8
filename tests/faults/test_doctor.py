"""`deadsure doctor` as a person or a script runs it: what it says beside real workers, and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from typing import Any

import pytest
from sqlalchemy import Engine

from app.repair import forget_orphans, repair
from db.session import connect
from tests.faults.outcomes import Outcomes
from tests.faults.points import QUICK
from tests.nodes.marks import on_rabbitmq
from tests.nodes.programs import Programs
from tests.nodes.servers import BrokerNode
from tests.nodes.waiting import wait_for

pytestmark = pytest.mark.usefixtures("settings")
WORK = ("-I", "tests.faults.jobs_messages", *QUICK)


@pytest.fixture
def outcomes(engine: Engine) -> Outcomes:
    return Outcomes(engine)


@pytest.fixture
def messages(jobs: Any) -> Any:
    """`tests.faults.jobs_messages`, imported when the environment is there."""
    assert jobs
    import tests.faults.jobs_messages  # noqa: PLC0415

    return tests.faults.jobs_messages


class Doctor:
    """Runs the command."""

    def __init__(self, programs: Programs) -> None:
        self._environment = {**programs.environment, "PYTHONPATH": "."}

    def text(self, *options: str, command: str = "doctor", **environment: str) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        arguments = [sys.executable, "-m", "tasks.cli", command, *options]
        told = {**self._environment, **environment}
        done = subprocess.run(arguments, env=told, capture_output=True, text=True, timeout=90, check=False)
        assert "Traceback" not in done.stdout + done.stderr
        return done.returncode, done.stdout, done.stderr

    def json(self, *options: str, **environment: str) -> tuple[int, dict[str, dict[str, Any]]]:
        """Exit code, and the findings that are not ok by their code; each has a next step."""
        code, out, error = self.text("--json", *options, **environment)
        findings: list[dict[str, Any]] = json.loads(out)
        assert findings, error
        news = {found["code"]: found for found in findings if found["severity"] != "ok"}
        assert all(found["next_step"] for found in news.values())
        return code, news

    def codes(self, *options: str, **environment: str) -> tuple[int, dict[str, str]]:
        """Exit code, and severities by code, those that are only information left out."""
        code, news = self.json(*options, **environment)
        return code, {name: one["severity"] for name, one in news.items() if one["severity"] != "info"}


@pytest.fixture
def doctor(programs: Programs) -> Doctor:
    return Doctor(programs)


def test_a_system_at_work_is_healthy(
    broker: BrokerNode,
    messages: Any,
    jobs: Any,
    database_url: str,
    outcomes: Outcomes,
    start_worker: Any,
    doctor: Doctor,
) -> None:
    """Success and quarantine leave no warning on either broker, and the probe leaves no dead letter.

    All the while somebody repairs without any patience: no arrow leaves anything to mend, not even for a moment.
    """
    start_worker(options=WORK)
    for n in range(20):
        jobs.leased_effect.delay(n=n)
        jobs.atomic.delay(n=n)
    messages.hopeless.delay(n=1)
    wanted = {"succeeded": 40, "quarantined": 1}
    with closing(connect(database_url, "impatient")) as hand:

        def done() -> bool:
            assert repair(hand, age_s=0.0) == forget_orphans(hand) == []
            return outcomes.states() == wanted

        wait_for(done, 60, "all is done", poll_s=0.001)
    wait_for(lambda: outcomes.value("SELECT count(*) FROM dead_letters") == 1, 30, "its dead letter is there")
    code, news = doctor.json("--strict")
    assert (code, set(news) - {"queue.few_members"}) == (0, {"quarantine.waiting"}), news
    code, out, _ = doctor.text()
    assert code == 0
    if broker.is_rabbitmq:
        assert "a probe went through the dead-letter exchange into dead_letters" in out
    else:
        assert "the task layer publishes the copies" in out
    assert "every waiting job is known to this code" in out
    assert outcomes.value("SELECT count(*) FROM dead_letters") == 1


@on_rabbitmq
def test_a_broker_that_never_saw_a_worker_is_a_beginning_and_no_error(doctor: Doctor) -> None:
    code, news = doctor.json()
    assert code == 0
    assert {name: one["next_step"] for name, one in news.items()} == {
        "workers.never": "celery -A tasks worker",
        "broker.untouched": "celery -A tasks worker",
    }


@on_rabbitmq
def test_pre_deploy_lists_waiting_jobs_that_the_code_does_not_know(
    engine: Engine, messages: Any, outcomes: Outcomes, doctor: Doctor
) -> None:
    for n in range(3):
        messages.foreign.delay(n=n)
    code, out, _ = doctor.text("--pre-deploy")
    assert code == 1
    assert "tests.foreign" in out
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE jobs SET type = 'ledger.post', schema_version = 9")
    what = doctor.json("--pre-deploy")[1]["jobs.unknown_type"]["what"]
    assert what == "3 jobs of ledger.post version 9 wait, and this code does not know it"
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE jobs SET schema_version = 1")
    assert doctor.json("--pre-deploy") == (0, {})
    assert outcomes.states() == {"queued": 3}


@on_rabbitmq
def test_fix_gives_stuck_jobs_their_debt_and_nothing_else(
    engine: Engine, jobs: Any, outcomes: Outcomes, doctor: Doctor
) -> None:
    stuck, healthy = (jobs.atomic.delay(n=n).id for n in range(2))
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE jobs SET type = 'ledger.post'")
        connection.exec_driver_sql("DELETE FROM outbox WHERE job_id = %s", (stuck,))
        connection.exec_driver_sql(
            "INSERT INTO outbox (job_id, queue, type, schema_version, correlation_id)"
            " VALUES (gen_random_uuid(), 'jobs', 'ledger.post', 1, '')"
        )
    code, news = doctor.json()
    assert code == 1
    assert {name for name, one in news.items() if one["next_step"] == "deadsure doctor --fix"} == {
        "jobs.stuck",
        "outbox.without_job",
    }
    assert outcomes.debts() == 2  # a look mends nothing
    code, news = doctor.json("--fix")
    assert news["doctor.fixed"]["what"] == "1 missing debts were created, 1 that nobody needs were deleted"
    assert (code, {"jobs.stuck", "outbox.without_job"} & set(news)) == (0, set())
    owed = {str(row.job_id) for row in outcomes.rows("SELECT job_id FROM outbox")}
    assert owed == {stuck, healthy}
    assert len(outcomes.events("repaired", stuck)) == 1


@on_rabbitmq
def test_exit_codes_and_servers_that_are_away(engine: Engine, doctor: Doctor) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "INSERT INTO accounts (name, email, currency, created_at)"
            " VALUES ('n', 'a@example.com', 'EUR', now() - interval '1 hour')"
        )
    assert doctor.codes() == (0, {"expected.missing": "warning"})
    assert doctor.codes("--strict") == (1, {"expected.missing": "warning"})
    assert doctor.text("emails.welcome", "--missing", "--yes", command="submit")[:2] == (
        0,
        "1 of 1 missing jobs of emails.welcome submitted.\n",
    )
    away = "amqp://guest:guest@127.0.0.1:9//"
    code, seen = doctor.codes(BROKER_URL=away)
    assert (code, seen["broker.unreachable"]) == (2, "error")
    assert "expected.missing" not in seen
    assert doctor.json(BROKER_URL="")[1]["broker.url"]["severity"] == "error"
    away = "postgresql+psycopg2://nobody@127.0.0.1:9/none"
    code, found = doctor.json(DATABASE_URL=away)
    assert (code, found["database.unreachable"]["checked"]) == (2, False)
    assert found["broker.untouched"]["severity"] == "info"  # what the other server can tell is told


@on_rabbitmq
def test_a_database_without_a_schema(empty_database_url: str, doctor: Doctor) -> None:
    code, found = doctor.json(DATABASE_URL=empty_database_url)
    assert (code, set(found)) == (1, {"database.schema"})
