"""Quarantined jobs for tests of the worklist: made by the real arrows, on sessions of their own."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from pydantic import BaseModel

from app import finish
from app.candidate import Candidate, read
from app.finish import Holder
from app.job_types import REGISTRY, JobType
from app.replay import Decider
from app.triage import Decision, Wish, decide
from db.session import rows
from tests.integration.scene import PLAIN, Number, Scene, Worker

DECIDER = Decider("ann", "the provider is back")
FRAMES = ("tests/x.py:7 handler",)


def known(monkeypatch: Any, **terms: Any) -> JobType:
    """Put the scene's job type, with these terms, on the allowlist of this process."""
    payload: type[BaseModel] = terms.pop("payload", Number)
    job_type = JobType(name=PLAIN.name, payload=payload, **terms)
    monkeypatch.setitem(REGISTRY, (PLAIN.name, 1), job_type)
    return job_type


def quarantine(holder: Holder, worker: Worker, *, cause: str = "permanent", fingerprint: str = "f") -> UUID:
    """The owner's arrow."""
    finish.quarantine(
        worker.session,
        holder,
        cause,
        "ValueError in x.py:handler",
        fingerprint,
        failure="permanent",
        offer_s=30,
        in_transaction=False,
        frames=FRAMES,
    )
    return holder.claimed.job_id


def quarantined(scene: Scene, worker: Worker, job_id: UUID | None = None, **how: Any) -> UUID:
    """A job (a new one unless given) that was claimed and failed for good."""
    return quarantine(scene.claimed(worker, job_id), worker, **how)


def candidate(scene: Scene, job_id: UUID) -> Candidate:
    """The job as a decision about its present quarantine finds it."""
    found = read(scene.eyes, job_id, int(scene.row(job_id)["episode"]))
    assert found is not None
    return found


def wish(scene: Scene, job_id: UUID, episode: int | None = None, **wished: Any) -> Decision:
    """Somebody wants to replay the job; on a session of its own, so that two may at once."""
    wanted = episode or int(scene.row(job_id)["episode"])
    return decide(scene.connect(), job_id, wanted, Wish(**wished), DECIDER)


def actions(scene: Scene, job_id: UUID) -> list[dict[str, Any]]:
    """What was decided and noted about the job."""
    return scene.records("SELECT * FROM quarantine_actions WHERE job_id = %s ORDER BY action_id", (str(job_id),))


def effects(scene: Scene, job_id: UUID) -> list[tuple[Any, ...]]:
    """The ledger: (name, attempt, status, result)."""
    return rows(
        scene.eyes, "SELECT name, attempt, status, result FROM effects WHERE job_id = %s ORDER BY 1", (str(job_id),)
    )
