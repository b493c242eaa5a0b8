"""`reports.monthly`: a coordinator that orders one `reports.export` for each active account.

Each page is committed before the cursor moves past it. A coordinator that dies in between orders the page again, and
the natural keys give the same children back.
"""

from __future__ import annotations

from sqlalchemy.orm import Session

from app.domain.monthly import MonthlyReports, Progress, active_accounts
from app.job import Job
from app.settings import settings
from db.session import engine
from tasks.durable import durable
from tasks.reports import export_report


@durable("reports.monthly", payload=MonthlyReports, key=lambda payload: payload.month)
def monthly_reports(job: Job, payload: MonthlyReports) -> dict[str, int]:
    """Order the reports of a month, a page of accounts at a time."""
    progress = Progress.of(job.cursor)
    while page := order_page(payload.month, progress.after):
        progress = progress.past(page)
        job.checkpoint(progress.model_dump())
        if job.should_stop:
            job.stop()
    return {"reports": progress.ordered}


def order_page(month: str, after: int) -> list[int]:
    """Order the reports of the next accounts behind `after`, in one commit; the accounts, none at the end."""
    with Session(engine(settings().need_database())) as session, session.begin():
        page = active_accounts(session, after)
        export_report.submit_many(
            session,
            [{"account_id": account_id, "month": month} for account_id in page],
            keys=[month] * len(page),
            scopes=[f"acct-{account_id}" for account_id in page],
        )
    return page
