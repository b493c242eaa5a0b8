"""The tables of the contract. Arrows are SQL constants in `app`; the models fix shapes, constraints and indexes.

Every timestamp is written by PostgreSQL (`clock_timestamp()`), never by a client's clock.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    DateTime,
    Double,
    Enum,
    ForeignKey,
    Identity,
    Index,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    SmallInteger,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.dialects.postgresql import UUID as PgUUID
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

JOB_STATES = ("queued", "running", "retry_wait", "succeeded", "quarantined", "cancelled")
NOW = text("clock_timestamp()")
TRUE, FALSE, ZERO = text("true"), text("false"), text("0")


class Base(DeclarativeBase):
    """Declarative base; the naming convention keeps constraint names stable across migrations."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012  # SQLAlchemy's own spelling
        datetime: DateTime(timezone=True),
        UUID: PgUUID(as_uuid=True),
        str: Text(),
        int: BigInteger(),
        bytes: LargeBinary(),
        dict[str, Any]: JSONB(),
    }


def counter() -> Mapped[int]:
    """A counter that starts at zero and never falls."""
    return mapped_column(SmallInteger, server_default=ZERO)


class Job(Base):
    """One job for its whole life; `job_id` with `attempt` is the fencing token."""

    __tablename__ = "jobs"

    job_id: Mapped[UUID] = mapped_column(primary_key=True)
    type: Mapped[str]
    schema_version: Mapped[int] = mapped_column(SmallInteger, server_default=text("1"))
    scope: Mapped[str] = mapped_column(server_default="")
    idempotency_key: Mapped[str | None]
    payload: Mapped[dict[str, Any]]
    payload_digest: Mapped[bytes]
    state: Mapped[str] = mapped_column(Enum(*JOB_STATES, name="job_state", native_enum=True), server_default="queued")
    queue: Mapped[str] = mapped_column(server_default="jobs")
    priority: Mapped[int] = mapped_column(SmallInteger, server_default=ZERO)
    attempt: Mapped[int] = mapped_column(server_default=ZERO)
    failures: Mapped[int] = counter()
    crashes: Mapped[int] = counter()
    stalls: Mapped[int] = counter()
    releases: Mapped[int] = mapped_column(server_default=ZERO)
    max_failures: Mapped[int] = mapped_column(SmallInteger, server_default=text("5"))
    max_crashes: Mapped[int] = mapped_column(SmallInteger, server_default=text("3"))
    max_stalls: Mapped[int] = mapped_column(SmallInteger, server_default=text("3"))
    episode: Mapped[int] = counter()
    worker_id: Mapped[UUID | None]
    child_pid: Mapped[int | None]
    expire_early: Mapped[bool] = mapped_column(server_default=TRUE)
    not_before: Mapped[datetime | None]
    replayed_at: Mapped[datetime | None]
    last_delay_s: Mapped[float | None] = mapped_column(Double())
    expires_at: Mapped[datetime | None]
    parked_at: Mapped[datetime | None]
    checkpoint: Mapped[Any | None] = mapped_column(JSONB(none_as_null=True))
    cancel_requested: Mapped[bool] = mapped_column(server_default=FALSE)
    cause: Mapped[str | None]
    reason: Mapped[str | None]
    result_key: Mapped[str | None]
    result: Mapped[Any | None] = mapped_column(JSONB(none_as_null=True))
    correlation_id: Mapped[str]
    trace_context: Mapped[str | None]
    parent_id: Mapped[UUID | None]
    batch_id: Mapped[UUID | None]
    progress_done: Mapped[int | None]
    progress_total: Mapped[int | None]
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    changed_at: Mapped[datetime] = mapped_column(server_default=NOW)
    finished_at: Mapped[datetime | None]

    __table_args__ = (
        CheckConstraint("(state = 'running') = (worker_id IS NOT NULL)", name="running_has_owner"),
        CheckConstraint("(state = 'succeeded') = (result_key IS NOT NULL)", name="succeeded_has_result_key"),
        CheckConstraint("state <> 'retry_wait' OR not_before IS NOT NULL", name="retry_has_time"),
        CheckConstraint(
            "state <> 'quarantined' OR (cause IS NOT NULL AND episode > 0)",
            name="quarantined_has_cause",
        ),
        CheckConstraint(
            "(state IN ('succeeded', 'cancelled')) = (finished_at IS NOT NULL)",
            name="terminal_has_finish_time",
        ),
        CheckConstraint(
            "attempt >= 0 AND failures >= 0 AND crashes >= 0 AND stalls >= 0 AND releases >= 0",
            name="counters_not_negative",
        ),
        CheckConstraint("priority BETWEEN 0 AND 9", name="priority_range"),
        Index("ix_jobs_running", "worker_id", postgresql_where=text("state = 'running'")),
        Index(
            "ix_jobs_open",
            "state",
            "created_at",
            postgresql_where=text("state NOT IN ('succeeded', 'cancelled')"),
        ),
        Index("ix_jobs_created", "created_at"),
        Index("ix_jobs_type", "type", "created_at"),
        Index("ix_jobs_batch", "batch_id", "state", postgresql_where=text("batch_id IS NOT NULL")),
        {"postgresql_with": {"fillfactor": "80", "autovacuum_vacuum_scale_factor": "0.02"}},
    )


