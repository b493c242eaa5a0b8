"""Reading the story of jobs: what `deadsure show` and `deadsure jobs list` print. Writes nothing."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from psycopg2.extensions import connection as PgConnection

from db.session import rows

JOB_COLUMNS = (
    "job_id",
    "type",
    "schema_version",
    "state",
    "scope",
    "idempotency_key",
    "queue",
    "priority",
    "attempt",
    "failures",
    "crashes",
    "stalls",
    "releases",
    "episode",
    "worker_id",
    "not_before",
    "cancel_requested",
    "cause",
    "reason",
    "result_key",
    "correlation_id",
    "parent_id",
    "batch_id",
    "progress_done",
    "progress_total",
    "created_at",
    "changed_at",
    "finished_at",
)
JOB = f"SELECT {', '.join(JOB_COLUMNS)} FROM jobs WHERE job_id = %s"
DEBT_COLUMNS = ("kind", "sends", "due_at", "sent_at", "returned_at", "returned_reason")
DEBT = f"SELECT {', '.join(DEBT_COLUMNS)} FROM outbox WHERE job_id = %s"
EVENT_COLUMNS = (
    "at",
    "event",
    "attempt",
    "copy",
    "delivery_tag",
    "redelivered",
    "worker_id",
    "reason",
)
EVENTS = f"SELECT {', '.join(EVENT_COLUMNS)} FROM job_events WHERE job_id = %s ORDER BY at, event_id"
STONE_COLUMNS = ("job_id", "type", "state", "result_key", "pruned_at")
STONE = f"SELECT {', '.join(STONE_COLUMNS)} FROM job_tombstones WHERE job_id = %s"
LIST_COLUMNS = ("job_id", "type", "state", "attempt", "created_at", "changed_at", "cause")
LIST = f"""
SELECT {", ".join(LIST_COLUMNS)} FROM jobs
 WHERE created_at < clock_timestamp() - make_interval(secs => %(older_s)s) {{state}} {{type}}
 ORDER BY created_at DESC LIMIT %(limit)s
"""


def show(connection: PgConnection, job_id: UUID) -> dict[str, Any] | None:
    """The job's row, its debt (None when it is paid) and its journal, oldest first; None when there is no such job.

    Of a pruned job only its tombstone: `pruned_at` says so, and there is neither debt nor journal.
    """
    found = rows(connection, JOB, (str(job_id),))
    if not found:
        return pruned(connection, job_id)
    debt = rows(connection, DEBT, (str(job_id),))
    return {
        **dict(zip(JOB_COLUMNS, found[0], strict=True)),
        "debt": dict(zip(DEBT_COLUMNS, debt[0], strict=True)) if debt else None,
        "journal": [dict(zip(EVENT_COLUMNS, row, strict=True)) for row in rows(connection, EVENTS, (str(job_id),))],
    }


def pruned(connection: PgConnection, job_id: UUID) -> dict[str, Any] | None:
    """What is left of a pruned job; None when there never was one, or its tombstone is gone too."""
    found = rows(connection, STONE, (str(job_id),))
    return {**dict(zip(STONE_COLUMNS, found[0], strict=True)), "debt": None, "journal": []} if found else None


def list_jobs(
    connection: PgConnection, state: str | None, job_type: str | None, older_s: float, limit: int
) -> list[dict[str, Any]]:
    """Jobs, newest first; `older_s` leaves out what is younger (seconds)."""
    sql = LIST.format(
        state="AND state = %(state)s::job_state" if state else "",
        type="AND type = %(type)s" if job_type else "",
    )
    values = {"state": state, "type": job_type, "older_s": older_s, "limit": limit}
    return [dict(zip(LIST_COLUMNS, row, strict=True)) for row in rows(connection, sql, values)]
