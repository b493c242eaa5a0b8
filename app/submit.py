"""submit: ∅ -> queued. Job, debt and journal row appear in one transaction, or none of them does.

Promise: a validated job is durable when the call returns; the same key and payload give the same job back.
A keyed job's identity is its key, so a repeat after a lost answer finds the first one instead of making a second.
Not promised: a start time. The relay is woken after the commit, and looks by itself at least every `poll_s`.
"""

from __future__ import annotations

import hashlib
import json
import math
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import groupby
from typing import Any

import psycopg2
from psycopg2.extensions import connection as PgConnection
from pydantic import BaseModel
from sqlalchemy import event
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session
from uuid_utils.compat import uuid7

from app.errors import IdempotencyConflict, InvalidPayload, PayloadTooLarge
from app.job_types import JobType
from app.json_text import to_json
from app.redaction import has_secrets, reveal
from app.settings import settings
from app.states import State
from app.tracing import is_traceparent
from db.pooled import with_pooled
from db.prepared import Plans
from db.session import one, rows

NAMESPACE = uuid.UUID("6f2a9df0-6f7b-5d0c-9d55-0d5ead5a4e00")
CHANNEL = "deadsure_outbox"
BULK_ROWS = 1000
PRIORITIES = range(10)
KEY_LIMIT = 512
CORRELATION_LIMIT = 200
LATEST_S = 100 * 366 * 86_400

INSERT = """
WITH job AS (
    INSERT INTO jobs (job_id, type, schema_version, scope, idempotency_key, payload, payload_digest, queue,
                      priority, max_failures, max_crashes, max_stalls, expire_early, not_before,
                      correlation_id, trace_context, parent_id, batch_id, expires_at)
    SELECT new.job_id, %(type)s, %(version)s, new.scope, new.key, new.payload::jsonb, decode(new.digest, 'hex'),
           %(queue)s, %(priority)s, %(max_failures)s, %(max_crashes)s, %(max_stalls)s, %(expire_early)s,
           coalesce(%(eta)s::timestamptz, clock_timestamp() + make_interval(secs => %(countdown)s)),
           coalesce(%(correlation_id)s, new.job_id::text), %(trace_context)s, %(parent_id)s::uuid,
           %(batch_id)s::uuid,
           coalesce(%(expires)s::timestamptz, clock_timestamp() + make_interval(secs => %(expires_in)s))
      FROM unnest(%(job_ids)s::uuid[], %(scopes)s::text[], %(keys)s::text[], %(payloads)s::text[], %(digests)s::text[])
           AS new (job_id, scope, key, payload, digest)
     WHERE NOT EXISTS (SELECT FROM job_tombstones old WHERE old.job_id = new.job_id)
    ON CONFLICT (job_id) DO NOTHING
    RETURNING job_id, not_before, correlation_id
), debt AS (
    INSERT INTO outbox (job_id, queue, type, schema_version, priority, correlation_id, trace_context, due_at)
    SELECT job_id, %(queue)s, %(type)s, %(version)s, %(priority)s, correlation_id, %(trace_context)s,
           coalesce(not_before, clock_timestamp())
      FROM job
), journal AS (
    INSERT INTO job_events (job_id, event) SELECT job_id, 'submit' FROM job
)
"""
CREATED = INSERT + "SELECT job_id::text FROM job"
# The race: the INSERT looked for a tombstone just before `deadsure prune` committed it, meets the row that is being
# deleted, waits for that commit, and then finds nothing in its way: the key would run again. Whoever holds this lock is
# not pruned, and who had to wait for it makes its INSERT look anew. An id of our own making cannot come twice.
TAKEN = "SELECT FROM jobs WHERE job_id = ANY(%(job_ids)s::uuid[]) FOR KEY SHARE"
OWN_ID_VERSION = 7
PLANS = Plans("submit")
INSERT_ALONE = PLANS.statement(
    "submit",
    INSERT + "SELECT set_config('deadsure.created', (SELECT count(*) FROM job)::text, false)",
    type="text",
    version="smallint",
    queue="text",
    priority="smallint",
    max_failures="smallint",
    max_crashes="smallint",
    max_stalls="smallint",
    expire_early="boolean",
    eta="timestamptz",
    countdown="float8",
    expires="timestamptz",
    expires_in="float8",
    correlation_id="text",
    trace_context="text",
    parent_id="uuid",
    batch_id="uuid",
    job_ids="text[]",
    scopes="text[]",
    keys="text[]",
    payloads="text[]",
    digests="text[]",
)
# One message, one round trip: the job's commit, then NOTIFY in a transaction of its own. A NOTIFY takes a lock that
# is common to all databases until its commit is done, so it must not wait for the job's fsync.
ALONE = PLANS.message(
    f"BEGIN; {{insert}}; COMMIT; SELECT current_setting('deadsure.created'), pg_notify('{CHANNEL}', '')",
    insert=INSERT_ALONE,
)
ALONE_KEYED = PLANS.message(
    f"BEGIN; {{taken}}; {{insert}}; COMMIT; SELECT current_setting('deadsure.created'), pg_notify('{CHANNEL}', '')",
    taken=PLANS.statement("taken", TAKEN, job_ids="text[]"),
    insert=INSERT_ALONE,
)
NOTIFY = f"SELECT pg_notify('{CHANNEL}', '')"
EXISTING = """
SELECT job_id::text, state::text, encode(payload_digest, 'hex') FROM jobs WHERE job_id = ANY(%(job_ids)s::uuid[])
UNION ALL
SELECT job_id::text, state, encode(payload_digest, 'hex') FROM job_tombstones WHERE job_id = ANY(%(job_ids)s::uuid[])
"""


