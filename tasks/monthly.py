"""`reports.monthly`: one `reports.export` for each active account, and a summary when all have ended."""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session

from app.batches import Page
from app.domain.monthly import MonthlyReports, SummariseMonth, page_of_reports, summarise
from app.job import Job
from tasks.batch import batch
from tasks.durable import durable
from tasks.reports import export_report


@durable("reports.monthly_summary", payload=SummariseMonth)
def monthly_summary(job: Job, payload: SummariseMonth) -> dict[str, int]:
    """Add the month's row to `monthly_summaries`, in the finishing transaction."""
    return summarise(job.session, job.job_id, payload)


@batch(
    "reports.monthly",
    payload=MonthlyReports,
    key=lambda payload: payload.month,
    child=export_report,
    on_complete=monthly_summary,
    completion=lambda payload, batch_id: {"month": payload.month, "batch_id": str(batch_id)},
)
def monthly_reports(session: Session, payload: MonthlyReports, after: Any) -> Page:
    """The reports of the next accounts."""
    return page_of_reports(session, payload.month, after)
