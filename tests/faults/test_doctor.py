"""`deadsure doctor`: what it finds, what it says, and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from kombu import Connection, Queue
from sqlalchemy import Engine

from tasks.topology import quarantine_queue
from tests.faults.outcomes import Outcomes
from tests.faults.points import QUICK
from tests.nodes.marks import on_rabbitmq, on_valkey
from tests.nodes.programs import Programs
from tests.nodes.servers import BrokerNode
from tests.nodes.waiting import wait_for

pytestmark = pytest.mark.usefixtures("settings")
ARRIVED = "a probe went through the dead-letter exchange into dead_letters"
KNOWN = "every waiting job is known to this code"


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
    """Runs the command as a person or a script does."""

    def __init__(self, programs: Programs) -> None:
        self._environment = {**programs.environment, "PYTHONPATH": "."}

    def text(self, *options: str, **environment: str) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        command = [sys.executable, "-m", "tasks.cli", "doctor", *options]
        told = {**self._environment, **environment}
        done = subprocess.run(command, env=told, capture_output=True, text=True, timeout=90, check=False)
        return done.returncode, done.stdout, done.stderr

    def json(self, *options: str) -> tuple[int, dict[str, list[str]]]:
        """Exit code, and what was found by severity; every finding but an ok has a next step."""
        code, out, error = self.text("--json", *options)
        findings: list[dict[str, str]] = json.loads(out)
        assert all(found["next_step"] for found in findings if found["severity"] == "error"), error
        by_severity: dict[str, list[str]] = {"ok": [], "warning": [], "error": []}
        for found in findings:
            by_severity[found["severity"]].append(found["what"])
        return code, by_severity


@pytest.fixture
def doctor(programs: Programs) -> Doctor:
    return Doctor(programs)


@on_rabbitmq
def test_a_healthy_system_is_healthy_and_the_probe_leaves_nothing(
    broker: BrokerNode, outcomes: Outcomes, start_worker: Any, doctor: Doctor
) -> None:
    start_worker(options=QUICK)
    code, found = doctor.json()
    assert (code, found["error"], found["warning"]) == (0, [], [])
    assert {ARRIVED, KNOWN, "1 workers hold a lease"} <= set(found["ok"])
    assert outcomes.value("SELECT count(*) FROM dead_letters") == 0
    assert broker.depth("quarantine") == 0
    code, out, _ = doctor.text()
    assert code == 0
    assert ARRIVED in out


@on_rabbitmq
def test_a_missing_work_queue_and_one_with_other_arguments(broker: BrokerNode, doctor: Doctor) -> None:
    with Connection(broker.url) as connection:
        quarantine_queue(amqp=True)(connection.default_channel).declare()
    _, found = doctor.json()
    assert "queue jobs was missing; it is declared now" in found["warning"]
    with Connection(broker.url) as connection:
        channel = connection.default_channel
        channel.queue_delete("jobs")
        Queue("jobs", durable=True)(channel).queue_declare()
    code, found = doctor.json()
    assert code == 1
    assert [what for what in found["error"] if what.startswith("a queue has other arguments")]


@on_valkey
def test_where_there_is_no_exchange_it_says_who_publishes_the_copies(start_worker: Any, doctor: Doctor) -> None:
    start_worker(options=QUICK)
    code, found = doctor.json()
    assert (code, found["error"]) == (0, [])
    assert [what for what in found["ok"] if "the task layer publishes the copies" in what]


@on_rabbitmq
def test_pre_deploy_lists_waiting_jobs_that_the_code_does_not_know(
    engine: Engine, messages: Any, outcomes: Outcomes, doctor: Doctor
) -> None:
    assert doctor.json("--pre-deploy") == (0, {"ok": [KNOWN], "warning": [], "error": []})
    for n in range(3):
        messages.foreign.delay(n=n)
    code, found = doctor.json("--pre-deploy")
    assert (code, found["ok"]) == (1, [])
    assert found["error"] == ["3 jobs of tests.foreign version 1 wait, and this code does not know it"]
    code, out, _ = doctor.text("--pre-deploy")
    assert code == 1
    assert "tests.foreign" in out
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE jobs SET type = 'ledger.post', schema_version = 9")
    assert doctor.json("--pre-deploy")[1]["error"] == [
        "3 jobs of ledger.post version 9 wait, and this code does not know it"
    ]
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE jobs SET schema_version = 1")
    assert doctor.json("--pre-deploy")[0] == 0
    assert outcomes.states() == {"queued": 3}


@on_rabbitmq
def test_missing_traces_and_jobs_that_nobody_sends(
    engine: Engine, messages: Any, outcomes: Outcomes, start_worker: Any, doctor: Doctor
) -> None:
    start_worker(options=("--without-relay", *QUICK))
    job = messages.hopeless.delay(n=1)
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "UPDATE jobs SET type = 'ledger.post', state = 'quarantined', cause = 'permanent', episode = 1"
        )
        connection.exec_driver_sql("UPDATE outbox SET kind = 'trace', sends = 8, sent_at = now(), due_at = 'infinity'")
        connection.exec_driver_sql(
            "INSERT INTO quarantine_entries (job_id, episode, cause, fingerprint, reason, attempt, quarantined_at)"
            " SELECT job_id, 1, 'permanent', 'f', 'r', 1, now() - interval '1 hour' FROM jobs"
        )
    messages.foreign.delay(n=2)
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE jobs SET type = 'ledger.post' WHERE state = 'queued'")
        connection.exec_driver_sql("UPDATE outbox SET due_at = now() - interval '1 hour' WHERE kind = 'wake'")
    code, found = doctor.json()
    assert code == 1
    assert found["error"] == ["1 quarantined jobs lack their dead letter"]
    assert [what for what in found["warning"] if what.startswith("1 jobs are due")]
    wait_for(lambda: outcomes.states()["quarantined"] == 1, 10, job.id)


@on_rabbitmq
def test_servers_that_are_away_are_an_error_and_no_traceback(doctor: Doctor) -> None:
    code, out, error = doctor.text(BROKER_URL="amqp://guest:guest@127.0.0.1:9//")
    assert code != 0
    assert "Traceback" not in out + error
    code, out, error = doctor.text(DATABASE_URL="postgresql+psycopg2://nobody@127.0.0.1:9/none")
    assert code != 0
    assert "Traceback" not in out + error
