"""Atomic jobs that came by one delivery, in a scene."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

from app import coalesced, submit
from app.claim import Delivery
from app.ending import Ending
from app.job import Job
from app.job_types import JobType
from app.seat import Seat
from app.watch import Watch
from db.session import rows
from tests.integration.scene import Number, Scene

TYPE = JobType(name="coalesced.atomic", payload=Number, mode="atomic", time_limit_s=30)
EFFECT = "INSERT INTO test_effects (kind, job_id, attempt, pid) VALUES ('effect', %s, %s, 0)"
Handler = Callable[[Job, Number], Any]


def sent(scene: Scene, count: int, job_type: JobType = TYPE) -> list[UUID]:
    """Jobs whose one copy was sent."""
    new = [submit.prepare(job_type, Number(n=n)) for n in range(count)]
    submit.within(lambda sql, values: rows(scene.eyes, sql, values), new)
    for job in new:
        scene.sent(job.job_id)
    return [job.job_id for job in new]


def deliveries(scene: Scene, jobs: list[UUID], **changed: Any) -> list[Delivery]:
    """The first delivery of each job's first copy."""
    return [scene.delivery(job_id, **changed) for job_id in jobs]


def run(seat: Seat, found: list[Delivery], job_type: JobType) -> list[Ending]:
    """As a pool child does it."""
    return coalesced.run(seat, found, job_type, Watch(may_tell=False))


def effects(scene: Scene) -> list[UUID]:
    """Whose effects there are, in the order in which they were written."""
    return [UUID(str(row[0])) for row in rows(scene.eyes, "SELECT job_id FROM test_effects ORDER BY effect_id")]
