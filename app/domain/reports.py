"""`reports.export`: an account's orders of one month as a CSV file, streamed from PostgreSQL to the disk."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from uuid import UUID

from psycopg2 import sql
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Connection, insert, text
from sqlalchemy.orm import Session

from app.domain.atomic_file import HashedFile, atomic_file
from app.domain.errors import UnknownAccount
from app.domain.months import Month, bounds
from db.business import ReportExport

# What a spreadsheet takes for a formula: = + - @, their full-width forms, also behind white space.
FORMULA_START = r"^\s*[=+@＝＋－＠-]|^[\t\r\n]"  # noqa: RUF001  # the full-width forms are meant

PROGRESS_ROWS = 1000
COUNT_ORDERS = text("""
SELECT count(*) FROM orders WHERE account_id = :account_id AND ordered_at >= :start AND ordered_at < :end
""")
COPY_ORDERS = """
COPY (
    SELECT orders.order_id,
           to_char(orders.ordered_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') AS ordered_at,
           orders.status,
           CASE WHEN orders.sku ~ {formula} THEN '''' || orders.sku ELSE orders.sku END AS sku,
           orders.quantity, orders.unit_price_cents, orders.total_cents, accounts.currency,
           CASE WHEN orders.note ~ {formula} THEN '''' || orders.note ELSE orders.note END AS note
      FROM orders JOIN accounts USING (account_id)
     WHERE orders.account_id = {account_id}
       AND orders.ordered_at >= {start} AND orders.ordered_at < {end}
     ORDER BY orders.ordered_at, orders.order_id
) TO STDOUT (FORMAT csv, HEADER true, ENCODING 'UTF8')
"""


class ExportReport(BaseModel):
    """Payload of `reports.export`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    account_id: Annotated[int, Field(gt=0, le=2**63 - 1)]
    month: Month


@dataclass(frozen=True)
class ExportedFile:
    """A report on disk: `rows` without the header, `bytes` and `sha256` (hex) of the whole file."""

    result_key: str
    rows: int
    bytes: int
    sha256: str
    path: Path


class CountedRows:
    """Write end of a COPY that tells how many rows came; the server sends each row, and the header, by itself."""

    def __init__(self, file: HashedFile, on_rows: Callable[[int], None]) -> None:
        self._file, self._on_rows = file, on_rows
        self._rows = -1

    def write(self, data: bytes) -> int:
        """Append one row; raises OSError when the disk is full."""
        self._rows += 1
        if self._rows % PROGRESS_ROWS == 0:
            self._on_rows(self._rows)
        return self._file.write(data)


def export_month(
    connection: Connection,
    reports_dir: Path,
    job_id: UUID,
    account_id: int,
    month: str,
    *,
    before_publish: Callable[[], None] | None = None,
    on_rows: Callable[[int, int], None] | None = None,
) -> ExportedFile:
    """Write the account's orders of `month` (UTC, oldest first) to `{job_id}.csv` in `reports_dir`.

    Memory does not grow with the number of rows, and a reader sees the whole file or none. The file is UTF-8
    and one snapshot of the database. Against formula injection, a text cell that starts with = + - @ or their
    full-width forms (also behind white space), a tab or a line break gets an apostrophe in front; no other
    cell is changed.

    `before_publish` is called between the last byte and the rename: raise there to abandon the file, for
    instance when another worker owns the job by now. A second export of the same job replaces the first. `on_rows`
    hears how many rows are written, and of how many, every `PROGRESS_ROWS`.

    Raises ValueError for a month that is none and UnknownAccount, both before a file is written; OSError when
    the disk fails.
    """
    start, end = bounds(month)
    known = connection.scalar(text("SELECT true FROM accounts WHERE account_id = :id"), {"id": account_id})
    if known is None:
        raise UnknownAccount(account_id)
    # COPY takes no parameters, so the values are quoted by the driver.
    statement = sql.SQL(COPY_ORDERS).format(
        account_id=sql.Literal(account_id),
        start=sql.Literal(start),
        end=sql.Literal(end),
        formula=sql.Literal(FORMULA_START),
    )
    told = None
    if on_rows is not None:
        total = connection.scalar(COUNT_ORDERS, {"account_id": account_id, "start": start, "end": end}) or 0
        told = lambda rows: on_rows(rows, total)  # noqa: E731  # a function of its own would only be longer
    path = reports_dir / f"{UUID(str(job_id))}.csv"
    with atomic_file(path, before_publish) as file, closing(connection.connection.cursor()) as cursor:
        cursor.copy_expert(statement, file if told is None else CountedRows(file, told))
        rows = cursor.rowcount
    return ExportedFile(f"reports/{path.name}", rows, file.size, file.sha256, path)


def record_export(session: Session, job_id: UUID, exported: ExportedFile) -> None:
    """Note the finished export in `report_exports`, in the session's (the finishing) transaction."""
    session.execute(
        insert(ReportExport.__table__).inline(),  # type: ignore[arg-type]  # __table__ is a Table here
        {
            "job_id": job_id,
            "result_key": exported.result_key,
            "rows": exported.rows,
            "bytes": exported.bytes,
            "sha256": exported.sha256,
        },
    )
