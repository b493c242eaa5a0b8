"""Two traces of every quarantined job: the row, and the message that came through the dead-letter exchange."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from kombu import Connection
from sqlalchemy import Engine

from app.outbox import TRACE_OFFERS
from tests.faults.inject import Fault
from tests.faults.outcomes import Outcomes
from tests.faults.points import QUICK
from tests.faults.raw_messages import Raw, our_headers, send
from tests.nodes.marks import on_rabbitmq
from tests.nodes.programs import Programs
from tests.nodes.servers import BrokerNode
from tests.nodes.waiting import stays_true, wait_for

pytestmark = [
    pytest.mark.usefixtures("settings"),
    pytest.mark.environment(DEADSURE_RESEND_FIRST_S="0.5", DEADSURE_RESEND_MAX_S="2", DEADSURE_EVIDENCE_AGE_S="1"),
]
OPTIONS = (*QUICK, "-I", "tests.faults.jobs_messages")
BARE = ("--without-relay", *OPTIONS)
TRACES = """
SELECT entry.job_id::text, entry.episode, entry.cause, dead_lettered_at IS NOT NULL AS stamped,
       (SELECT count(*) FROM dead_letters letter
         WHERE letter.job_id = entry.job_id AND letter.episode = entry.episode) AS letters
  FROM quarantine_entries entry JOIN jobs ON jobs.job_id = entry.job_id AND jobs.episode = entry.episode
