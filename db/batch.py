"""The tables of batches: a coordinator's cursor. Children are counted from `jobs`, never from counters."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import CheckConstraint, ForeignKey, Index, PrimaryKeyConstraint, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from db.models import FALSE, NOW, Base


class Batch(Base):
    """How far a coordinator is. `batch_id` is its job id, which its children carry in `jobs.batch_id`.

    `completion`: the parameters of the completion job's INSERT, so that whoever notices the end can submit it.
    `final_counts`: children by state at the end, for the time when the children have been pruned.
    """

    __tablename__ = "batches"

    batch_id: Mapped[UUID] = mapped_column(primary_key=True)
    coordinator_id: Mapped[UUID]
    cursor: Mapped[Any | None] = mapped_column(JSONB(none_as_null=True))
    exhausted: Mapped[bool] = mapped_column(server_default=FALSE)
    completion: Mapped[Any | None] = mapped_column(JSONB(none_as_null=True))
    completion_id: Mapped[UUID | None]
    final_counts: Mapped[Any | None] = mapped_column(JSONB(none_as_null=True))
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    finished_at: Mapped[datetime | None]
    cancelled_at: Mapped[datetime | None]
    cancelled_by: Mapped[str | None]
    cancel_reason: Mapped[str | None]

    __table_args__ = (
        CheckConstraint("finished_at IS NULL OR (exhausted AND cancelled_at IS NULL)", name="one_end"),
        CheckConstraint(
            "(cancelled_at IS NULL) = (cancelled_by IS NULL) AND (cancelled_at IS NULL) = (cancel_reason IS NULL)",
            name="cancelled_by_somebody",
        ),
        Index(
            "ix_batches_open",
            "batch_id",
            postgresql_where=text("exhausted AND finished_at IS NULL AND cancelled_at IS NULL"),
        ),
        Index("ix_batches_created", "created_at"),
    )


class BatchSharedJob(Base):
    """A child that was there before its page: its `jobs.batch_id` says whose it is, this row who waits for it too.

    No foreign key to the job: a pruned one has a tombstone, and counts as what that says.
    """

    __tablename__ = "batch_shared_jobs"

    batch_id: Mapped[UUID] = mapped_column(ForeignKey("batches.batch_id", ondelete="CASCADE"))
    job_id: Mapped[UUID] = mapped_column(index=True)

    __table_args__ = (PrimaryKeyConstraint("batch_id", "job_id"),)
