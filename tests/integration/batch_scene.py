"""Actors of the batch tests: coordinators that are attempted in this process, and what becomes of their children."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

from app import attempt, finish
from app.clock import boottime_s
from app.completion import Completer
from app.ending import Ending
from app.job_types import find
from app.lease import SharedLease
from app.seat import Seat
from app.sweep import Sweeper
from db.session import rows
from tests.integration.scene import Scene, Worker

END_CHILDREN = """
WITH ended AS (
    UPDATE jobs SET state = 'succeeded', result_key = 'k', finished_at = clock_timestamp(), worker_id = NULL,
                    child_pid = NULL
     WHERE batch_id = %(batch_id)s AND state <> 'succeeded' AND (%(limit)s::int IS NULL OR job_id IN (
           SELECT job_id FROM jobs WHERE batch_id = %(batch_id)s AND state = 'queued' LIMIT %(limit)s))
    RETURNING job_id
)
DELETE FROM outbox USING ended WHERE outbox.job_id = ended.job_id
"""


class Batches:
    """One scene with coordinators in it; each attempt is the real one, from claim to arrow."""

    def __init__(self, scene: Scene, tasks: Any) -> None:
        self.scene, self.tasks = scene, tasks
        self.completer = Completer()

    def submit(self, **source: Any) -> UUID:
        """A coordinator, not yet attempted."""
        return UUID(self.tasks.numbers.delay(**source).id)

    def seat(self, worker: Worker | None = None) -> Seat:
        """Where a worker (a new one unless given) runs its attempts."""
        lease = SharedLease()
        lease.write((worker or self.scene.worker()).worker_id, boottime_s() + 60)
        return Seat(lease, self.scene.url)

    def attempt(self, job_id: UUID, worker: Worker | None = None) -> Ending:
        """One delivery of a job."""
        seat = self.seat(worker)
        try:
            return attempt.run(seat, self.scene.delivery(job_id), find(self.scene.row(job_id)["type"]))
        finally:
            seat.drop()

    def run(self, **source: Any) -> UUID:
        """A coordinator that has submitted all its children."""
        batch_id = self.submit(**source)
        self.attempt(batch_id)
        assert self.scene.state(batch_id) == "succeeded"
        return batch_id

    def lose(self, worker: Worker) -> None:
        """The worker's lease ends and a sweeper takes its jobs, ending its sessions."""
        self.scene.end_lease(worker)
        sweeper = Sweeper(lease_s=0)
        sweeper.look(self.scene.eyes)
        sweeper.look(self.scene.eyes)
        assert self.scene.worker_row(worker)["lost_at"] is not None

    def children(self, batch_id: UUID) -> list[UUID]:
        """The children that carry the batch, by number."""
        found = rows(
            self.scene.eyes,
            "SELECT job_id::text FROM jobs WHERE batch_id = %s ORDER BY (payload ->> 'n')::int",
            (str(batch_id),),
        )
        return [UUID(row[0]) for row in found]

    def succeed(self, *job_ids: UUID) -> None:
        """Run jobs of the test types to their end."""
        for job_id in job_ids:
            self.attempt(job_id)
            assert self.scene.state(job_id) == "succeeded"

    def quarantine(self, job_id: UUID) -> None:
        """A child fails for good."""
        holder = self.scene.claimed(self.scene.worker(), job_id)
        finish.quarantine(
            self.scene.eyes,
            holder,
            "permanent",
            "why",
            "f",
            failure="permanent",
            offer_s=1,
            in_transaction=False,
        )

    def end_by_hand(self, batch_id: UUID, limit: int | None = None) -> None:
        """Children have succeeded, as far as the tables tell: all, or `limit` of those that are queued."""
        rows(self.scene.eyes, END_CHILDREN, {"batch_id": str(batch_id), "limit": limit})

    def look(self) -> list[UUID]:
        """A sweeper's look for batches that have ended."""
        return Completer().look(self.scene.eyes)

    def row(self, batch_id: UUID) -> dict[str, Any]:
        """The row of `batches`."""
        return self.scene.record("SELECT * FROM batches WHERE batch_id = %s", (str(batch_id),))

    def completions(self) -> int:
        """How many completion jobs there are."""
        return int(self.scene.ask("SELECT count(*) FROM jobs WHERE type = 'tests.batch_done'"))


def nth_time(original: Callable[..., Any], nth: int, act: Callable[[], None], *, before: bool) -> Callable[..., Any]:
    """`original`, with `act` before or after its `nth` call."""
    calls = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        due = calls == nth
        if due and before:
            act()
        result = original(*args, **kwargs)
        if due and not before:
            act()
        return result

    return wrapped
