"""Which jobs should exist by now: a job type's `expected`, compared with the jobs that do.

Some losses show only when one counts what should be there: a caller that forgot to submit, or whose transaction was
rolled back, leaves no trace. Keys are read first and looked up afterwards, so a job submitted meanwhile is not missed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import UUID

from psycopg2.extensions import connection as PgConnection
from sqlalchemy import text
from sqlalchemy.orm import Session

from app.errors import ConfigurationError
from app.job_types import JobType
from app.submit import identify, prepare, wake, within
from db.session import engine, rows

PAGE = 1000
KEYS_LIMIT = 200_000
TIMEOUT_MS = 30_000
ABSENT = """
SELECT wanted.job_id::text FROM unnest(%(job_ids)s::uuid[]) AS wanted (job_id)
 WHERE NOT EXISTS (SELECT FROM jobs WHERE jobs.job_id = wanted.job_id)
   AND NOT EXISTS (SELECT FROM job_tombstones old WHERE old.job_id = wanted.job_id)
"""


@dataclass(frozen=True)
class ExpectedJob:
    """One job that should exist; `payload` is None where the type's query does not give it."""

    job_id: UUID
    scope: str
    key: str
    payload: Mapping[str, Any] | None


@dataclass
class Missing:
    """What a look found so far: keys read, and whether there were more than `KEYS_LIMIT`."""

    read: int = 0
    bounded: bool = False


def expected(url: str, job_type: JobType, seen: Missing) -> Iterator[ExpectedJob]:
    """The jobs that the type expects, at most `KEYS_LIMIT`, from a read-only transaction.

    Raises ConfigurationError when a row is not (scope, key) or (scope, key, payload).
    """
    with Session(engine(url)) as session:
        connection = session.connection(execution_options={"postgresql_readonly": True})
        connection.exec_driver_sql(f"SET LOCAL statement_timeout = {TIMEOUT_MS}")
        for row in found(session, job_type):
            if seen.read == KEYS_LIMIT:
                seen.bounded = True
                return
            seen.read += 1
            yield expected_job(job_type, row)


def found(session: Session, job_type: JobType) -> Iterable[Any]:
    """The rows of the type's query, or what its function yields."""
    wanted = job_type.expected
    if callable(wanted):
        return wanted(session)
    statement = text(wanted) if isinstance(wanted, str) else wanted
    assert statement is not None
    return session.execute(statement, execution_options={"yield_per": PAGE})


def expected_job(job_type: JobType, row: Any) -> ExpectedJob:
    """One row as a job with its identity."""
    match tuple(row):
        case (str(scope), str(key)) if key:
            payload = None
        case (str(scope), str(key), dict(payload)) if key:
            pass
        case _:
            raise ConfigurationError(
                f"{job_type.name}: expected= must yield (scope, key) or (scope, key, payload): two texts and a mapping"
            )
    return ExpectedJob(identify(job_type, scope, key), scope, key, payload)


def missing(connection: PgConnection, url: str, job_type: JobType, seen: Missing) -> Iterator[ExpectedJob]:
    """The expected jobs that are not there: neither as a job nor as a pruned one's tombstone."""
    for page in pages(expected(url, job_type, seen)):
        absent = {row[0] for row in rows(connection, ABSENT, {"job_ids": [str(job.job_id) for job in page]})}
        yield from (job for job in page if str(job.job_id) in absent)


def pages(jobs: Iterable[ExpectedJob]) -> Iterator[list[ExpectedJob]]:
    """Runs of at most `PAGE`."""
    going = iter(jobs)
    while page := list(itertools.islice(going, PAGE)):
        yield page


def submit_missing(connection: PgConnection, url: str, job_type: JobType) -> tuple[int, int]:
    """Submit every expected job that is missing, a page at a time; (submitted, left out for want of a payload).

    Two at once, or a submit of the caller meanwhile, make no second job: the key is the identity.
    """
    submitted = skipped = 0
    for page in pages(missing(connection, url, job_type, Missing())):
        jobs = [
            prepare(job_type, job_type.parse(job.payload), idempotency_key=job.key, scope=job.scope)
            for job in page
            if job.payload is not None
        ]
        skipped += len(page) - len(jobs)
        submitted += sum(answer.created for answer in within(partial(rows, connection), jobs))
    wake()
    return submitted, skipped
