"""The tables of the business that ships with Deadsure, and append-only records to count effects in.

The `job_id` of a record of effects is not unique on purpose: a constraint would hide a second effect of a job, a
plain row shows it.
"""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from sqlalchemy import CheckConstraint, ForeignKey, Identity, Index, Integer
from sqlalchemy.orm import Mapped, mapped_column

from db.models import NOW, TRUE, Base

ORDER_STATUSES = ("placed", "paid", "shipped", "delivered", "returned", "cancelled")


class Account(Base):
    """A customer; `name` and `email` are what people type, so anything printable may be in them."""

    __tablename__ = "accounts"

    account_id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    name: Mapped[str]
    email: Mapped[str] = mapped_column(unique=True)
    currency: Mapped[str]
    active: Mapped[bool] = mapped_column(server_default=TRUE)
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)

    __table_args__ = (
        CheckConstraint("length(name) BETWEEN 1 AND 200", name="name_length"),
        CheckConstraint("position('@' in email) > 1", name="email_has_at"),
        CheckConstraint("currency ~ '^[A-Z]{3}$'", name="currency_code"),
    )


class Order(Base):
    """One order line; money is in the minor unit of the account's currency."""

    __tablename__ = "orders"

    order_id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    account_id: Mapped[int] = mapped_column(ForeignKey("accounts.account_id"))
    ordered_at: Mapped[datetime] = mapped_column(server_default=NOW)
    status: Mapped[str] = mapped_column(server_default="placed")
    sku: Mapped[str]
    quantity: Mapped[int] = mapped_column(Integer)
    unit_price_cents: Mapped[int]
    total_cents: Mapped[int]
    note: Mapped[str] = mapped_column(server_default="")

    __table_args__ = (
        CheckConstraint(f"status IN {ORDER_STATUSES}", name="status_known"),
        CheckConstraint("length(sku) BETWEEN 1 AND 64", name="sku_length"),
        CheckConstraint("quantity > 0", name="quantity_positive"),
        CheckConstraint("unit_price_cents >= 0", name="price_not_negative"),
        CheckConstraint("total_cents = quantity * unit_price_cents", name="total_adds_up"),
        Index(None, "account_id", "ordered_at"),
    )


class ReportExport(Base):
    """Append-only: one row for each finished report; `bytes` and `sha256` are those of its file."""

    __tablename__ = "report_exports"

    export_id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    job_id: Mapped[UUID] = mapped_column(index=True)
    result_key: Mapped[str]
    rows: Mapped[int]
    bytes: Mapped[int]
    sha256: Mapped[str]
    at: Mapped[datetime] = mapped_column(server_default=NOW)

    __table_args__ = (
        CheckConstraint("rows >= 0 AND bytes > 0", name="sizes_possible"),
        CheckConstraint("sha256 ~ '^[0-9a-f]{64}$'", name="sha256_hex"),
    )


class MonthlySummary(Base):
    """Append-only: one row for each month whose reports are all there; `rows` and `bytes` are sums over them."""

    __tablename__ = "monthly_summaries"

    summary_id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    job_id: Mapped[UUID] = mapped_column(index=True)
    batch_id: Mapped[UUID]
    month: Mapped[str]
    reports: Mapped[int]
    missing: Mapped[int]
    rows: Mapped[int]
    bytes: Mapped[int]
    at: Mapped[datetime] = mapped_column(server_default=NOW)

    __table_args__ = (
        CheckConstraint("month ~ '^[0-9]{4}-[0-9]{2}$'", name="month_form"),
        CheckConstraint("reports >= 0 AND missing >= 0 AND rows >= 0 AND bytes >= 0", name="sums_possible"),
    )


class LedgerEntry(Base):
    """Append-only: one row for each amount posted to an account."""

    __tablename__ = "ledger_entries"

    entry_id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    job_id: Mapped[UUID] = mapped_column(index=True)
    account_id: Mapped[int] = mapped_column(ForeignKey("accounts.account_id"))
    amount_cents: Mapped[int]
    currency: Mapped[str]
    memo: Mapped[str] = mapped_column(server_default="")
    at: Mapped[datetime] = mapped_column(server_default=NOW)

    __table_args__ = (
        CheckConstraint("amount_cents <> 0", name="amount_not_zero"),
        CheckConstraint("currency ~ '^[A-Z]{3}$'", name="currency_code"),
        CheckConstraint("length(memo) <= 200", name="memo_length"),
    )


class SentMail(Base):
    """Append-only: one row for each mail that the mail server took."""

    __tablename__ = "sent_mails"

    mail_id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    job_id: Mapped[UUID] = mapped_column(index=True)
    account_id: Mapped[int] = mapped_column(ForeignKey("accounts.account_id"))
    message_id: Mapped[str]
    at: Mapped[datetime] = mapped_column(server_default=NOW)


class Charge(Base):
    """Append-only: one row for each charge that the payment service made; `reference` is its number there."""

    __tablename__ = "charges"

    entry_id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    job_id: Mapped[UUID] = mapped_column(index=True)
    charge_id: Mapped[str]
    account_id: Mapped[int] = mapped_column(ForeignKey("accounts.account_id"))
    amount_cents: Mapped[int]
    currency: Mapped[str]
    reference: Mapped[str]
    at: Mapped[datetime] = mapped_column(server_default=NOW)

    __table_args__ = (
        CheckConstraint("amount_cents > 0", name="amount_positive"),
        CheckConstraint("currency ~ '^[A-Z]{3}$'", name="currency_code"),
    )