Run = Callable[[str, dict[str, Any]], Sequence[Any]]


@dataclass(frozen=True)
class Submitted:
    """What a submit answers. `created` is False when the key had already made this job; see its `state`."""

    job_id: uuid.UUID
    created: bool
    state: State


@dataclass(frozen=True)
class NewJob:
    """A validated job, not yet written. `eta` is timezone-aware; `countdown_s` counts from the insert."""

    job_type: JobType
    job_id: uuid.UUID
    payload: str
    digest: str
    scope: str = ""
    key: str | None = None
    priority: int = 0
    countdown_s: float | None = None
    eta: datetime | None = None
    expires: float | datetime | None = None
    correlation_id: str | None = None
    trace_context: str | None = None
    parent_id: uuid.UUID | None = None
    batch_id: uuid.UUID | None = None

    @property
    def may_be_taken(self) -> bool:
        """Whether somebody may have used this id before: it is a key's, or the caller's own."""
        return self.key is not None or self.job_id.version != OWN_ID_VERSION

    def terms(self) -> tuple[Any, ...]:
        """What jobs of one INSERT must have in common."""
        return (
            id(self.job_type),
            self.priority,
            self.countdown_s,
            self.eta,
            self.expires,
            self.correlation_id,
            self.trace_context,
            self.parent_id,
            self.batch_id,
        )


def encode(payload: BaseModel) -> tuple[str, str]:
    """Canonical JSON and its SHA-256 in hex; raises PayloadTooLarge or InvalidPayload."""
    name = type(payload).__name__
    try:
        objects, plain = payload.model_dump(), payload.model_dump(mode="json")
        whole = finite(objects)
        text = to_json(reveal(objects, plain) if has_secrets(type(payload)) else plain, sort_keys=True)
    except (ValueError, RecursionError) as error:
        raise InvalidPayload(f"{name}: {error}; it cannot be stored as JSON") from None
    if not whole:
        raise InvalidPayload(f"{name}: a number is NaN or infinite; it cannot be stored as JSON")
    raw = text.encode()
    limit = settings().payload_limit
    if len(raw) > limit:
        raise PayloadTooLarge(
            f"{name}: {len(raw)} bytes of JSON, at most {limit} are allowed; store the document and submit its id"
        )
    return text, hashlib.sha256(raw).hexdigest()


