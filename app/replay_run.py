"""A replay in stages: a few jobs first, then more, then all; it stops by itself when the same failure comes back.

All of it is in the database: what was decided about a job is written in the same statement as its arrow, so a run that
was killed anywhere is resumed without asking anybody. Two commands at work on one run share its jobs.

This file plans and reads runs; `app.replay_walk` goes through them.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from psycopg2.extensions import connection as PgConnection

from app.edit import Edit
from app.errors import DeadsureError
from app.json_text import to_json
from app.triage import Wish
from db.session import one, rows

PLAN = """
WITH run AS (
    INSERT INTO replay_runs (run_id, fingerprint, stages, rate_per_s, patch, accept_uncertain, settle_done, wait,
                             author, reason)
    VALUES (%(run_id)s, %(fingerprint)s, %(stages)s::jsonb, %(rate_per_s)s, %(edit)s::jsonb, %(accept_uncertain)s,
            %(settle_done)s, %(wait)s, %(author)s, %(reason)s)
    RETURNING run_id
)
INSERT INTO replay_run_jobs (run_id, job_id, episode, place)
SELECT run_id, job_id, episode, place
  FROM run, unnest(%(job_ids)s::uuid[], %(episodes)s::int[]) WITH ORDINALITY AS planned (job_id, episode, place)
"""
RUN_COLUMNS = (
    "run_id",
    "fingerprint",
    "stages",
    "rate_per_s",
    "patch",
    "accept_uncertain",
    "settle_done",
    "wait",
    "author",
    "reason",
    "created_at",
    "stopped_at",
    "stopped_reason",
    "finished_at",
)
READ = f"SELECT {', '.join(RUN_COLUMNS)} FROM replay_runs WHERE run_id = %(run_id)s"
LIST = f"""
SELECT {", ".join(RUN_COLUMNS)}, (SELECT count(*) FROM replay_run_jobs WHERE run_id = replay_runs.run_id),
       (SELECT count(*) FROM replay_run_jobs WHERE run_id = replay_runs.run_id AND outcome IS NULL)
  FROM replay_runs ORDER BY created_at DESC LIMIT %(limit)s
"""
RESUME = """
UPDATE replay_runs SET stopped_at = NULL, stopped_reason = NULL WHERE run_id = %(run_id)s AND finished_at IS NULL
RETURNING 1
"""
COUNTS = """
SELECT coalesce(outcome, 'to come'), count(*) FROM replay_run_jobs WHERE run_id = %(run_id)s GROUP BY 1 ORDER BY 1
"""
OF_NOTE = """
SELECT job_id::text, stage, outcome FROM replay_run_jobs
 WHERE run_id = %(run_id)s AND outcome NOT IN ('succeeded', 'settled', 'replayed', 'elsewhere')
 ORDER BY place LIMIT %(limit)s
"""


@dataclass(frozen=True)
class Terms:
    """How a run is to go. `stages`: how many jobs go out in each, None for all that are left."""

    author: str
    reason: str
    stages: tuple[int | None, ...] = (None,)
    wait: bool = True
    rate_per_s: float | None = None
    fingerprint: str | None = None
    wish: Wish = field(default_factory=Wish)


@dataclass(frozen=True)
class Run:
    """A planned run and what became of it so far."""

    run_id: UUID
    terms: Terms
    stopped: str | None = None
    finished: bool = False


def plan(connection: PgConnection, terms: Terms, jobs: Sequence[tuple[UUID, int]]) -> Run:
    """Write down a run over these jobs (id and episode), in this order; nothing is replayed yet."""
    run_id = uuid.uuid4()
    wish = terms.wish
    values = {
        "run_id": str(run_id),
        "fingerprint": terms.fingerprint,
        "stages": to_json(list(terms.stages)),
        "rate_per_s": terms.rate_per_s,
        "edit": to_json(wish.edit.stored()) if wish.edit else None,
        "accept_uncertain": wish.accept_uncertain,
        "settle_done": wish.settle_done,
        "wait": terms.wait,
        "author": terms.author,
        "reason": terms.reason,
        "job_ids": [str(job_id) for job_id, _ in jobs],
        "episodes": [episode for _, episode in jobs],
    }
    rows(connection, PLAN, values)
    return Run(run_id, terms)


def read(connection: PgConnection, run_id: UUID) -> Run:
    """A run as it was planned; raises DeadsureError when there is none."""
    row = one(connection, READ, {"run_id": str(run_id)})
    if row is None:
        raise DeadsureError(f"there is no replay run {run_id}; `deadsure quarantine runs` lists them")
    known = dict(zip(RUN_COLUMNS, row, strict=True))
    wish = Wish(Edit(**known["patch"]) if known["patch"] else None, known["accept_uncertain"], known["settle_done"])
    terms = Terms(
        known["author"],
        known["reason"],
        tuple(known["stages"]),
        known["wait"],
        known["rate_per_s"],
        known["fingerprint"],
        wish,
    )
    return Run(run_id, terms, known["stopped_reason"], known["finished_at"] is not None)


def newest(connection: PgConnection, limit: int) -> list[dict[str, Any]]:
    """The newest runs; of an edit only that there is one."""
    names = (*RUN_COLUMNS, "jobs", "to_come")
    found = [dict(zip(names, row, strict=True)) for row in rows(connection, LIST, {"limit": limit})]
    for run in found:
        run["patch"] = bool(run["patch"])
    return found


def resume(connection: PgConnection, run: Run) -> bool:
    """Take back that it stopped; False when it was finished."""
    return one(connection, RESUME, {"run_id": str(run.run_id)}) is not None


def counts(connection: PgConnection, run: Run) -> dict[str, int]:
    """How many jobs of the run have which outcome."""
    return dict(rows(connection, COUNTS, {"run_id": str(run.run_id)}))


def of_note(connection: PgConnection, run: Run, limit: int) -> list[dict[str, Any]]:
    """Jobs that were left, came back or were cancelled, in order."""
    found = rows(connection, OF_NOTE, {"run_id": str(run.run_id), "limit": limit})
    return [dict(zip(("job_id", "stage", "outcome"), row, strict=True)) for row in found]