class Outbox(Base):
    """A debt, for each job at most one.

    `wake`: somebody must wake this job up; its claim pays. `trace`: a quarantined job's dead letter is missing; the
    intake pays. `episode` is the quarantine that a dead letter of this message would belong to.
    """

    __tablename__ = "outbox"

    job_id: Mapped[UUID] = mapped_column(primary_key=True)
    queue: Mapped[str]
    type: Mapped[str]
    schema_version: Mapped[int] = mapped_column(SmallInteger)
    priority: Mapped[int] = mapped_column(SmallInteger, server_default=ZERO)
    correlation_id: Mapped[str]
    trace_context: Mapped[str | None]
    kind: Mapped[str] = mapped_column(server_default="wake")
    episode: Mapped[int] = mapped_column(SmallInteger, server_default=text("1"))
    sends: Mapped[int] = mapped_column(server_default=ZERO)
    due_at: Mapped[datetime] = mapped_column(server_default=NOW)
    sent_at: Mapped[datetime | None]
    returned_at: Mapped[datetime | None]
    returned_reason: Mapped[str | None]
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)

    __table_args__ = (
        CheckConstraint("sends >= 0", name="sends_not_negative"),
        CheckConstraint("kind IN ('wake', 'trace')", name="kind_known"),
        CheckConstraint("(sends = 0) = (sent_at IS NULL)", name="sent_has_time"),
        Index(
            "ix_outbox_first",
            "queue",
            "priority",
            "due_at",
            postgresql_where=text("sends = 0"),
        ),
        Index("ix_outbox_again", "queue", "due_at", postgresql_where=text("sends > 0")),
        {"postgresql_with": {"fillfactor": "70", "autovacuum_vacuum_scale_factor": "0.02"}},
    )


class JobEvent(Base):
    """The journal. No foreign key: duplicates must never wait for a job's row lock to be recorded."""

    __tablename__ = "job_events"

    event_id: Mapped[int] = mapped_column(Identity(always=True))
    job_id: Mapped[UUID]
    at: Mapped[datetime] = mapped_column(server_default=NOW)
    event: Mapped[str]
    attempt: Mapped[int | None]
    copy: Mapped[int | None]
    delivery_tag: Mapped[str | None]
    redelivered: Mapped[bool | None]
    worker_id: Mapped[UUID | None]
    reason: Mapped[str | None]

    __table_args__ = (PrimaryKeyConstraint("job_id", "event_id"),)


class Worker(Base):
    """The lease of one worker incarnation; `lock_key` is the advisory lock that its session holds.

    `knows`: jobs that it can run, as name@version. `accepts`: messages without a job that it can read, foreign ones as
    name@version and those of plain tasks by their name. `queues`: what it consumes; NULL while it has not said so.
    """

    __tablename__ = "workers"

    worker_id: Mapped[UUID] = mapped_column(primary_key=True)
    name: Mapped[str]
    hostname: Mapped[str]
    pid: Mapped[int]
    lock_key: Mapped[int] = mapped_column(unique=True)
    pooled: Mapped[bool] = mapped_column(server_default=FALSE)
    knows: Mapped[list[str]] = mapped_column(JSONB, server_default=text("'[]'"))
    accepts: Mapped[list[str]] = mapped_column(JSONB, server_default=text("'[]'"))
    queues: Mapped[list[str] | None] = mapped_column(JSONB(none_as_null=True))
    started_at: Mapped[datetime] = mapped_column(server_default=NOW)
    locked_at: Mapped[datetime | None]
    lease_until: Mapped[datetime]
    lost_at: Mapped[datetime | None]
    lost_cause: Mapped[str | None]
    stopped_at: Mapped[datetime | None]

    __table_args__ = (
        CheckConstraint("(lost_at IS NULL) = (lost_cause IS NULL)", name="lost_has_cause"),
        Index(
            "ix_workers_live",
            "lease_until",
            postgresql_where=text("stopped_at IS NULL AND lost_at IS NULL"),
        ),
    )


