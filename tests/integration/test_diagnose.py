"""`deadsure diagnose`: what is read of a job and of ids that are none, exit codes, and what is printed."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from click.testing import CliRunner, Result

from app import cancel, finish, sweep
from app.diagnose import diagnose, reading
from app.diagnose.facts import Broker
from app.diagnose.reading import read
from app.diagnose.words import Diagnosis
from app.settings import settings
from db.session import rows
from tests.integration.scene import Scene

UP = Broker("rabbitmq", reachable=True, exists=True, ready=0, consumers=1)
Cli = Callable[..., Result]


@pytest.fixture
def cli(jobs: Any) -> Cli:
    """`deadsure diagnose` in this process."""
    assert jobs
    from tasks.commands import deadsure  # noqa: PLC0415  reads the environment when it is imported

    return lambda *arguments: CliRunner().invoke(deadsure, ("diagnose", *arguments), prog_name="deadsure")


def ask(scene: Scene, job_id: UUID, broker: Broker | None = UP) -> Diagnosis:
    return diagnose(read(scene.eyes, job_id, settings(), broker))


def put(scene: Scene, sql: str, *values: object) -> None:
    rows(scene.eyes, sql, tuple(str(value) for value in values))


def quarantine(scene: Scene, job_id: UUID) -> None:
    worker = scene.worker()
    finish.quarantine(
        worker.session,
        scene.claimed(worker, job_id),
        "permanent",
        "ValueError in file.py:handler",
        "abc123",
        failure="permanent",
        offer_s=30,
        in_transaction=False,
    )


# jobs


def test_an_atomic_job_at_work_is_seen_from_outside_though_its_row_says_queued(scene: Scene) -> None:
    worker = scene.worker()
    holder = scene.begun(worker)
    found = ask(scene, holder.claimed.job_id)
    assert (found.state, found.cause, found.wrong) == ("queued", "running", False)
    assert "in one commit with its effect" in found.explanation
    scene.end_lease(worker)
    assert ask(scene, holder.claimed.job_id).cause == "owner_frozen"
    rows(worker.session, "ROLLBACK")
    assert ask(scene, holder.claimed.job_id).cause != "owner_frozen"


def test_a_claim_in_the_middle_of_the_reading_neither_waits_nor_shows_by_half(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id, worker, record = scene.job(), scene.worker(), reading.record

    def claimed_behind_it(connection: Any, sql: str, values: dict[str, Any]) -> dict[str, Any] | None:
        found = record(connection, sql, values)
        if sql is reading.JOB:
            assert scene.claimed(worker, job_id).claimed.attempt == 1
        return found

    put(scene, "UPDATE jobs SET changed_at = clock_timestamp() - interval '1 min' WHERE job_id = %s", job_id)
    reader = scene.connect()  # the claim comes by another session
    monkeypatch.setattr(reading, "record", claimed_behind_it)
    assert diagnose(read(reader, job_id, settings(), UP)).cause == "waiting_for_delivery"
    monkeypatch.undo()
    assert scene.state(job_id) == "running"
    with scene.holding(job_id):
        assert ask(scene, job_id).cause == "running", "a locked row is read all the same"


def test_owner_without_a_row_and_owner_that_nobody_sweeps(scene: Scene) -> None:
    worker = scene.worker()
    job_id = scene.claimed(worker).claimed.job_id
    assert ask(scene, job_id).cause == "running"
    scene.end_session(worker)
    found = ask(scene, job_id)
    assert (found.cause, found.next) == ("worker_lost_not_swept", "celery -A tasks worker")
    rows(scene.connect("deadsure sweeper"), "SELECT 1")
    assert ask(scene, job_id).cause == "worker_lost"
    scene.do("DELETE FROM workers WHERE worker_id = %s", worker)
    assert ask(scene, job_id).cause == "owner_unknown"


def test_waiting_without_a_debt(scene: Scene) -> None:
    job_id = scene.job()
    put(scene, "DELETE FROM outbox WHERE job_id = %s", job_id)
    put(scene, "UPDATE jobs SET changed_at = clock_timestamp() - interval '1 min' WHERE job_id = %s", job_id)
    assert ask(scene, job_id).cause == "debt_missing"


def test_quarantined_jobs_their_batch_and_their_coordinator(scene: Scene) -> None:
    worker, batch_id = scene.worker(), uuid.uuid4()
    coordinator = scene.claimed(worker)
    finish.succeed(worker.session, coordinator, "key", None, in_transaction=False)
    put(scene, "INSERT INTO batches (batch_id, coordinator_id) VALUES (%s, %s)", batch_id, coordinator.claimed.job_id)
    child, other = scene.job(batch_id=str(batch_id)), scene.job(batch_id=str(batch_id))
    found = ask(scene, coordinator.claimed.job_id)
    assert (found.cause, found.wrong) == ("batch_waits_for_children", False)
    assert "0 of 2 have ended" in found.explanation
    assert f"Batch {batch_id} waits for it." in ask(scene, other).explanation
    quarantine(scene, child)
    found = ask(scene, child)
    assert (found.cause, found.next) == ("quarantined_blocks_batch", f"deadsure quarantine show {child}")
    found = ask(scene, coordinator.claimed.job_id)
    assert (found.wrong, found.next) == (True, f"deadsure batch show {batch_id}")
    assert str(child) in found.explanation
    put(
        scene,
        "UPDATE batches SET cancelled_at = clock_timestamp(), cancelled_by = 'ada', cancel_reason = 'r'"
        " WHERE batch_id = %s",
        batch_id,
    )
    assert ask(scene, child).cause == "quarantined"


def test_trace_given_up_and_what_a_person_did(scene: Scene) -> None:
    job_id = scene.job()
    quarantine(scene, job_id)
    assert ask(scene, job_id).cause == "quarantined"
    put(
        scene,
        "UPDATE outbox SET sends = 8, sent_at = clock_timestamp(), due_at = 'infinity' WHERE job_id = %s;"
        "UPDATE quarantine_entries SET quarantined_at = clock_timestamp() - interval '1 h' WHERE job_id = %s;"
        "INSERT INTO quarantine_actions (job_id, episode, action, author, reason)"
        " VALUES (%s, 1, 'note', 'ada', 'seen')",
        *[job_id] * 3,
    )
    found = ask(scene, job_id)
    assert (found.cause, found.next) == ("quarantine_trace_missing", "deadsure doctor")
    assert "offered 8 times, then given up" in found.explanation
    assert [line["author"] for line in found.timeline if line["event"] == "person_note"] == ["ada"]


def test_attempts_of_one_cause_and_the_pauses_between_them(scene: Scene) -> None:
    worker, job_id = scene.worker(), scene.job()
    for _ in range(2):
        holder = scene.claimed(worker, job_id)
        finish.retry(worker.session, holder, 0.001, "transient", "Timeout in x.py:f", in_transaction=False)
        scene.change(job_id, not_before=None, state="queued")
    found = ask(scene, job_id)
    assert (found.cause, found.wrong) == ("failing_repeatedly", True)
    assert "Timeout in x.py:f" in found.explanation
    put(scene, "UPDATE job_events SET at = at - interval '1 h' WHERE job_id = %s AND event = 'submit'", job_id)
    put(scene, "DELETE FROM job_events WHERE job_id = %s AND event = 'retry' AND attempt = 1", job_id)
    gaps = [line["reason"] for line in ask(scene, job_id).timeline if line["event"] == "gap"]
    assert gaps[0].endswith("s without an event")
    assert gaps[-1] == "attempt 1 has no end in the journal"


def test_a_job_that_died_with_its_worker_and_ended_by_another(scene: Scene) -> None:
    first, second, job_id = scene.worker(), scene.worker(), scene.job()
    scene.claimed(first, job_id)
    assert sweep.expire_child(scene.eyes, job_id, first.worker_id, first.pid, "the child process died") == "queued"
    finish.succeed(second.session, scene.claimed(second, job_id), "the key", None, in_transaction=False)
    put(scene, "UPDATE job_events SET delivery_tag = NULL WHERE job_id = %s", job_id)
    found = ask(scene, job_id)
    assert (found.cause, found.wrong) == ("two_attempts_one_effect", False)
    assert "Attempt 2 counts" in found.explanation


def test_cancelled_and_expired(scene: Scene) -> None:
    unwanted, late = scene.job(), scene.job()
    cancel.cancel(scene.eyes, unwanted)
    assert (ask(scene, unwanted).cause, ask(scene, unwanted).wrong) == ("cancelled", False)
    put(scene, "UPDATE jobs SET expires_at = clock_timestamp() - interval '1 s' WHERE job_id = %s", late)
    assert ask(scene, late).cause == "waiting_expired"
    cancel.cancel(scene.eyes, late, cause="expired", reason="expired before it could start")
    assert (ask(scene, late).cause, ask(scene, late).wrong) == ("expired", True)


# ids that are no jobs


def test_ids_that_stand_for_a_job_or_once_did(scene: Scene) -> None:
    job_id, alias, stone, batch, letter, ghost, nothing = (scene.job(), *[uuid.uuid4() for _ in range(6)])
    put(scene, "INSERT INTO job_aliases (alias_id, job_id) VALUES (%s, %s)", alias, job_id)
    put(
        scene,
        "INSERT INTO job_tombstones (job_id, type, state, payload_digest) VALUES (%s, 'a.b', 'succeeded', '');"
        "INSERT INTO batches (batch_id, coordinator_id) VALUES (%s, gen_random_uuid());"
        "INSERT INTO dead_letters (headers, body, reason)"
        " VALUES (jsonb_build_object('id', %s), '', 'no such task here');"
        "INSERT INTO job_events (job_id, event) VALUES (%s, 'received')",
        stone,
        batch,
        letter,
        ghost,
    )
    found = ask(scene, alias)
    assert found.job_id == str(job_id)
    assert found.explanation.startswith(f"{alias} is an alias of this job.")
    worker = scene.worker().worker_id
    causes = {name: ask(scene, name, None) for name in (stone, batch, worker, letter, ghost, nothing)}
    assert [found.cause for found in causes.values()] == [
        "pruned",
        "names_something_else",
        "names_something_else",
        "dead_letter_without_job",
        "job_missing_for_messages",
        "unknown_job",
    ]
    assert [found.wrong for found in causes.values()] == [False, True, True, True, True, True]
    assert causes[batch].next == f"deadsure batch show {batch}"
    assert "no such task here" in causes[letter].explanation


# the command


def test_command_for_scripts_and_people_with_the_broker_down(scene: Scene, cli: Cli) -> None:
    job_id = scene.job(n=4711)
    done = cli("--json", str(job_id))
    assert done.exit_code == 3
    told = json.loads(done.output)
    assert list(told) == ["job_id", "state", "cause", "explanation", "next", "evidence", "timeline"]
    assert (told["job_id"], told["state"], told["cause"]) == (str(job_id), "queued", "broker_down")
    assert (told["evidence"]["broker"]["reachable"], told["evidence"]["debt"]["sends"]) == (False, 0)
    assert [line["event"] for line in told["timeline"]] == ["submit", "gap"]
    done = cli(str(job_id))
    assert done.exit_code == 3
    assert "cause  broker_down" in done.output
    assert "next   deadsure doctor" in done.output
    scene.change(job_id, not_before="2100-01-01")
    assert json.loads(cli("--json", str(job_id)).output)["cause"] == "waiting_not_before"
    assert cli(str(job_id)).exit_code == 0, "what it does not need yet is no cause"


def test_command_for_an_unknown_job_and_without_a_broker(scene: Scene, cli: Cli, monkeypatch: Any) -> None:
    done = cli("--json", str(uuid.uuid4()))
    assert (done.exit_code, json.loads(done.output)["cause"]) == (4, "unknown_job")
    monkeypatch.setenv("BROKER_URL", "")
    settings.cache_clear()
    told = json.loads(cli("--json", str(scene.job())).output)
    assert told["cause"] == "waiting_no_worker"
    assert "BROKER_URL is not set" in told["evidence"]["broker"]["notes"][0]


def test_no_payload_and_no_result_is_told(scene: Scene, cli: Cli) -> None:
    worker, secret = scene.worker(), "4711471147"
    holder = scene.claimed(worker, scene.job(n=int(secret)))
    finish.succeed(worker.session, holder, "key", f'{{"n": {secret}}}', in_transaction=False)
    for options in ((), ("--json",)):
        done = cli(*options, str(holder.claimed.job_id))
        assert done.exit_code == 0
        assert secret not in done.output