def finite(value: Any) -> bool:
    """Whether no float in `value` is NaN or infinite; pydantic would turn those in untyped fields into null."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(finite(entry) for entry in value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return all(finite(entry) for entry in value)
    return True


def identify(job_type: JobType, scope: str, key: str | None) -> uuid.UUID:
    """`job_id` of the contract: UUIDv5 of (type, scope, key) when there is a key, else a UUIDv7."""
    if key is None:
        return uuid7()
    return uuid.uuid5(NAMESPACE, json.dumps([job_type.name, scope, key]))


def prepare(
    job_type: JobType,
    payload: BaseModel,
    *,
    idempotency_key: str | None = None,
    scope: str = "",
    priority: int | None = None,
    countdown_s: float | None = None,
    eta: datetime | None = None,
    expires: float | datetime | None = None,
    job_id: uuid.UUID | None = None,
    correlation_id: str | None = None,
    trace_context: str | None = None,
    parent_id: uuid.UUID | None = None,
    batch_id: uuid.UUID | None = None,
) -> NewJob:
    """A job ready to be written; raises ValueError naming the option that is wrong."""
    key = idempotency_key
    if key is None and job_type.key is not None:
        key = job_type.key(payload)
    priority = job_type.priority if priority is None else priority
    if priority not in PRIORITIES:
        raise ValueError(f"{job_type.name}: priority={priority} is not in 0..9")
    for name, seconds in (("countdown", countdown_s), ("expires", expires)):
        if isinstance(seconds, int | float) and not abs(seconds) <= LATEST_S:
            raise ValueError(f"{job_type.name}: {name}={seconds} is not within a hundred years")
    if eta is not None and not isinstance(eta, datetime):
        raise TypeError(f"{job_type.name}: eta must be a datetime with a time zone, not {type(eta).__name__}")
    if countdown_s is not None and eta is not None:
        raise ValueError(f"{job_type.name}: give countdown or eta, not both")
    if eta is not None and eta.tzinfo is None:
        raise ValueError(f"{job_type.name}: eta={eta.isoformat()} has no time zone")
    if isinstance(expires, datetime) and expires.tzinfo is None:
        raise ValueError(f"{job_type.name}: expires={expires.isoformat()} has no time zone")
    if key is not None and (not key or "\0" in key or len(key) > KEY_LIMIT):
        raise ValueError(f"{job_type.name}: idempotency_key must be 1 to {KEY_LIMIT} characters, without NUL")
    if key is not None and job_id is not None:
        raise ValueError(
            f"{job_type.name}: a task_id and an idempotency key exclude each other; the key makes the job's id"
        )
    if correlation_id is not None and not is_correlation_id(correlation_id):
        raise ValueError(f"{job_type.name}: correlation_id must be 1 to {CORRELATION_LIMIT} printable characters")
    if trace_context is not None and not is_traceparent(trace_context):
        raise ValueError(f"{job_type.name}: traceparent={trace_context!r} is no W3C traceparent of version 00")
    text, digest = encode(payload)
    return NewJob(
        job_type=job_type,
        job_id=job_id or identify(job_type, scope, key),
        payload=text,
        digest=digest,
        scope=scope,
        key=key,
        priority=priority,
        countdown_s=countdown_s,
        eta=eta,
        expires=expires,
        correlation_id=correlation_id,
        trace_context=trace_context,
        parent_id=parent_id,
        batch_id=batch_id,
    )


def is_correlation_id(value: object) -> bool:
    """Whether `value` can go into every log line of a job."""
    return isinstance(value, str) and 0 < len(value) <= CORRELATION_LIMIT and value.isprintable()


def alone(job: NewJob) -> Submitted:
    """Write one job in its own transaction, in one round trip.

    A broken connection is tried once more: the identity is fixed, so the second try finds what the first one wrote.
    Raises psycopg2.OperationalError when the database is away, IdempotencyConflict when the key is taken.
    """

    def write(connection: PgConnection) -> Submitted:
        row = one(connection, ALONE_KEYED if job.may_be_taken else ALONE, parameters([job]))
        if row and row[0] == "1":
            return Submitted(job.job_id, created=True, state=State.QUEUED)
        return settle(job, existing(partial(rows, connection), [job]))

    return with_pooled(settings().need_database(), settings().submit_timeout_s, write)


def within(run: Run, jobs: Sequence[NewJob]) -> list[Submitted]:
    """Write jobs in the caller's transaction through `run`; they exist when, and only when, it commits.

    Raises IdempotencyConflict when a key is taken by another payload: roll back, nothing of the call may stay.
    """
    answers: dict[str, Submitted] = {}
    for page in pages(jobs):
        sql = f"{TAKEN}; {CREATED}" if any(job.may_be_taken for job in page) else CREATED
        created = {row[0] for row in run(sql, parameters(page))}
        found = existing(run, page) if len(created) < len(page) else {}
        for job in page:
            known = str(job.job_id)
            earlier = settle(job, found) if known in found else None
            if known in created:
                answers.setdefault(known, Submitted(job.job_id, created=True, state=State.QUEUED))
            elif earlier is not None:
                answers.setdefault(known, earlier)
    return [answers[str(job.job_id)] for job in jobs]


def in_session(session: Session, jobs: Sequence[NewJob]) -> list[Submitted]:
    """`within` the caller's session; the relay is woken once the caller has committed."""
    connection = session.connection()
    answers = within(lambda sql, values: connection.exec_driver_sql(sql, values).all(), jobs)
    if not session.info.get("deadsure_wakes"):
        session.info["deadsure_wakes"] = True
        event.listen(session, "after_commit", wake_after_commit)
        event.listen(session, "after_rollback", forget_after_rollback)
    session.info["deadsure_unannounced"] = True
    return answers


