"""`reports.monthly`: which accounts get a report, page by page, and what the month adds up to."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from pydantic import BaseModel, ConfigDict
from sqlalchemy import select, text
from sqlalchemy.orm import Session

from app.batches import Child, Page
from app.domain.months import Month
from db.business import Account

PAGE = 500
SUMMARISE = text("""
WITH child AS (
    SELECT job_id FROM jobs WHERE batch_id = :batch_id
     UNION ALL
    SELECT job_id FROM batch_shared_jobs WHERE batch_id = :batch_id
)
INSERT INTO monthly_summaries (job_id, batch_id, month, reports, missing, rows, bytes)
SELECT :job_id, :batch_id, :month, count(export_id), count(*) - count(export_id), coalesce(sum(rows), 0),
       coalesce(sum(bytes), 0)
  FROM child LEFT JOIN report_exports USING (job_id)
RETURNING reports, missing, rows, bytes
""")


class MonthlyReports(BaseModel):
    """Payload of `reports.monthly`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    month: Month


class SummariseMonth(BaseModel):
    """Payload of `reports.monthly_summary`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    month: Month
    batch_id: UUID


def page_of_reports(session: Session, month: str, after: Any) -> Page:
    """The reports of the accounts behind the account `after` (None: from the first one on)."""
    accounts = active_accounts(session, after or 0)
    return Page(
        [Child(month, {"account_id": account, "month": month}, scope=f"acct-{account}") for account in accounts],
        after=accounts[-1] if accounts else None,
    )


def active_accounts(session: Session, after: int, limit: int = PAGE) -> list[int]:
    """The next `limit` active accounts behind `after`, by number."""
    query = (
        select(Account.account_id)
        .where(Account.active, Account.account_id > after)
        .order_by(Account.account_id)
        .limit(limit)
    )
    return list(session.scalars(query))


def summarise(session: Session, job_id: UUID, payload: SummariseMonth) -> dict[str, int]:
    """Write the month's row: how many reports there are, how many are missing, and their rows and bytes together."""
    values = {"job_id": job_id, "batch_id": payload.batch_id, "month": payload.month}
    found = session.execute(SUMMARISE, values).one()
    return {name: int(value) for name, value in found._mapping.items()}  # noqa: SLF001  # SQLAlchemy's public name