class Effect(Base):
    """The ledger: one row for each external call of a job, with its own idempotency key."""

    __tablename__ = "effects"

    job_id: Mapped[UUID] = mapped_column(ForeignKey("jobs.job_id", ondelete="CASCADE"))
    name: Mapped[str]
    attempt: Mapped[int]
    status: Mapped[str] = mapped_column(server_default="started")
    idempotency_key: Mapped[str]
    takes_key: Mapped[bool | None]
    result: Mapped[Any | None] = mapped_column(JSONB(none_as_null=True))
    started_at: Mapped[datetime] = mapped_column(server_default=NOW)
    finished_at: Mapped[datetime | None]

    __table_args__ = (
        PrimaryKeyConstraint("job_id", "name"),
        CheckConstraint("status IN ('started', 'finished')", name="status_known"),
        CheckConstraint("(status = 'finished') = (finished_at IS NOT NULL)", name="finished_has_time"),
    )


class QuarantineEntry(Base):
    """First trace of a quarantined job: one row for each episode."""

    __tablename__ = "quarantine_entries"

    job_id: Mapped[UUID] = mapped_column(ForeignKey("jobs.job_id", ondelete="CASCADE"))
    episode: Mapped[int] = mapped_column(SmallInteger)
    cause: Mapped[str]
    fingerprint: Mapped[str]
    reason: Mapped[str]
    attempt: Mapped[int]
    traceback: Mapped[Any | None] = mapped_column(JSONB(none_as_null=True))
    quarantined_at: Mapped[datetime] = mapped_column(server_default=NOW)
    dead_lettered_at: Mapped[datetime | None]
    closed_at: Mapped[datetime | None]

    __table_args__ = (
        PrimaryKeyConstraint("job_id", "episode"),
        Index(
            "ix_quarantine_entries_open",
            "fingerprint",
            "quarantined_at",
            postgresql_where=text("closed_at IS NULL"),
        ),
        Index(
            "ix_quarantine_entries_untraced",
            "quarantined_at",
            postgresql_where=text("closed_at IS NULL AND dead_lettered_at IS NULL"),
        ),
    )


class DeadLetter(Base):
    """Second trace: a message that came back through the dead-letter exchange, bytes and headers."""

    __tablename__ = "dead_letters"

    dead_letter_id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    job_id: Mapped[UUID | None]
    episode: Mapped[int | None] = mapped_column(SmallInteger)
    copy: Mapped[int | None]
    headers: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    properties: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    body: Mapped[bytes]
    truncated: Mapped[bool] = mapped_column(server_default=FALSE)
    digest: Mapped[bytes | None] = mapped_column(unique=True)
    reason: Mapped[str]
    source: Mapped[str] = mapped_column(server_default="broker")
    received_at: Mapped[datetime] = mapped_column(server_default=NOW)
    dismissed_at: Mapped[datetime | None]
    dismissed_by: Mapped[str | None]
    dismissed_reason: Mapped[str | None]

    __table_args__ = (
        UniqueConstraint("job_id", "episode", "copy"),
        CheckConstraint("source IN ('broker', 'task layer')", name="source_known"),
        Index("ix_dead_letters_received", "received_at"),
    )


class JobTombstone(Base):
    """What stays of a pruned job, so that its key stays taken; `keyed`: its id may be given again."""

    __tablename__ = "job_tombstones"

    job_id: Mapped[UUID] = mapped_column(primary_key=True)
    type: Mapped[str]
    state: Mapped[str]
    payload_digest: Mapped[bytes]
    result_key: Mapped[str | None]
    keyed: Mapped[bool] = mapped_column(server_default=TRUE)
    pruned_at: Mapped[datetime] = mapped_column(server_default=NOW)

    __table_args__ = (Index("ix_job_tombstones_age", "keyed", "pruned_at"),)


class JobAlias(Base):
    """A task id under which a foreign client asks for a job that another id already stood for."""

    __tablename__ = "job_aliases"

    alias_id: Mapped[UUID] = mapped_column(primary_key=True)
    job_id: Mapped[UUID]
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)


class SchemaCompatibility(Base):
    """One row, written by migrations: the oldest release that may still work on this schema."""

    __tablename__ = "schema_compatibility"

    compatible_from: Mapped[int] = mapped_column(SmallInteger, primary_key=True)
