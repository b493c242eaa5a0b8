"""The tables of the worklist: what people decided about quarantined jobs, and replays in stages."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import CheckConstraint, Double, ForeignKey, Identity, Index, PrimaryKeyConstraint, SmallInteger, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from db.models import FALSE, NOW, Base


class QuarantineAction(Base):
    """What somebody did about one quarantined job. For each episode there is at most one decision; notes are free.

    `accepted`: names of calls that may have been made and were forgotten all the same.
    """

    __tablename__ = "quarantine_actions"

    action_id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    job_id: Mapped[UUID] = mapped_column(ForeignKey("jobs.job_id", ondelete="CASCADE"))
    episode: Mapped[int] = mapped_column(SmallInteger)
    action: Mapped[str]
    author: Mapped[str]
    reason: Mapped[str]
    old_payload: Mapped[Any | None] = mapped_column(JSONB(none_as_null=True))
    new_payload: Mapped[Any | None] = mapped_column(JSONB(none_as_null=True))
    accepted: Mapped[Any | None] = mapped_column(JSONB(none_as_null=True))
    run_id: Mapped[UUID | None]
    at: Mapped[datetime] = mapped_column(server_default=NOW)

    __table_args__ = (
        CheckConstraint("action IN ('replay', 'settle', 'cancel', 'note')", name="action_known"),
        Index(
            "ix_quarantine_actions_decision",
            "job_id",
            "episode",
            unique=True,
            postgresql_where=text("action <> 'note'"),
        ),
        Index("ix_quarantine_actions_job", "job_id", "action_id"),
    )


class ReplayRun(Base):
    """A replay in stages: who, why, what it covers, and how far it came."""

    __tablename__ = "replay_runs"

    run_id: Mapped[UUID] = mapped_column(primary_key=True)
    fingerprint: Mapped[str | None]
    stages: Mapped[Any] = mapped_column(JSONB)
    rate_per_s: Mapped[float | None] = mapped_column(Double())
    patch: Mapped[Any | None] = mapped_column(JSONB(none_as_null=True))
    accept_uncertain: Mapped[bool] = mapped_column(server_default=FALSE)
    settle_done: Mapped[bool] = mapped_column(server_default=FALSE)
    wait: Mapped[bool] = mapped_column(server_default=FALSE)
    author: Mapped[str]
    reason: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    stopped_at: Mapped[datetime | None]
    stopped_reason: Mapped[str | None]
    finished_at: Mapped[datetime | None]


class ReplayRunJob(Base):
    """One job of a replay run, in the order of `place`; stage and outcome are empty until the run came to it."""

    __tablename__ = "replay_run_jobs"

    run_id: Mapped[UUID] = mapped_column(ForeignKey("replay_runs.run_id", ondelete="CASCADE"))
    job_id: Mapped[UUID] = mapped_column(ForeignKey("jobs.job_id", ondelete="CASCADE"))
    episode: Mapped[int] = mapped_column(SmallInteger)
    place: Mapped[int]
    stage: Mapped[int | None] = mapped_column(SmallInteger)
    outcome: Mapped[str | None]

    __table_args__ = (PrimaryKeyConstraint("run_id", "job_id"), Index("ix_replay_run_jobs_job", "job_id"))
