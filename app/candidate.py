"""A quarantined job as a decision about it finds it: row, ledger, and whether its attempts can still act.

`ledger` is the picture of the ledger that the decision rests on. The arrow compares it again: a call that was recorded
in between changes the picture, and the decision is made anew.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

from psycopg2.extensions import connection as PgConnection

from app.effects import ENDED, SEEN_DEAD
from app.job_types import REGISTRY, JobType
from app.states import State
from db.session import one, rows

LEDGER = """
coalesce((SELECT string_agg(concat_ws(' ', name, effects.attempt, status), ',' ORDER BY name)
            FROM effects WHERE effects.job_id = jobs.job_id), '')
"""
# Every attempt, not the last alone: one that was frozen in its call may be followed by others that ended in order.
ALL_ENDED = f"""
NOT EXISTS (SELECT FROM generate_series(1, jobs.attempt) AS number
             WHERE NOT EXISTS (SELECT FROM job_events ended
                                WHERE ended.job_id = jobs.job_id AND ended.attempt = number AND {ENDED}))
"""
CANDIDATE = f"""
SELECT jobs.job_id, state::text, jobs.episode, type, schema_version, payload, idempotency_key,
       coalesce(expires_at <= clock_timestamp(), false),
       checkpoint IS NOT NULL OR EXISTS (SELECT FROM batches WHERE batches.batch_id = jobs.job_id),
       EXISTS (SELECT FROM quarantine_actions done WHERE done.job_id = jobs.job_id AND accepted IS NOT NULL),
       {ALL_ENDED}, {LEDGER},
       (SELECT action FROM quarantine_actions done
         WHERE done.job_id = jobs.job_id AND done.episode = %(episode)s AND action <> 'note')
  FROM jobs WHERE jobs.job_id = %(job_id)s
"""
CALLS = f"""
SELECT name, idempotency_key, attempt, status = 'finished', result, coalesce(takes_key, false),
       EXISTS (SELECT FROM job_events ended
                WHERE ended.job_id = effects.job_id AND ended.attempt = effects.attempt AND {ENDED})
  FROM effects WHERE job_id = %(job_id)s ORDER BY started_at, name
"""


@dataclass(frozen=True, slots=True)
class Call:
    """One row of the ledger; `ended`: the attempt that started it can no longer act."""

    name: str
    key: str
    attempt: int
    finished: bool
    result: Any
    takes_key: bool
    ended: bool


@dataclass(frozen=True, slots=True)
class Candidate:
    """A job that somebody wants to decide about.

    `begun`: a checkpoint or a batch shows that a part of the work is done. `accepted`: a call that may
    have been made was forgotten once. `all_ended`: no attempt can still act.
    `decided`: what was decided about the quarantine (`episode`) that was asked for, None while it is open.
    """

    job_id: UUID
    state: str
    episode: int
    type: str
    version: int
    payload: dict[str, Any]
    key: str | None
    expired: bool
    begun: bool
    accepted: bool
    all_ended: bool
    ledger: str
    decided: str | None
    calls: tuple[Call, ...] = ()

    @property
    def job_type(self) -> JobType | None:
        """Its terms, None when this installation does not know the type in this version."""
        return REGISTRY.get((self.type, self.version))

    def open(self, episode: int) -> bool:
        """Whether it still is in that quarantine."""
        return self.state == State.QUARANTINED and self.episode == episode


def read(connection: PgConnection, job_id: UUID, episode: int) -> Candidate | None:
    """The job as a decision about its `episode`-th quarantine finds it; None when there is no such job."""
    values = {"job_id": str(job_id), "episode": episode, "seen": SEEN_DEAD}
    row = one(connection, CANDIDATE, values)
    if row is None:
        return None
    found = Candidate(UUID(str(row[0])), *row[1:])
    if not found.ledger:
        return found
    # Read after the picture: what changed in between makes the arrow's comparison fail.
    return replace(found, calls=tuple(Call(*call) for call in rows(connection, CALLS, values)))
