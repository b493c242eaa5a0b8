"""The worklist: actions and staged replays, batches, progress, periodic jobs. Workers of 0001 keep running.

Revision ID: 0002
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0002"
down_revision = "0001"

NOW = sa.text("clock_timestamp()")


def upgrade() -> None:
    # A table lock waits behind every open transaction and holds up all that come after it: give up soon instead.
    op.execute("SET LOCAL lock_timeout = '5s'")
    jobs()
    worklist()
    periodic()
    parked()
    batches()
    retention()
    with op.get_context().autocommit_block():
        op.create_index(
            "ix_jobs_batch",
            "jobs",
            ["batch_id", "state"],
            postgresql_where=sa.text("batch_id IS NOT NULL"),
            postgresql_concurrently=True,
        )
        op.create_index(
            "ix_quarantine_entries_untraced",
            "quarantine_entries",
            ["quarantined_at"],
            postgresql_where=sa.text("closed_at IS NULL AND dead_lettered_at IS NULL"),
            postgresql_concurrently=True,
        )


def jobs() -> None:
    op.add_column("jobs", sa.Column("batch_id", sa.UUID(), nullable=True))
    op.add_column("jobs", sa.Column("progress_done", sa.BigInteger(), nullable=True))
    op.add_column("jobs", sa.Column("progress_total", sa.BigInteger(), nullable=True))
    op.add_column("jobs", sa.Column("replayed_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("effects", sa.Column("takes_key", sa.Boolean(), nullable=True))
    op.add_column("dead_letters", sa.Column("dismissed_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("dead_letters", sa.Column("dismissed_by", sa.Text(), nullable=True))
    op.add_column("dead_letters", sa.Column("dismissed_reason", sa.Text(), nullable=True))
    op.add_column("quarantine_entries", sa.Column("traceback", postgresql.JSONB(), nullable=True))


def worklist() -> None:
    op.create_table(
        "quarantine_actions",
        sa.Column("action_id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("job_id", sa.UUID(), nullable=False),
        sa.Column("episode", sa.SmallInteger(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("author", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("old_payload", postgresql.JSONB(), nullable=True),
        sa.Column("new_payload", postgresql.JSONB(), nullable=True),
        sa.Column("accepted", postgresql.JSONB(), nullable=True),
        sa.Column("run_id", sa.UUID(), nullable=True),
        sa.Column("at", sa.DateTime(timezone=True), server_default=NOW, nullable=False),
        sa.CheckConstraint(
            "action IN ('replay', 'settle', 'cancel', 'note')", name=op.f("ck_quarantine_actions_action_known")
        ),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.job_id"], name=op.f("fk_quarantine_actions_job_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("action_id", name=op.f("pk_quarantine_actions")),
    )
    op.create_index(
        "ix_quarantine_actions_decision",
        "quarantine_actions",
        ["job_id", "episode"],
        unique=True,
        postgresql_where=sa.text("action <> 'note'"),
    )
    op.create_index("ix_quarantine_actions_job", "quarantine_actions", ["job_id", "action_id"])
    op.create_table(
        "replay_runs",
        sa.Column("run_id", sa.UUID(), nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=True),
        sa.Column("stages", postgresql.JSONB(), nullable=False),
        sa.Column("rate_per_s", sa.Double(), nullable=True),
        sa.Column("patch", postgresql.JSONB(), nullable=True),
        sa.Column("accept_uncertain", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("settle_done", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("wait", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("author", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=NOW, nullable=False),
        sa.Column("stopped_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("stopped_reason", sa.Text(), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_replay_runs")),
    )
    op.create_table(
        "replay_run_jobs",
        sa.Column("run_id", sa.UUID(), nullable=False),
        sa.Column("job_id", sa.UUID(), nullable=False),
        sa.Column("episode", sa.SmallInteger(), nullable=False),
        sa.Column("place", sa.BigInteger(), nullable=False),
        sa.Column("stage", sa.SmallInteger(), nullable=True),
        sa.Column("outcome", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.job_id"], name=op.f("fk_replay_run_jobs_job_id"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["run_id"], ["replay_runs.run_id"], name=op.f("fk_replay_run_jobs_run_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run_id", "job_id", name=op.f("pk_replay_run_jobs")),
    )


def periodic() -> None:
    op.create_table(
        "periodic_ticks",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("schedule", sa.Text(), nullable=False),
        sa.Column("last_tick", sa.DateTime(timezone=True), nullable=False),
        sa.Column("changed_at", sa.DateTime(timezone=True), server_default=NOW, nullable=False),
        sa.PrimaryKeyConstraint("name", "schedule", name=op.f("pk_periodic_ticks")),
    )


def parked() -> None:
    op.add_column("workers", sa.Column("accepts", postgresql.JSONB(), server_default=sa.text("'[]'"), nullable=False))
    op.add_column("workers", sa.Column("queues", postgresql.JSONB(), nullable=True))
    op.create_table(
        "parked_messages",
        sa.Column("parked_id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("task", sa.Text(), nullable=False),
        sa.Column("tried", postgresql.ARRAY(sa.Text()), nullable=False),
        sa.Column("queue", sa.Text(), nullable=False),
        sa.Column("envelope", sa.Text(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("parked_at", sa.DateTime(timezone=True), server_default=NOW, nullable=False),
        sa.Column("due_at", sa.DateTime(timezone=True), server_default=NOW, nullable=False),
        sa.PrimaryKeyConstraint("parked_id", name=op.f("pk_parked_messages")),
        sa.UniqueConstraint("digest", name=op.f("uq_parked_messages_digest")),
    )
    op.create_index("ix_parked_messages_due", "parked_messages", ["due_at"])


def batches() -> None:
    op.add_column("batches", sa.Column("completion", postgresql.JSONB(), nullable=True))
    op.add_column("batches", sa.Column("completion_id", sa.UUID(), nullable=True))
    op.add_column("batches", sa.Column("final_counts", postgresql.JSONB(), nullable=True))
    op.add_column("batches", sa.Column("cancelled_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("batches", sa.Column("cancelled_by", sa.Text(), nullable=True))
    op.add_column("batches", sa.Column("cancel_reason", sa.Text(), nullable=True))
    op.create_check_constraint(
        op.f("ck_batches_one_end"), "batches", "finished_at IS NULL OR (exhausted AND cancelled_at IS NULL)"
    )
    op.create_check_constraint(
        op.f("ck_batches_cancelled_by_somebody"),
        "batches",
        "(cancelled_at IS NULL) = (cancelled_by IS NULL) AND (cancelled_at IS NULL) = (cancel_reason IS NULL)",
    )
    op.create_index(
        "ix_batches_open",
        "batches",
        ["batch_id"],
        postgresql_where=sa.text("exhausted AND finished_at IS NULL AND cancelled_at IS NULL"),
    )
    op.create_index("ix_batches_created", "batches", ["created_at"])
    op.create_table(
        "batch_shared_jobs",
        sa.Column("batch_id", sa.UUID(), nullable=False),
        sa.Column("job_id", sa.UUID(), nullable=False),
        sa.ForeignKeyConstraint(
            ["batch_id"], ["batches.batch_id"], name=op.f("fk_batch_shared_jobs_batch_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("batch_id", "job_id", name=op.f("pk_batch_shared_jobs")),
    )
    op.create_index(op.f("ix_batch_shared_jobs_job_id"), "batch_shared_jobs", ["job_id"])
    op.create_table(
        "monthly_summaries",
        sa.Column("summary_id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("job_id", sa.UUID(), nullable=False),
        sa.Column("batch_id", sa.UUID(), nullable=False),
        sa.Column("month", sa.Text(), nullable=False),
        sa.Column("reports", sa.BigInteger(), nullable=False),
        sa.Column("missing", sa.BigInteger(), nullable=False),
        sa.Column("rows", sa.BigInteger(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), server_default=NOW, nullable=False),
        sa.CheckConstraint("month ~ '^[0-9]{4}-[0-9]{2}$'", name=op.f("ck_monthly_summaries_month_form")),
        sa.CheckConstraint(
            "reports >= 0 AND missing >= 0 AND rows >= 0 AND bytes >= 0",
            name=op.f("ck_monthly_summaries_sums_possible"),
        ),
        sa.PrimaryKeyConstraint("summary_id", name=op.f("pk_monthly_summaries")),
    )
    op.create_index(op.f("ix_monthly_summaries_job_id"), "monthly_summaries", ["job_id"])


def retention() -> None:
    op.add_column("job_tombstones", sa.Column("keyed", sa.Boolean(), server_default=sa.text("true"), nullable=False))
    op.create_index("ix_job_tombstones_age", "job_tombstones", ["keyed", "pruned_at"])
    op.create_index("ix_replay_run_jobs_job", "replay_run_jobs", ["job_id"])


def downgrade() -> None:
    op.drop_table("parked_messages")
    op.drop_column("workers", "queues")
    op.drop_column("workers", "accepts")
    op.drop_table("monthly_summaries")
    op.drop_table("batch_shared_jobs")
    op.drop_index("ix_batches_created", table_name="batches")
    op.drop_index("ix_batches_open", table_name="batches")
    op.drop_constraint(op.f("ck_batches_cancelled_by_somebody"), "batches")
    op.drop_constraint(op.f("ck_batches_one_end"), "batches")
    for column in ("cancel_reason", "cancelled_by", "cancelled_at", "final_counts", "completion_id", "completion"):
        op.drop_column("batches", column)
    op.drop_index("ix_job_tombstones_age", table_name="job_tombstones")
    op.drop_column("job_tombstones", "keyed")
    op.drop_table("periodic_ticks")
    op.drop_table("replay_run_jobs")
    op.drop_table("replay_runs")
    op.drop_table("quarantine_actions")
    op.drop_index("ix_quarantine_entries_untraced", table_name="quarantine_entries")
    op.drop_column("quarantine_entries", "traceback")
    op.drop_column("dead_letters", "dismissed_reason")
    op.drop_column("dead_letters", "dismissed_by")
    op.drop_column("dead_letters", "dismissed_at")
    op.drop_column("effects", "takes_key")
    op.drop_column("jobs", "replayed_at")
    op.drop_index("ix_jobs_batch", table_name="jobs")
    op.drop_column("jobs", "progress_total")
    op.drop_column("jobs", "progress_done")
    op.drop_column("jobs", "batch_id")
