"""Batches: a coordinator submits many children, page by page, and may die at any page boundary.

Promise: a page's children and the cursor behind it are one commit, under the fence of the coordinator's attempt. So a
run that begins again goes on behind the last page that was committed, and a frozen coordinator that wakes up after
another took over writes nothing: its page ends with the check of the coordinator's row, and is rolled back.

The batch is named by its coordinator's job id. A child that was there before (somebody else submitted it under the
same key) keeps the batch of its first submitter; a row in `batch_shared_jobs` makes this batch wait for it too, and it
counts as what it is, also when it is done already. A child that is itself a coordinator is done when its paging is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy.orm import Session

from app import tracing
from app.cancel import cancel
from app.clock import boottime_s
from app.completion import complete
from app.errors import UnrecoverableError
from app.job import Job
from app.job_types import JobType
from app.json_text import to_json
from app.submit import NewJob, parameters, prepare, within
from db.session import one, rows

OPEN = """
INSERT INTO batches (batch_id, coordinator_id, completion, completion_id)
VALUES (%(batch_id)s, %(batch_id)s, %(completion)s::jsonb, %(completion_id)s)
ON CONFLICT (batch_id) DO UPDATE SET completion = excluded.completion, completion_id = excluded.completion_id
   WHERE NOT batches.exhausted AND batches.completion IS DISTINCT FROM excluded.completion
"""
READ = "SELECT cursor, exhausted, cancelled_at IS NOT NULL FROM batches WHERE batch_id = %(batch_id)s"
SAVE = """
UPDATE batches SET cursor = coalesce(%(cursor)s::jsonb, cursor), exhausted = %(exhausted)s
 WHERE batch_id = %(batch_id)s AND NOT exhausted AND cancelled_at IS NULL
   AND cursor IS NOT DISTINCT FROM %(before)s::jsonb
RETURNING 1
"""
SHARE = """
INSERT INTO batch_shared_jobs (batch_id, job_id)
SELECT %(batch_id)s, found.job_id FROM unnest(%(job_ids)s::uuid[]) AS found (job_id)
 WHERE NOT EXISTS (SELECT FROM jobs WHERE jobs.job_id = found.job_id AND jobs.batch_id = %(batch_id)s)
ON CONFLICT DO NOTHING
"""
CHILDREN = """
SELECT (SELECT count(*) FROM jobs WHERE batch_id = %(batch_id)s)
     + (SELECT count(*) FROM batch_shared_jobs WHERE batch_id = %(batch_id)s)
"""


@dataclass(frozen=True)
class Child:
    """One job to be submitted; `key` and `scope` are its natural key, by which a rerun finds it again."""

    key: str
    payload: Mapping[str, Any]
    scope: str = ""


@dataclass(frozen=True)
class Page:
    """Some children, and where the page behind them begins (any JSON); `after` None: there are no more."""

    children: Sequence[Child] = ()
    after: Any = None


NextPage = Callable[[Session, Any, Any], Page]


@dataclass(frozen=True)
class Plan:
    """What a coordinator does: how pages come, which jobs they become, what is submitted when all have ended."""

    next_page: NextPage
    child: JobType
    completion: JobType | None = None
    completion_payload: Callable[[Any, UUID], Mapping[str, Any]] = lambda _payload, batch_id: {"batch_id": batch_id}


def coordinate(job: Job, plan: Plan) -> dict[str, int]:
    """Submit page after page until the source is exhausted; the number of children.

    Between pages it gives the job back when it is asked to stop, or when half of the attempt's time limit is spent:
    that costs no budget, and the next attempt goes on.
    """
    gives_back_at = boottime_s() + job.time_limit_s / 2
    cursor, exhausted = begin(job, plan)
    submitted = count_children(job)
    while not exhausted:
        if job.should_stop or boottime_s() > gives_back_at:
            job.stop()
        cursor, exhausted, count = submit_page(job, plan, cursor)
        submitted += count
        job.progress(submitted)
    complete(job.connection, job.job_id)  # an empty source has nobody else to notice its end
    return {"children": count_children(job)}


def count_children(job: Job) -> int:
    """How many children there are, shared ones too."""
    found = one(job.connection, CHILDREN, {"batch_id": str(job.job_id)})
    return int(found[0]) if found else 0


def begin(job: Job, plan: Plan) -> tuple[Any, bool]:
    """Make the batch, or find it: its cursor, and whether the source is exhausted. Ends a job of a cancelled batch."""
    completion = None if plan.completion is None else completion_job(job, plan.completion, plan.completion_payload)
    values = {
        "batch_id": str(job.job_id),
        "completion": to_json(parameters([completion])) if completion else None,
        "completion_id": str(completion.job_id) if completion else None,
    }
    with job.apart():
        rows(job.connection, OPEN, values)
        found = one(job.connection, READ, values)
    assert found is not None
    cursor, exhausted, cancelled = found
    if cancelled:
        # Whoever cancelled it may have died before its coordinator's turn.
        cancel(job.connection, job.job_id, reason="its batch was cancelled")
        job.stop()
    return cursor, exhausted


def submit_page(job: Job, plan: Plan, before: Any) -> tuple[Any, bool, int]:
    """Submit the page behind `before` and save the cursor, in one commit: cursor, exhausted, children submitted.

    Raises LeaseLost, and nothing is written, when another attempt owns the job.
    """
    with job.apart() as session:
        page = plan.next_page(session, job.payload, before)
        cursor = None if page.after is None else to_json(page.after)
        values = {
            "batch_id": str(job.job_id),
            "cursor": cursor,
            "before": None if before is None else to_json(before),
            "exhausted": page.after is None,
        }
        if cursor is not None and cursor == values["before"]:
            raise UnrecoverableError("the page ends where it began, so paging would never end; return another `after`")
        saved = one(job.connection, SAVE, values)
        if saved is not None:
            submit_children(job, [child_job(job, plan.child, child) for child in page.children])
    if saved is None:
        return (*begin(job, plan), 0)  # it was cancelled meanwhile: this does not return
    return json.loads(cursor) if cursor is not None else None, page.after is None, len(page.children)


def submit_children(job: Job, children: Sequence[NewJob]) -> None:
    """Write the children in the open transaction; those that somebody else submitted are linked to this batch."""
    answers = within(lambda sql, values: rows(job.connection, sql, values), children)
    earlier = {str(answer.job_id) for answer in answers if not answer.created}
    if earlier:
        rows(job.connection, SHARE, {"batch_id": str(job.job_id), "job_ids": list(earlier)})


def child_job(job: Job, job_type: JobType, child: Child) -> NewJob:
    """A child, validated, not yet written."""
    return prepare(
        job_type,
        job_type.parse(child.payload),
        idempotency_key=child.key,
        scope=child.scope,
        correlation_id=job.correlation_id,
        trace_context=tracing.of_child(job.trace_context),
        parent_id=job.job_id,
        batch_id=job.job_id,
    )


def completion_job(job: Job, job_type: JobType, payload: Callable[[Any, UUID], Mapping[str, Any]]) -> NewJob:
    """The job for the batch's end; its key is the batch's, so that even a second submit would make no second one."""
    return prepare(
        job_type,
        job_type.parse(payload(job.payload, job.job_id)),
        idempotency_key=f"{job.job_id}/complete",
        correlation_id=job.correlation_id,
        trace_context=tracing.of_child(job.trace_context),
        parent_id=job.job_id,
    )
