"""park: jobs of unknown types wait for others, and are quarantined after the grace period, once."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import pytest
from psycopg2.extras import Json

from app.park import Parked, park
from tests.integration.scene import PLAIN, Scene, Worker

GRACE_S, OFFER_S = 60.0, 30.0


def parked(worker: Worker, job_id: UUID, *, episode: int = 1, grace_s: float = GRACE_S) -> bool:
    """One delivery of the job at a worker that does not know it; whether it is rejected."""
    became = park(worker.session, job_id, 1, episode, worker.worker_id, grace_s, OFFER_S)
    return became is not Parked.LEFT


def waited(scene: Scene, job_id: UUID, seconds: float) -> None:
    """The job was first parked so long ago."""
    scene.ask(
        "UPDATE jobs SET parked_at = clock_timestamp() - make_interval(secs => %s) WHERE job_id = %s RETURNING 1",
        (seconds, str(job_id)),
    )


def teach(scene: Scene, worker: Worker, *known: str) -> None:
    """The worker's release knows these types."""
    scene.ask("UPDATE workers SET knows = %s WHERE worker_id = %s RETURNING 1", (Json(known), str(worker.worker_id)))


def consumes(scene: Scene, worker: Worker, *queues: str) -> None:
    """The worker has said what it consumes."""
    scene.ask("UPDATE workers SET queues = %s WHERE worker_id = %s RETURNING 1", (Json(queues), str(worker.worker_id)))


def test_a_parked_job_keeps_state_and_debt(scene: Scene) -> None:
    worker, job_id = scene.worker(), scene.job()
    scene.sent(job_id)
    before = scene.debt(job_id)
    assert not parked(worker, job_id)
    first = scene.row(job_id)["parked_at"]
    assert not parked(worker, job_id)
    row = scene.row(job_id)
    assert (row["state"], row["attempt"], row["parked_at"]) == ("queued", 0, first)
    assert scene.debt(job_id) == before
    assert scene.journal(job_id) == ["submit", "received", "received"]


def test_after_the_grace_it_is_quarantined_with_the_debt_of_its_trace(scene: Scene) -> None:
    worker, job_id = scene.worker(), scene.job()
    parked(worker, job_id)
    waited(scene, job_id, GRACE_S - 5)
    assert not parked(worker, job_id)
    waited(scene, job_id, GRACE_S + 1)
    assert parked(worker, job_id)
    row, debt = scene.row(job_id), scene.debt(job_id)
    assert (row["state"], row["cause"], row["episode"], row["failures"]) == ("quarantined", "unknown_type", 1, 0)
    assert debt is not None
    assert (debt["kind"], debt["episode"], debt["sends"]) == ("trace", 1, 0)
    assert [entry["cause"] for entry in scene.entries(job_id)] == ["unknown_type"]


def test_its_other_deliveries_are_rejected_while_the_trace_is_owed(scene: Scene) -> None:
    worker, job_id = scene.worker(), scene.job()
    parked(worker, job_id)
    waited(scene, job_id, GRACE_S + 1)
    parked(worker, job_id)
    assert parked(worker, job_id), "the redelivery after a crash before the reject"
    assert not parked(worker, job_id, episode=0), "a message of an older episode"
    scene.ask("DELETE FROM outbox WHERE job_id = %s RETURNING 1", (str(job_id),))
    assert not parked(worker, job_id), "its dead letter is there"
    assert len(scene.entries(job_id)) == 1


def test_two_workers_at_the_end_of_the_grace_quarantine_once(scene: Scene) -> None:
    workers, job_id = [scene.worker(), scene.worker()], scene.job()
    parked(workers[0], job_id)
    waited(scene, job_id, GRACE_S + 1)
    calls: list[Any] = [lambda worker=worker: parked(worker, job_id) for worker in workers]
    assert scene.at_once(*calls) == [True, True]
    assert (scene.row(job_id)["episode"], len(scene.entries(job_id))) == (1, 1)


def test_a_type_that_a_live_worker_knows_waits_for_it(scene: Scene) -> None:
    older, newer, job_id = scene.worker(), scene.worker(), scene.job()
    teach(scene, newer, f"{PLAIN.name}@1")
    scene.sent(job_id, sends=9)
    scene.ask("UPDATE outbox SET due_at = clock_timestamp() + interval '15 min' RETURNING 1")
    parked(older, job_id)
    soon = "SELECT due_at < clock_timestamp() + make_interval(secs => %s) FROM outbox"
    assert scene.ask(soon, (OFFER_S + 1,)), "it is offered again soon"
    waited(scene, job_id, GRACE_S + 1)
    assert not parked(older, job_id)
    assert scene.state(job_id) == "queued"
    scene.end_lease(newer)
    assert parked(older, job_id), "nobody who lives knows it"


def test_a_worker_that_does_not_consume_its_queue_is_no_help(scene: Scene) -> None:
    older, newer, job_id = scene.worker(), scene.worker(), scene.job()
    teach(scene, newer, f"{PLAIN.name}@1")
    consumes(scene, newer, "elsewhere")
    parked(older, job_id)
    waited(scene, job_id, GRACE_S + 1)
    consumes(scene, newer, "elsewhere", "jobs")
    assert not parked(older, job_id)
    consumes(scene, newer, "elsewhere")
    assert parked(older, job_id)
    assert scene.row(job_id)["cause"] == "unknown_type"


def test_another_version_is_no_help(scene: Scene) -> None:
    older, newer, job_id = scene.worker(), scene.worker(), scene.job()
    teach(scene, newer, f"{PLAIN.name}@2", "scene.other@1")
    parked(older, job_id)
    waited(scene, job_id, GRACE_S + 1)
    assert parked(older, job_id)


def test_a_claim_ends_the_waiting(scene: Scene) -> None:
    worker, job_id = scene.worker(), scene.job()
    parked(worker, job_id)
    scene.ask("UPDATE jobs SET parked_at = NULL WHERE job_id = %s RETURNING 1", (str(job_id),))
    assert not parked(worker, job_id, grace_s=5)


@pytest.mark.parametrize("state", ["succeeded", "cancelled"])
def test_a_finished_job_is_acknowledged(scene: Scene, state: str) -> None:
    worker, job_id = scene.worker(), scene.job()
    scene.change(job_id, state=state, finished_at="2026-01-01+00", result_key="k" if state == "succeeded" else None)
    assert not parked(worker, job_id)


def test_a_message_of_a_job_that_is_not_there_is_rejected(scene: Scene) -> None:
    assert parked(scene.worker(), uuid4())
