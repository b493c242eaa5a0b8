"""`reports.export`: one account's orders of a month as a CSV file."""

from __future__ import annotations

from typing import Any

from app.domain.reports import ExportReport, export_month, record_export
from app.job import Job
from app.settings import settings
from tasks.durable import durable


@durable("reports.export", payload=ExportReport)
def export_report(job: Job, payload: ExportReport) -> dict[str, Any]:
    """Write `{job_id}.csv`; its record commits with the job's success."""
    exported = export_month(
        job.session.connection(),
        settings().reports_dir,
        job.job_id,
        payload.account_id,
        payload.month,
        before_publish=job.still_mine,
        on_rows=job.progress,
    )
    record_export(job.session, job.job_id, exported)
    job.result_key = exported.result_key
    return {"rows": exported.rows, "bytes": exported.bytes, "sha256": exported.sha256}