"""
TRACE_DEBTS = "SELECT job_id::text, sends, due_at = 'infinity' AS given_up FROM outbox WHERE kind = 'trace'"


@pytest.fixture
def outcomes(engine: Engine) -> Outcomes:
    return Outcomes(engine)


@pytest.fixture
def messages(jobs: Any) -> Any:
    """`tests.faults.jobs_messages`, imported when the environment is there."""
    assert jobs
    import tests.faults.jobs_messages  # noqa: PLC0415

    return tests.faults.jobs_messages


def wait_traced(outcomes: Outcomes, count: int, timeout_s: float = 60) -> None:
    """Wait until so many jobs are quarantined with both traces and nobody owes any more."""
    wait_for(
        lambda: sum(row.stamped for row in outcomes.rows(TRACES)) == count and not outcomes.debts(),
        timeout_s,
        f"{count} jobs with both traces",
    )
    assert outcomes.states()["quarantined"] == count
    assert all(row.letters >= 1 for row in outcomes.rows(TRACES))


def wait_quarantined(outcomes: Outcomes, count: int) -> None:
    wait_for(lambda: outcomes.states()["quarantined"] == count, 60, f"{count} jobs are quarantined")


def doctor(programs: Programs) -> tuple[int, list[dict[str, str]]]:
    """Exit code and findings of `deadsure doctor --json`."""
    command = [sys.executable, "-m", "tasks.cli", "doctor", "--json"]
    environment = {**programs.environment, "PYTHONPATH": "."}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, json.loads(done.stdout)


def unbind(broker: BrokerNode) -> None:
    """Take away the binding of the queue `quarantine`."""
    with Connection(broker.url) as connection:
        connection.default_channel.queue_unbind("quarantine", "jobs.dlx", "quarantine")


def delete_queue(broker: BrokerNode) -> None:
    """Delete the queue `quarantine` with what is in it."""
    with Connection(broker.url) as connection:
        connection.default_channel.queue_delete("quarantine")


def test_a_quarantined_job_has_both_traces(
    broker: BrokerNode, messages: Any, outcomes: Outcomes, start_worker: Any
) -> None:
    start_worker(options=OPTIONS)
    job = messages.hopeless.delay(n=1)
    wait_traced(outcomes, 1)
    letter = outcomes.rows("SELECT job_id::text, episode, source, reason, headers FROM dead_letters")[0]
    assert (letter.job_id, letter.episode) == (job.id, 1)
    assert letter.source == ("broker" if broker.is_rabbitmq else "task layer")
    assert [event.reason for event in outcomes.events("dead_lettered", job.id)] == [letter.source]
    if broker.is_rabbitmq:
        assert letter.headers["x-death"][0]["reason"] == "rejected"
        wait_for(lambda: outcomes.events("reject_sent", job.id), 30, "the reject is in the journal")


@on_rabbitmq
@pytest.mark.environment(DEADSURE_RESEND_MAX_S="20")
@pytest.mark.parametrize("damage", [unbind, delete_queue])
def test_c16_a_lost_way_into_quarantine_loses_nothing_is_reported_and_heals(
    broker: BrokerNode, messages: Any, outcomes: Outcomes, programs: Programs, damage: Any
) -> None:
    programs.worker(options=BARE)
    # The relay sends and its intake stands still: nobody declares anything again.
    held = Fault("before:tasks.intake.Intake._read", "raise", when=0, error="builtins.OSError")
    relay = programs.relay(faults=[held])
    first = messages.hopeless.delay(n=0)
    wait_quarantined(outcomes, 1)
    wait_for(lambda: broker.depth("quarantine") >= 1, 30, "it is in the queue")
    damage(broker)
    failing = [messages.hopeless.delay(n=n).id for n in range(1, 4)]
    wait_quarantined(outcomes, 4)
    good = messages.foreign.delay(n=1)
    assert good.get(timeout=60) == {"n": 1}
    assert [row.stamped for row in outcomes.rows(TRACES)] == [False] * 4
    code, findings = doctor(programs)
    errors = {found["code"] for found in findings if found["severity"] == "error"}
    assert code == 1
    assert errors >= ({"dlx.unbound", "dlx.probe"} if damage is unbind else {"dlx.queue_missing"}), findings
    assert {row.job_id for row in outcomes.rows(TRACES)} == {first.id, *failing}
    relay.sigkill()
    programs.relay()  # RabbitMQ tries what it could not dead-letter every three minutes; the debt is sooner
    wait_traced(outcomes, 4)
    code, findings = doctor(programs)
    assert (code, [found for found in findings if found["severity"] == "error"]) == (0, [])


@on_rabbitmq
def test_c16_the_quarantine_queue_deleted_under_a_running_worker_heals_by_itself(
    broker: BrokerNode, messages: Any, outcomes: Outcomes, start_worker: Any
) -> None:
    start_worker(options=OPTIONS)
    messages.hopeless.delay(n=0)
    wait_traced(outcomes, 1)
    delete_queue(broker)
    for n in range(1, 6):
        messages.hopeless.delay(n=n)
    wait_traced(outcomes, 6)


@on_rabbitmq
@pytest.mark.environment(DEADSURE_RESEND_FIRST_S="0.3", DEADSURE_RESEND_MAX_S="1")
def test_offers_of_a_trace_are_bounded_and_their_gap_grows_while_nobody_takes_in(
    messages: Any, outcomes: Outcomes, programs: Programs, tmp_path: Path
) -> None:
    programs.worker(options=BARE)
    go = tmp_path / "go"
    held = Fault("before:tasks.intake.Intake._take", "wait_file", announce=str(tmp_path / "held"), until=str(go))
    programs.relay(faults=[held], environment={"DEADSURE_WINDOW": "8"})
    failing = [messages.hopeless.delay(n=n).id for n in range(8)]
    wait_quarantined(outcomes, 8)
    # A window full of missing traces does not keep healthy work waiting.
    assert messages.foreign.delay(n=1).get(timeout=10) == {"n": 1}
    wait_for(lambda: all(row.given_up for row in outcomes.rows(TRACE_DEBTS)), 90, "the offers come to an end")
    assert {row.sends for row in outcomes.rows(TRACE_DEBTS)} == {TRACE_OFFERS}
    published = 8 * (1 + TRACE_OFFERS) + 1
    wait_for(lambda: len(outcomes.events("published")) >= published, 30, "all are in the journal")
    stays_true(lambda: len(outcomes.events("published")) == published, 3, "no more are made")
    for job_id in failing:
        at = [event.at for event in outcomes.events("published", job_id)]
        gaps_s = [(later - earlier).total_seconds() for earlier, later in pairwise(at[1:])]
        assert len(at) == 1 + TRACE_OFFERS
        assert gaps_s[0] >= 0.25
        assert min(gaps_s[2:]) >= 0.9
    go.touch()
    wait_traced(outcomes, 8)
    assert all(row.letters <= 1 + TRACE_OFFERS for row in outcomes.rows(TRACES))


CRASHES = {
    "between commit and reject": Fault("after:app.finish.quarantine", "kill", who="group"),
    "between reject and the intake's store": Fault("before:app.dead_letters.store", "kill", who="group"),
    "between store and acknowledgement": Fault("after:app.dead_letters.store", "kill", who="group"),
}


@on_rabbitmq
@pytest.mark.parametrize("crash", CRASHES)
def test_a_crash_on_the_way_still_ends_with_both_traces_and_one_letter(
    messages: Any, outcomes: Outcomes, start_worker: Any, crash: str
) -> None:
    first = start_worker(options=OPTIONS, faults=[CRASHES[crash]])
    job = messages.hopeless.delay(n=1)
    first.wait(60)
    wait_quarantined(outcomes, 1)
    start_worker(options=OPTIONS)
    wait_traced(outcomes, 1)
    assert messages.foreign.delay(n=1).get(timeout=60) == {"n": 1}
    ((job_id, episode, cause, stamped, letters),) = outcomes.rows(TRACES)
    assert (job_id, episode, cause, stamped, letters) == (job.id, 1, "permanent", True, 1)
    assert len(outcomes.events("quarantine", job.id)) == 1
    assert len(outcomes.events("dead_lettered", job.id)) == 1


@on_rabbitmq
def test_an_old_dead_letter_never_stamps_a_newer_episode(
    broker: BrokerNode, messages: Any, outcomes: Outcomes, programs: Programs, engine: Engine
) -> None:
    programs.worker(options=BARE)
    held = Fault("before:tasks.intake.Intake._read", "raise", when=0, error="builtins.OSError")
    relay = programs.relay(faults=[held])
    job = messages.hopeless.delay(n=1)
    wait_for(lambda: broker.depth("quarantine") >= 1, 60, "its dead letter is on the way")
    relay.sigkill()
    # The job was replayed and quarantined again, and the letter of its first episode is still in the queue.
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE quarantine_entries SET closed_at = clock_timestamp()")
        connection.exec_driver_sql("UPDATE jobs SET episode = 2")
        connection.exec_driver_sql(
            "INSERT INTO quarantine_entries (job_id, episode, cause, fingerprint, reason, attempt)"
            " SELECT job_id, 2, cause, 'f', reason, attempt FROM jobs"
        )
        connection.exec_driver_sql(
            "UPDATE outbox SET episode = 2, sends = 0, sent_at = NULL, due_at = clock_timestamp() + interval '1 hour'"
        )
    relay = programs.relay()
    letters = "SELECT episode FROM dead_letters WHERE job_id = :job_id"
    wait_for(lambda: outcomes.rows(letters, job_id=job.id), 60, "the old letter is stored")
    wait_for(lambda: broker.depth("quarantine") == 0, 30, "all old letters are stored")
    assert {row.episode for row in outcomes.rows(letters, job_id=job.id)} == {1}
    stamps = "SELECT episode FROM quarantine_entries WHERE dead_lettered_at IS NOT NULL"
    assert outcomes.rows(stamps) == []
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE outbox SET due_at = clock_timestamp()")
    wait_for(lambda: outcomes.rows(stamps) == [(2,)], 60, "the letter of the second episode stamps it")


@on_rabbitmq
def test_a_delivery_that_the_broker_gave_up_makes_the_debt_of_its_healthy_job_due(
    broker: BrokerNode, messages: Any, outcomes: Outcomes, programs: Programs
) -> None:
    relay = programs.relay(environment={"DEADSURE_RESEND_FIRST_S": "1800", "DEADSURE_RESEND_MAX_S": "3600"})
    job = messages.foreign.delay(n=1)
    wait_for(lambda: outcomes.events("published", job.id), 60, "it is in the queue")
    with Connection(broker.url) as connection:
        channel = connection.default_channel
        for _ in range(25):  # the queue's delivery limit is 20
            message = channel.basic_get("jobs")
            if message is None:
                break
            channel.basic_reject(message.delivery_tag, requeue=True)
    wait_for(lambda: outcomes.events("dead_lettered", job.id), 60, "the intake has it")
    letter = outcomes.rows("SELECT headers FROM dead_letters")[0]
    assert letter.headers["x-death"][0]["reason"] == "delivery_limit"
    programs.worker(options=BARE)
    assert job.get(timeout=60) == {"n": 1}
    assert outcomes.blamed() == []
    assert relay.is_running()


@on_rabbitmq
def test_a_healthy_job_whose_every_message_is_rejected_does_not_run_hot(
    messages: Any, outcomes: Outcomes, programs: Programs
) -> None:
    bug = Fault("before:app.attempt.run", "raise", when=0, error="builtins.AssertionError")
    worker = programs.worker(options=OPTIONS, faults=[bug])
    job = messages.foreign.delay(n=1)
    wait_for(lambda: len(outcomes.events("published", job.id)) >= 4, 60, "it is sent again and again")
    at = [event.at for event in outcomes.events("published", job.id)]
    gaps_s = [(later - earlier).total_seconds() for earlier, later in pairwise(at)]
    assert gaps_s[0] >= 0.4
    assert min(gaps_s[1:]) >= 0.9
    assert worker.terminate() == 0
    programs.worker(options=OPTIONS)
    assert job.get(timeout=60) == {"n": 1}


@on_rabbitmq
def test_our_headers_around_a_foreign_job_id_stamp_nothing(
    broker: BrokerNode, messages: Any, outcomes: Outcomes, start_worker: Any
) -> None:
    start_worker(options=OPTIONS)
    job = messages.hopeless.delay(n=1)
    wait_traced(outcomes, 1)
    send(broker, Raw(headers=our_headers("tests.hopeless", job.id, copy=7, episode=2)))
    wait_for(lambda: broker.depth("jobs") == 0, 30, "it was taken")
    assert messages.foreign.delay(n=1).get(timeout=60) == {"n": 1}
    assert [row.letters for row in outcomes.rows(TRACES)] == [1]
