"""Reading the story of batches: what `deadsure batch list` and `deadsure batch show` print. Writes nothing."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from psycopg2.extensions import connection as PgConnection

from app.completion import CHILD_STATES, OPEN_STATES
from app.states import TERMINAL, State
from db.session import one, rows

SAMPLE = 3
SNAPSHOT = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"  # counts and what blocks are of the same moment
COLUMNS = (
    "batch_id",
    "type",
    "phase",
    "coordinator",
    "exhausted",
    "cursor",
    "created_at",
    "finished_at",
    "cancelled_at",
    "cancelled_by",
    "cancel_reason",
    "completion_id",
    "completion",
)
# A pruned coordinator leaves its tombstone.
BATCH = f"""
SELECT batches.batch_id, coalesce(coordinator.type, old.type),
       CASE WHEN cancelled_at IS NOT NULL THEN 'cancelled'
            WHEN batches.finished_at IS NOT NULL THEN 'finished'
            WHEN exhausted THEN 'waiting'
            WHEN coordinator.state IN {OPEN_STATES} AND coordinator.state <> 'quarantined' THEN 'paging'
            ELSE 'stuck' END,
       coalesce(coordinator.state::text, old.state), exhausted, cursor, batches.created_at, batches.finished_at,
       cancelled_at, cancelled_by, cancel_reason, completion_id, completion_job.state::text, final_counts
  FROM batches
  LEFT JOIN jobs coordinator ON coordinator.job_id = coordinator_id
  LEFT JOIN job_tombstones old ON old.job_id = coordinator_id
  LEFT JOIN jobs completion_job ON completion_job.job_id = completion_id
"""
ONE = f"{BATCH} WHERE batches.batch_id = %(batch_id)s"
LIST = f"""{BATCH}
 WHERE NOT %(only_open)s OR (batches.finished_at IS NULL AND cancelled_at IS NULL)
 ORDER BY batches.created_at DESC LIMIT %(limit)s
"""
COUNTS = f"SELECT state, count(*) FROM ({CHILD_STATES.format(batch_id='%(batch_id)s')}) child GROUP BY 1"
CHILD = """
    SELECT job_id, state, episode, changed_at FROM jobs WHERE batch_id = %(batch_id)s AND state IN {states}
     UNION ALL
    SELECT job_id, state, episode, changed_at FROM batch_shared_jobs shared JOIN jobs USING (job_id)
     WHERE shared.batch_id = %(batch_id)s AND state IN {states}
"""
# The longest waiting few of each state: the best of a heap, not a sort of a hundred thousand.
WAITING = f"""
SELECT state::text, NULL, NULL, count, since, ARRAY(
           SELECT job_id::text FROM ({CHILD.format(states="(grouped.state)")}) child
            ORDER BY changed_at LIMIT {SAMPLE})
  FROM (SELECT state, count(*) AS count, min(changed_at) AS since
          FROM ({CHILD.format(states="('queued', 'running', 'retry_wait')")}) child GROUP BY 1) grouped
 ORDER BY count DESC
"""
QUARANTINED = f"""
SELECT 'quarantined', fingerprint, min(reason), count(*), min(changed_at),
       (array_agg(child.job_id::text ORDER BY changed_at))[1:{SAMPLE}]
  FROM ({CHILD.format(states="('quarantined')")}) child LEFT JOIN quarantine_entries entry USING (job_id, episode)
 GROUP BY fingerprint ORDER BY count(*) DESC
"""


def show(connection: PgConnection, batch_id: UUID) -> dict[str, Any] | None:
    """One batch: its row, its children by state, and what still blocks it; None when there is no such batch."""
    rows(connection, SNAPSHOT)
    try:
        found = one(connection, ONE, {"batch_id": str(batch_id)})
        if found is None:
            return None
        story = told(connection, found)
        story["blocking"] = blocking(connection, story)
    finally:
        rows(connection, "ROLLBACK")
    return story


def list_batches(connection: PgConnection, only_open: bool, limit: int) -> list[dict[str, Any]]:
    """Batches, newest first, with their children by state."""
    found = rows(connection, LIST, {"only_open": only_open, "limit": limit})
    return [told(connection, row) for row in found]


def told(connection: PgConnection, row: tuple[Any, ...]) -> dict[str, Any]:
    """A row of BATCH by name, with the counts: of its end when it is finished, else of this moment."""
    *columns, final_counts = row
    story = dict(zip(COLUMNS, columns, strict=True))
    counted = final_counts if final_counts is not None else dict(counts(connection, story["batch_id"]))
    story["children"] = {state.value: counted[state] for state in State if counted.get(state)}
    story["children"] |= {state: count for state, count in counted.items() if state not in list(State)}
    story["total"] = sum(counted.values())
    story["ended"] = sum(count for state, count in counted.items() if state in TERMINAL or state not in list(State))
    return story


def counts(connection: PgConnection, batch_id: UUID) -> list[tuple[str, int]]:
    """The children of a batch by state, shared ones too, counted from their rows."""
    return [(state, count) for state, count in rows(connection, COUNTS, {"batch_id": str(batch_id)})]


def blocking(connection: PgConnection, story: dict[str, Any]) -> list[dict[str, Any]]:
    """What still keeps the batch from its end, in groups: how many, the longest waiting few, what to do next."""
    if story["phase"] in ("finished", "cancelled"):
        return []
    batch_id, coordinator = str(story["batch_id"]), story["coordinator"]
    groups: list[dict[str, Any]] = []
    if not story["exhausted"]:
        groups.append(
            {
                "what": f"the coordinator is {coordinator}" if coordinator else "the coordinator is gone",
                "count": 1,
                "since": None,
                "jobs": [batch_id],
                "reason": None,
                "next": next_for_coordinator(story["phase"], coordinator, batch_id),
            }
        )
    values = {"batch_id": batch_id}
    found = [*rows(connection, QUARANTINED, values), *rows(connection, WAITING, values)]
    for state, fingerprint, reason, count, since, jobs in found:
        quarantined = state == State.QUARANTINED
        groups.append(
            {
                "what": f"{state} {fingerprint}" if fingerprint else state,
                "count": count,
                "since": since,
                "jobs": jobs,
                "reason": reason,
                "next": f"deadsure quarantine show {jobs[0]}" if quarantined else f"deadsure show {jobs[0]}",
            }
        )
    return groups


def next_for_coordinator(phase: str, coordinator: str | None, batch_id: str) -> str:
    """The command that helps a coordinator that has not submitted all its children."""
    if phase == "paging":
        return f"deadsure show {batch_id}"
    if coordinator == State.QUARANTINED:
        return f"deadsure quarantine show {batch_id}"
    return f"deadsure batch cancel {batch_id}"
