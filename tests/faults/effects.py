"""The append-only table in which the test jobs leave their effects, and how tests count them."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from db.session import connect

CREATE_TABLE = """
CREATE TABLE test_effects (
    effect_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    kind text NOT NULL,
    job_id uuid NOT NULL,
    attempt integer NOT NULL,
    pid integer NOT NULL
)
"""
COLUMNS = "(kind, job_id, attempt, pid)"


def record_now(database_url: str, kind: str, job_id: UUID, attempt: int) -> None:
    """Append a row that stays whatever becomes of the job: on a connection of its own, in autocommit."""
    connection = connect(database_url, "deadsure test")
    try:
        with connection.cursor() as cursor:
            cursor.execute(
                f"INSERT INTO test_effects {COLUMNS} VALUES (%s, %s, %s, %s)",
                (kind, str(job_id), attempt, os.getpid()),
            )
    finally:
        connection.close()


def record_in(session: Session, kind: str, job_id: UUID, attempt: int) -> None:
    """Append a row that is there if and only if the transaction of `session` commits."""
    session.execute(
        text(f"INSERT INTO test_effects {COLUMNS} VALUES (:kind, :job_id, :attempt, :pid)"),
        {"kind": kind, "job_id": job_id, "attempt": attempt, "pid": os.getpid()},
    )


@dataclass(frozen=True)
class Effect:
    """One row of `test_effects`."""

    kind: str
    job_id: UUID
    attempt: int
    pid: int


class Effects:
    """What the test jobs did: `start` rows (every run) and `effect` rows (what must be there once)."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def rows(self, kind: str = "effect", job_id: UUID | str | None = None) -> list[Effect]:
        """All rows of a kind in the order they were written, of one job or of all."""
        where = "kind = :kind" + (" AND job_id = :job_id" if job_id else "")
        parameters: dict[str, Any] = {"kind": kind}
        if job_id:
            parameters["job_id"] = UUID(str(job_id))
        statement = f"SELECT kind, job_id, attempt, pid FROM test_effects WHERE {where} ORDER BY effect_id"
        with self._engine.connect() as connection:
            return [Effect(*row) for row in connection.execute(text(statement), parameters)]

    def count(self, job_id: UUID | str | None = None, kind: str = "effect") -> int:
        """Number of effects of one job, or of all."""
        return len(self.rows(kind, job_id))

    def starts(self, job_id: UUID | str | None = None) -> int:
        """How often a job, or any, was run."""
        return self.count(job_id, "start")

    def doubled(self) -> dict[UUID, int]:
        """Jobs with more than one effect, and how many each."""
        counted = Counter(row.job_id for row in self.rows())
        return {job_id: count for job_id, count in counted.items() if count > 1}
