"""`reports.monthly`: which accounts get a report, page by page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict
from sqlalchemy import select
from sqlalchemy.orm import Session

from app.domain.months import Month
from db.business import Account

PAGE = 500


class MonthlyReports(BaseModel):
    """Payload of `reports.monthly`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    month: Month


class Progress(BaseModel):
    """How far the coordinator is: the last account that has its report ordered, and how many have."""

    after: int = 0
    ordered: int = 0

    @classmethod
    def of(cls, cursor: Any) -> Progress:
        """From a job's cursor; None is the beginning."""
        return cls() if cursor is None else cls.model_validate(cursor)

    def past(self, page: Sequence[int]) -> Progress:
        """The progress once the reports of this page are ordered."""
        return Progress(after=page[-1], ordered=self.ordered + len(page))


def active_accounts(session: Session, after: int, limit: int = PAGE) -> list[int]:
    """The next `limit` active accounts behind `after`, by number."""
    query = (
        select(Account.account_id)
        .where(Account.active, Account.account_id > after)
        .order_by(Account.account_id)
        .limit(limit)
    )
    return list(session.scalars(query))
