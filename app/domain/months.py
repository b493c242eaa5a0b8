"""Calendar months as `YYYY-MM`; a month begins and ends at midnight UTC."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated

from pydantic import AfterValidator

SHAPE = re.compile(r"20[0-9]{2}-(0[1-9]|1[0-2])")


def check(month: str) -> str:
    """Return `month`; raises ValueError saying which shape is wanted."""
    if SHAPE.fullmatch(month) is None:
        raise ValueError("a month is written YYYY-MM, from 2000-01 to 2099-12, for instance 2026-10")
    return month


Month = Annotated[str, AfterValidator(check)]


def bounds(month: str) -> tuple[datetime, datetime]:
    """First moment of `month` and of the month after it; raises ValueError when `month` is none."""
    year, number = int(check(month)[:4]), int(month[5:])
    return (
        datetime(year, number, 1, tzinfo=UTC),
        datetime(year + number // 12, number % 12 + 1, 1, tzinfo=UTC),
    )


def before(day: datetime, count: int) -> tuple[str, ...]:
    """The last `count` whole months before the month of `day`, oldest first."""
    last = day.year * 12 + day.month - 2
    return tuple(f"{n // 12:04d}-{n % 12 + 1:02d}" for n in range(last - count + 1, last + 1))


def month_before(day: datetime) -> str:
    """The whole month before the month of `day`: what a report at the turn of the month is about."""
    return before(day, 1)[0]
