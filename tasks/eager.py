"""Eager mode, for users' tests: the job is submitted and attempted at once, in this process, on the real database.

Everything but the broker is as in a worker: payload check, claim, fence, transaction, retries, quarantine. Delays are
not waited for. Children that a handler submits run after it, as their jobs would; so does a batch's completion job.
"""

from __future__ import annotations

import uuid
from contextlib import closing

import psycopg2

from app import attempt
from app.claim import Delivery
from app.completion import complete
from app.ending import Settlement
from app.job import current
from app.job_types import find
from app.lease import Keeper
from app.seat import Seat
from app.settings import settings
from app.submit import NewJob
from db.session import connect, rows

SKIP_DELAY = "UPDATE jobs SET not_before = clock_timestamp() WHERE job_id = %s AND state = 'retry_wait'"
CHILDREN = "SELECT job_id::text, type, schema_version FROM jobs WHERE parent_id = %s AND state = 'queued'"


def run(job: NewJob) -> None:
    """Attempt the job until it has ended, then its children."""
    keeper = Keeper(settings(), f"eager {uuid.uuid4()}", [])
    keeper.start_lease()
    seat = Seat(keeper.shared, settings().need_database())
    try:
        with closing(connect(settings().need_database(), "deadsure eager")) as connection:
            attempts(seat, connection, job.job_id, job.job_type.name, job.job_type.version)
    finally:
        seat.drop()
        keeper.stop()


def attempts(
    seat: Seat, connection: psycopg2.extensions.connection, job_id: uuid.UUID, name: str, version: int
) -> None:
    """Attempt one job until it has ended; a retry's delay is skipped."""
    job_type = find(name, version)
    delivery = Delivery(job_id, 0, 0, None, redelivered=False, redelivered_known=False)
    outer = current.set(None)
    try:
        while attempt.run(seat, delivery, job_type).settlement is Settlement.RETRIED:
            rows(connection, SKIP_DELAY, (str(job_id),))
    finally:
        current.reset(outer)
    for look in (0, 1):
        if look == 0 or complete(connection, job_id):
            for child_id, child_type, child_version in rows(connection, CHILDREN, (str(job_id),)):
                attempts(seat, connection, uuid.UUID(child_id), child_type, child_version)