def wake_after_commit(session: Session) -> None:
    """Announce jobs that the outermost commit made visible; savepoints announce nothing."""
    if session.in_nested_transaction() or not session.info.pop("deadsure_unannounced", False):
        return
    wake()


def forget_after_rollback(session: Session) -> None:
    """What was rolled back is not announced; a savepoint's end leaves the rest to be."""
    if not session.in_nested_transaction():
        session.info.pop("deadsure_unannounced", None)


def wake() -> None:
    """Wake the relays. Best effort: without it they look by themselves within `poll_s`."""
    with suppress(psycopg2.Error, SQLAlchemyError):
        with_pooled(settings().need_database(), settings().submit_timeout_s, lambda found: rows(found, NOTIFY))


def pages(jobs: Sequence[NewJob]) -> Iterator[list[NewJob]]:
    """The jobs in runs that share one INSERT: same terms, at most `BULK_ROWS` each."""
    for _, alike in groupby(jobs, key=NewJob.terms):
        page: list[NewJob] = []
        for job in alike:
            page.append(job)
            if len(page) == BULK_ROWS:
                yield page
                page = []
        if page:
            yield page


def existing(run: Run, jobs: Sequence[NewJob]) -> dict[str, tuple[str, str]]:
    """(state, payload digest) of the jobs that are already there, by job id."""
    ids = {"job_ids": [str(job.job_id) for job in jobs]}
    return {row[0]: (row[1], row[2]) for row in run(EXISTING, ids)}


def settle(job: NewJob, found: dict[str, tuple[str, str]]) -> Submitted:
    """The answer for a job whose identity was taken; raises IdempotencyConflict for another payload."""
    state, digest = found[str(job.job_id)]
    if digest != job.digest:
        raise IdempotencyConflict(job.job_id, job.job_type.name, job.key)
    return Submitted(job.job_id, created=False, state=State(state))


def parameters(jobs: Sequence[NewJob]) -> dict[str, Any]:
    """Parameters of INSERT for jobs that share their terms."""
    first = jobs[0]
    return {
        "type": first.job_type.name,
        "version": first.job_type.version,
        "queue": first.job_type.queue,
        "priority": first.priority,
        "max_failures": first.job_type.retry.limit,
        "max_crashes": first.job_type.max_crashes,
        "max_stalls": first.job_type.max_stalls,
        "expire_early": first.job_type.expire_early,
        "eta": first.eta,
        "countdown": first.countdown_s,
        "expires": first.expires if isinstance(first.expires, datetime) else None,
        "expires_in": None if isinstance(first.expires, datetime) else first.expires,
        "correlation_id": first.correlation_id,
        "trace_context": first.trace_context,
        "parent_id": str(first.parent_id) if first.parent_id else None,
        "batch_id": str(first.batch_id) if first.batch_id else None,
        "job_ids": [str(job.job_id) for job in jobs],
        "scopes": [job.scope for job in jobs],
        "keys": [job.key for job in jobs],
        "payloads": [job.payload for job in jobs],
        "digests": [job.digest for job in jobs],
    }
