"""adopt: ∅ -> queued, for a foreign message (`send_task` by a client that has only the broker).

The race: the client publishes the same task three times after a lost confirm. The job is inserted under the task's id,
once; the message is acknowledged after that and its job goes the ordinary way, through a debt of its own. When the
payload's key already belongs to another job, the task id becomes an alias of it, so that `AsyncResult` answers.
Messages with our own headers are never adopted: a pruned job must not run again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any
from uuid import UUID

from psycopg2.extensions import connection as PgConnection

from app.errors import IdempotencyConflict
from app.job_types import JobType
from app.submit import NewJob, existing, is_correlation_id, prepare, settle, within
from app.tracing import is_traceparent
from db.session import rows

ALIAS = """
INSERT INTO job_aliases (alias_id, job_id) VALUES (%(alias_id)s, %(job_id)s) ON CONFLICT DO NOTHING
"""


def adopt(
    connection: PgConnection,
    task_id: UUID,
    job_type: JobType,
    payload: Mapping[str, Any],
    *,
    priority: int | None = None,
    eta: datetime | None = None,
    expires: datetime | None = None,
    correlation_id: object = None,
    traceparent: object = None,
) -> UUID:
    """The job that answers for the foreign task; raises pydantic.ValidationError, InvalidPayload, PayloadTooLarge.

    A correlation id or a traceparent that is none is left out. Raises IdempotencyConflict when its key belongs to a job
    with another payload.
    """
    parsed = job_type.parse(payload)
    keyed = prepare(
        job_type,
        parsed,
        priority=priority,
        eta=eta,
        expires=expires,
        correlation_id=str(correlation_id) if is_correlation_id(correlation_id) else None,
        trace_context=str(traceparent) if is_traceparent(traceparent) else None,
    )
    run = partial(rows, connection)
    if keyed.key is None:
        write(connection, replace(keyed, job_id=task_id))
        return task_id
    found = existing(run, [keyed])
    if found:
        settle(keyed, found)
    else:
        write(connection, keyed)
    if keyed.job_id != task_id:
        rows(connection, ALIAS, {"alias_id": str(task_id), "job_id": str(keyed.job_id)})
    return keyed.job_id


def write(connection: PgConnection, job: NewJob) -> None:
    """Insert the job; one that is there already under the same id is the same task, whatever it carries."""
    try:
        within(partial(rows, connection), [job])
    except IdempotencyConflict:
        if job.key is not None:
            raise
