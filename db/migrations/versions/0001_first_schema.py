"""The first schema: jobs, outbox, journal, workers, ledger, quarantine, and the business tables that ship.

Revision ID: 0001
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "accounts",
        sa.Column("account_id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("email", sa.Text(), nullable=False),
        sa.Column("currency", sa.Text(), nullable=False),
        sa.Column("active", sa.Boolean(), server_default=sa.text("true"), nullable=False),
        sa.Column(
            "created_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.CheckConstraint("currency ~ '^[A-Z]{3}$'", name=op.f("ck_accounts_currency_code")),
        sa.CheckConstraint("position('@' in email) > 1", name=op.f("ck_accounts_email_has_at")),
        sa.CheckConstraint("length(name) BETWEEN 1 AND 200", name=op.f("ck_accounts_name_length")),
        sa.PrimaryKeyConstraint("account_id", name=op.f("pk_accounts")),
        sa.UniqueConstraint("email", name=op.f("uq_accounts_email")),
    )
    op.create_table(
        "batches",
        sa.Column("batch_id", sa.UUID(), nullable=False),
        sa.Column("coordinator_id", sa.UUID(), nullable=False),
        sa.Column("cursor", postgresql.JSONB(), nullable=True),
        sa.Column("exhausted", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column(
            "created_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("batch_id", name=op.f("pk_batches")),
    )
    op.create_table(
        "dead_letters",
        sa.Column("dead_letter_id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("job_id", sa.UUID(), nullable=True),
        sa.Column("episode", sa.SmallInteger(), nullable=True),
        sa.Column("copy", sa.BigInteger(), nullable=True),
        sa.Column("headers", postgresql.JSONB(), server_default=sa.text("'{}'"), nullable=False),
        sa.Column("properties", postgresql.JSONB(), server_default=sa.text("'{}'"), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("truncated", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("source", sa.Text(), server_default="broker", nullable=False),
        sa.Column(
            "received_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.CheckConstraint("source IN ('broker', 'task layer')", name=op.f("ck_dead_letters_source_known")),
        sa.PrimaryKeyConstraint("dead_letter_id", name=op.f("pk_dead_letters")),
        sa.UniqueConstraint("digest", name=op.f("uq_dead_letters_digest")),
        sa.UniqueConstraint("job_id", "episode", "copy", name=op.f("uq_dead_letters_job_id_episode_copy")),
    )
    op.create_index("ix_dead_letters_received", "dead_letters", ["received_at"], unique=False)
    op.create_table(
        "job_aliases",
        sa.Column("alias_id", sa.UUID(), nullable=False),
        sa.Column("job_id", sa.UUID(), nullable=False),
        sa.Column(
            "created_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.PrimaryKeyConstraint("alias_id", name=op.f("pk_job_aliases")),
    )
    op.create_table(
        "job_events",
        sa.Column("event_id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("job_id", sa.UUID(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.Column("event", sa.Text(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=True),
        sa.Column("copy", sa.BigInteger(), nullable=True),
        sa.Column("delivery_tag", sa.Text(), nullable=True),
        sa.Column("redelivered", sa.Boolean(), nullable=True),
        sa.Column("worker_id", sa.UUID(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("job_id", "event_id", name=op.f("pk_job_events")),
    )
    op.create_table(
        "job_tombstones",
        sa.Column("job_id", sa.UUID(), nullable=False),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("payload_digest", sa.LargeBinary(), nullable=False),
        sa.Column("result_key", sa.Text(), nullable=True),
        sa.Column("pruned_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_job_tombstones")),
    )
    op.create_table(
        "jobs",
        sa.Column("job_id", sa.UUID(), nullable=False),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("schema_version", sa.SmallInteger(), server_default=sa.text("1"), nullable=False),
        sa.Column("scope", sa.Text(), server_default="", nullable=False),
        sa.Column("idempotency_key", sa.Text(), nullable=True),
        sa.Column("payload", postgresql.JSONB(), nullable=False),
        sa.Column("payload_digest", sa.LargeBinary(), nullable=False),
        sa.Column(
            "state",
            sa.Enum("queued", "running", "retry_wait", "succeeded", "quarantined", "cancelled", name="job_state"),
            server_default="queued",
            nullable=False,
        ),
        sa.Column("queue", sa.Text(), server_default="jobs", nullable=False),
        sa.Column("priority", sa.SmallInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("attempt", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("failures", sa.SmallInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("crashes", sa.SmallInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("stalls", sa.SmallInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("releases", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("max_failures", sa.SmallInteger(), server_default=sa.text("5"), nullable=False),
        sa.Column("max_crashes", sa.SmallInteger(), server_default=sa.text("3"), nullable=False),
        sa.Column("max_stalls", sa.SmallInteger(), server_default=sa.text("3"), nullable=False),
        sa.Column("episode", sa.SmallInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("worker_id", sa.UUID(), nullable=True),
        sa.Column("child_pid", sa.BigInteger(), nullable=True),
        sa.Column("expire_early", sa.Boolean(), server_default=sa.text("true"), nullable=False),
        sa.Column("not_before", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_delay_s", sa.Double(), nullable=True),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("parked_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("checkpoint", postgresql.JSONB(none_as_null=True), nullable=True),
        sa.Column("cancel_requested", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("cause", sa.Text(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("result_key", sa.Text(), nullable=True),
        sa.Column("result", postgresql.JSONB(none_as_null=True), nullable=True),
        sa.Column("correlation_id", sa.Text(), nullable=False),
        sa.Column("trace_context", sa.Text(), nullable=True),
        sa.Column("parent_id", sa.UUID(), nullable=True),
        sa.Column(
            "created_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.Column(
            "changed_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("(state = 'running') = (worker_id IS NOT NULL)", name=op.f("ck_jobs_running_has_owner")),
        sa.CheckConstraint(
            "(state = 'succeeded') = (result_key IS NOT NULL)", name=op.f("ck_jobs_succeeded_has_result_key")
        ),
        sa.CheckConstraint(
            "(state IN ('succeeded', 'cancelled')) = (finished_at IS NOT NULL)",
            name=op.f("ck_jobs_terminal_has_finish_time"),
        ),
        sa.CheckConstraint(
            "state <> 'quarantined' OR (cause IS NOT NULL AND episode > 0)", name=op.f("ck_jobs_quarantined_has_cause")
        ),
        sa.CheckConstraint("state <> 'retry_wait' OR not_before IS NOT NULL", name=op.f("ck_jobs_retry_has_time")),
        sa.CheckConstraint(
            "attempt >= 0 AND failures >= 0 AND crashes >= 0 AND stalls >= 0 AND releases >= 0",
            name=op.f("ck_jobs_counters_not_negative"),
        ),
        sa.CheckConstraint("priority BETWEEN 0 AND 9", name=op.f("ck_jobs_priority_range")),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_jobs")),
        postgresql_with={"fillfactor": "80", "autovacuum_vacuum_scale_factor": "0.02"},
    )
    op.create_index("ix_jobs_created", "jobs", ["created_at"], unique=False)
    op.create_index(
        "ix_jobs_open",
        "jobs",
        ["state", "created_at"],
        unique=False,
        postgresql_where=sa.text("state NOT IN ('succeeded', 'cancelled')"),
    )
    op.create_index(
        "ix_jobs_running", "jobs", ["worker_id"], unique=False, postgresql_where=sa.text("state = 'running'")
    )
    op.create_index("ix_jobs_type", "jobs", ["type", "created_at"], unique=False)
    op.create_table(
        "outbox",
        sa.Column("job_id", sa.UUID(), nullable=False),
        sa.Column("queue", sa.Text(), nullable=False),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("schema_version", sa.SmallInteger(), nullable=False),
        sa.Column("priority", sa.SmallInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("correlation_id", sa.Text(), nullable=False),
        sa.Column("trace_context", sa.Text(), nullable=True),
        sa.Column("kind", sa.Text(), server_default="wake", nullable=False),
        sa.Column("episode", sa.SmallInteger(), server_default=sa.text("1"), nullable=False),
        sa.Column("sends", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("due_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.Column("sent_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("returned_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("returned_reason", sa.Text(), nullable=True),
        sa.Column(
            "created_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.CheckConstraint("kind IN ('wake', 'trace')", name=op.f("ck_outbox_kind_known")),
        sa.CheckConstraint("(sends = 0) = (sent_at IS NULL)", name=op.f("ck_outbox_sent_has_time")),
        sa.CheckConstraint("sends >= 0", name=op.f("ck_outbox_sends_not_negative")),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_outbox")),
        postgresql_with={"fillfactor": "70", "autovacuum_vacuum_scale_factor": "0.02"},
    )
    op.create_index(
        "ix_outbox_again", "outbox", ["queue", "due_at"], unique=False, postgresql_where=sa.text("sends > 0")
    )
    op.create_index(
        "ix_outbox_first",
        "outbox",
        ["queue", "priority", "due_at"],
        unique=False,
        postgresql_where=sa.text("sends = 0"),
    )
    op.create_table(
        "report_exports",
        sa.Column("export_id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("job_id", sa.UUID(), nullable=False),
        sa.Column("result_key", sa.Text(), nullable=False),
        sa.Column("rows", sa.BigInteger(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.CheckConstraint("sha256 ~ '^[0-9a-f]{64}$'", name=op.f("ck_report_exports_sha256_hex")),
        sa.CheckConstraint("rows >= 0 AND bytes > 0", name=op.f("ck_report_exports_sizes_possible")),
        sa.PrimaryKeyConstraint("export_id", name=op.f("pk_report_exports")),
    )
    op.create_index(op.f("ix_report_exports_job_id"), "report_exports", ["job_id"], unique=False)
    op.create_table(
        "schema_compatibility",
        sa.Column("compatible_from", sa.SmallInteger(), nullable=False),
        sa.PrimaryKeyConstraint("compatible_from", name=op.f("pk_schema_compatibility")),
    )
    op.create_table(
        "workers",
        sa.Column("worker_id", sa.UUID(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("hostname", sa.Text(), nullable=False),
        sa.Column("pid", sa.BigInteger(), nullable=False),
        sa.Column("lock_key", sa.BigInteger(), nullable=False),
        sa.Column("pooled", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("knows", postgresql.JSONB(), server_default=sa.text("'[]'"), nullable=False),
        sa.Column(
            "started_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.Column("locked_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("lease_until", sa.DateTime(timezone=True), nullable=False),
        sa.Column("lost_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("lost_cause", sa.Text(), nullable=True),
        sa.Column("stopped_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("(lost_at IS NULL) = (lost_cause IS NULL)", name=op.f("ck_workers_lost_has_cause")),
        sa.PrimaryKeyConstraint("worker_id", name=op.f("pk_workers")),
        sa.UniqueConstraint("lock_key", name=op.f("uq_workers_lock_key")),
    )
    op.create_index(
        "ix_workers_live",
        "workers",
        ["lease_until"],
        unique=False,
        postgresql_where=sa.text("stopped_at IS NULL AND lost_at IS NULL"),
    )
    op.create_table(
        "charges",
        sa.Column("entry_id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("job_id", sa.UUID(), nullable=False),
        sa.Column("charge_id", sa.Text(), nullable=False),
        sa.Column("account_id", sa.BigInteger(), nullable=False),
        sa.Column("amount_cents", sa.BigInteger(), nullable=False),
        sa.Column("currency", sa.Text(), nullable=False),
        sa.Column("reference", sa.Text(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.CheckConstraint("currency ~ '^[A-Z]{3}$'", name=op.f("ck_charges_currency_code")),
        sa.CheckConstraint("amount_cents > 0", name=op.f("ck_charges_amount_positive")),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.account_id"], name=op.f("fk_charges_account_id")),
        sa.PrimaryKeyConstraint("entry_id", name=op.f("pk_charges")),
    )
    op.create_index(op.f("ix_charges_job_id"), "charges", ["job_id"], unique=False)
    op.create_table(
        "effects",
        sa.Column("job_id", sa.UUID(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.Text(), server_default="started", nullable=False),
        sa.Column("idempotency_key", sa.Text(), nullable=False),
        sa.Column("result", postgresql.JSONB(none_as_null=True), nullable=True),
        sa.Column(
            "started_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "(status = 'finished') = (finished_at IS NOT NULL)", name=op.f("ck_effects_finished_has_time")
        ),
        sa.CheckConstraint("status IN ('started', 'finished')", name=op.f("ck_effects_status_known")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.job_id"], name=op.f("fk_effects_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "name", name=op.f("pk_effects")),
    )
    op.create_table(
        "ledger_entries",
        sa.Column("entry_id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("job_id", sa.UUID(), nullable=False),
        sa.Column("account_id", sa.BigInteger(), nullable=False),
        sa.Column("amount_cents", sa.BigInteger(), nullable=False),
        sa.Column("currency", sa.Text(), nullable=False),
        sa.Column("memo", sa.Text(), server_default="", nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.CheckConstraint("currency ~ '^[A-Z]{3}$'", name=op.f("ck_ledger_entries_currency_code")),
        sa.CheckConstraint("amount_cents <> 0", name=op.f("ck_ledger_entries_amount_not_zero")),
        sa.CheckConstraint("length(memo) <= 200", name=op.f("ck_ledger_entries_memo_length")),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.account_id"], name=op.f("fk_ledger_entries_account_id")),
        sa.PrimaryKeyConstraint("entry_id", name=op.f("pk_ledger_entries")),
    )
    op.create_index(op.f("ix_ledger_entries_job_id"), "ledger_entries", ["job_id"], unique=False)
    op.create_table(
        "orders",
        sa.Column("order_id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("account_id", sa.BigInteger(), nullable=False),
        sa.Column(
            "ordered_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.Column("status", sa.Text(), server_default="placed", nullable=False),
        sa.Column("sku", sa.Text(), nullable=False),
        sa.Column("quantity", sa.Integer(), nullable=False),
        sa.Column("unit_price_cents", sa.BigInteger(), nullable=False),
        sa.Column("total_cents", sa.BigInteger(), nullable=False),
        sa.Column("note", sa.Text(), server_default="", nullable=False),
        sa.CheckConstraint(
            "status IN ('placed', 'paid', 'shipped', 'delivered', 'returned', 'cancelled')",
            name=op.f("ck_orders_status_known"),
        ),
        sa.CheckConstraint("length(sku) BETWEEN 1 AND 64", name=op.f("ck_orders_sku_length")),
        sa.CheckConstraint("quantity > 0", name=op.f("ck_orders_quantity_positive")),
        sa.CheckConstraint("total_cents = quantity * unit_price_cents", name=op.f("ck_orders_total_adds_up")),
        sa.CheckConstraint("unit_price_cents >= 0", name=op.f("ck_orders_price_not_negative")),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.account_id"], name=op.f("fk_orders_account_id")),
        sa.PrimaryKeyConstraint("order_id", name=op.f("pk_orders")),
    )
    op.create_index(op.f("ix_orders_account_id_ordered_at"), "orders", ["account_id", "ordered_at"], unique=False)
    op.create_table(
        "quarantine_entries",
        sa.Column("job_id", sa.UUID(), nullable=False),
        sa.Column("episode", sa.SmallInteger(), nullable=False),
        sa.Column("cause", sa.Text(), nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column(
            "quarantined_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.Column("dead_lettered_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("closed_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.job_id"], name=op.f("fk_quarantine_entries_job_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", "episode", name=op.f("pk_quarantine_entries")),
    )
    op.create_index(
        "ix_quarantine_entries_open",
        "quarantine_entries",
        ["fingerprint", "quarantined_at"],
        unique=False,
        postgresql_where=sa.text("closed_at IS NULL"),
    )
    op.create_table(
        "sent_mails",
        sa.Column("mail_id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("job_id", sa.UUID(), nullable=False),
        sa.Column("account_id", sa.BigInteger(), nullable=False),
        sa.Column("message_id", sa.Text(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.account_id"], name=op.f("fk_sent_mails_account_id")),
        sa.PrimaryKeyConstraint("mail_id", name=op.f("pk_sent_mails")),
    )
    op.create_index(op.f("ix_sent_mails_job_id"), "sent_mails", ["job_id"], unique=False)
    op.execute("INSERT INTO schema_compatibility (compatible_from) VALUES (1)")


def downgrade() -> None:
    op.drop_index(op.f("ix_sent_mails_job_id"), table_name="sent_mails")
    op.drop_table("sent_mails")
    op.drop_index(
        "ix_quarantine_entries_open", table_name="quarantine_entries", postgresql_where=sa.text("closed_at IS NULL")
    )
    op.drop_table("quarantine_entries")
    op.drop_index(op.f("ix_orders_account_id_ordered_at"), table_name="orders")
    op.drop_table("orders")
    op.drop_index(op.f("ix_ledger_entries_job_id"), table_name="ledger_entries")
    op.drop_table("ledger_entries")
    op.drop_table("effects")
    op.drop_index(op.f("ix_charges_job_id"), table_name="charges")
    op.drop_table("charges")
    op.drop_index(
        "ix_workers_live", table_name="workers", postgresql_where=sa.text("stopped_at IS NULL AND lost_at IS NULL")
    )
    op.drop_table("workers")
    op.drop_table("schema_compatibility")
    op.drop_index(op.f("ix_report_exports_job_id"), table_name="report_exports")
    op.drop_table("report_exports")
    op.drop_index("ix_outbox_first", table_name="outbox", postgresql_where=sa.text("sends = 0"))
    op.drop_index("ix_outbox_again", table_name="outbox", postgresql_where=sa.text("sends > 0"))
    op.drop_table("outbox")
    op.drop_index("ix_jobs_type", table_name="jobs")
    op.drop_index("ix_jobs_running", table_name="jobs", postgresql_where=sa.text("state = 'running'"))
    op.drop_index(
        "ix_jobs_open", table_name="jobs", postgresql_where=sa.text("state NOT IN ('succeeded', 'cancelled')")
    )
    op.drop_index("ix_jobs_created", table_name="jobs")
    op.drop_table("jobs")
    op.drop_table("job_tombstones")
    op.drop_table("job_events")
    op.drop_table("job_aliases")
    op.drop_index("ix_dead_letters_received", table_name="dead_letters")
    op.drop_table("dead_letters")
    op.drop_table("batches")
    op.drop_table("accounts")
    op.execute("DROP TYPE job_state")
