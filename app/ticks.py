"""When a schedule's ticks are: instants, the same for whoever computes them, wherever and whenever.

An interval's ticks are multiples of it since the epoch (1970-01-01T00:00Z), not since somebody's start. A crontab's are
wall clock times of a time zone, and a change of that clock is met as cron meets it. With named hours every time of day
comes exactly once a day: the first of two, and when the clock jumps over it, as much later as the clock jumped. With
every hour (`*`) the clock's repeated hour ticks twice and the missing one not at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from functools import lru_cache
from itertools import pairwise
from typing import Protocol

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
DAY, SHORTEST = timedelta(days=1), timedelta(seconds=1)
# The longest wait there is: 29 February on one day of the week, over a century without a leap year.
SEARCH_DAYS = 41 * 366
HOURS, MINUTES, DAYS, MONTHS, WEEKDAYS = range(24), range(60), range(1, 32), range(1, 13), range(7)


class Ticks(Protocol):
    """The ticks of one schedule; `str()` of it tells two schedules apart."""

    def after(self, moment: datetime) -> datetime | None:
        """The first tick behind `moment`; None when there is none in forty years."""

    def between(self, after: datetime, until: datetime) -> Iterator[datetime]:
        """The ticks behind `after`, up to and with `until`: UTC, newest first."""


@dataclass(frozen=True)
class Every:
    """Each multiple of `period` since the epoch."""

    period: timedelta

    def __post_init__(self) -> None:
        if self.period < SHORTEST:
            raise ValueError(f"an interval of {self.period.total_seconds():g} s is shorter than a second")

    def __str__(self) -> str:
        return f"every {self.period}"

    def after(self, moment: datetime) -> datetime | None:
        """The first tick behind `moment`."""
        return EPOCH + ((moment - EPOCH) // self.period + 1) * self.period

    def between(self, after: datetime, until: datetime) -> Iterator[datetime]:
        """The ticks behind `after`, up to and with `until`: UTC, newest first."""
        tick = EPOCH + (until - EPOCH) // self.period * self.period
        while tick > after:
            yield tick
            tick -= self.period


@dataclass(frozen=True)
class Crontab:
    """Minutes and hours of the matching days on the wall clock of `zone`; Sunday is day 0 of the week."""

    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    zone: tzinfo

    def __str__(self) -> str:
        fields = (
            (self.minutes, MINUTES),
            (self.hours, HOURS),
            (self.days, DAYS),
            (self.months, MONTHS),
            (self.weekdays, WEEKDAYS),
        )
        return f"crontab {' '.join(spelled(chosen, known) for chosen, known in fields)} {self.zone}"

    def after(self, moment: datetime) -> datetime | None:
        """The first tick behind `moment`; None when there is none in forty years."""
        first = moment.astimezone(self.zone).date() - DAY
        found: list[datetime] = []
        found_on = 0
        for number in range(SEARCH_DAYS):
            # A day's last ticks may be pushed into the next day, behind its first: look one day further.
            if found and number > found_on + 1:
                break
            later = [tick for tick in self.on(first + number * DAY) if tick > moment]
            if later and not found:
                found_on = number
            found += later
        return min(found, default=None)

    def between(self, after: datetime, until: datetime) -> Iterator[datetime]:
        """The ticks behind `after`, up to and with `until`: UTC, newest first."""
        day, last = until.astimezone(self.zone).date() + DAY, after.astimezone(self.zone).date() - DAY
        held: set[datetime] = set()
        while day >= last:
            held.update(tick for tick in self.on(day) if after < tick <= until)
            if held:
                sure = {tick for tick in held if tick > self.instant(day + DAY, 0, 0)}
                yield from sorted(sure, reverse=True)
                held -= sure
            day -= DAY
        yield from sorted(held, reverse=True)

    def on(self, day: date) -> tuple[datetime, ...]:
        """The ticks of one local day, oldest first."""
        if day.day in self.days and day.month in self.months and day.isoweekday() % 7 in self.weekdays:
            return ticks_of(self, day)
        return ()

    def instant(self, day: date, hour: int, minute: int, fold: int = 0) -> datetime:
        """The moment of a wall clock time, UTC."""
        return datetime.combine(day, time(hour, minute, fold=fold), self.zone).astimezone(UTC)

    def shows(self, tick: datetime, hour: int, minute: int) -> bool:
        """Whether the wall clock shows this time at `tick`: it never does for one that the clock jumps over."""
        local = tick.astimezone(self.zone)
        return (local.hour, local.minute) == (hour, minute)


@lru_cache(maxsize=256)
def ticks_of(crontab: Crontab, day: date) -> tuple[datetime, ...]:
    """The ticks of a day that matches."""
    times = [(hour, minute) for hour in crontab.hours for minute in crontab.minutes]
    if len(crontab.hours) < len(HOURS):
        return tuple(sorted({crontab.instant(day, hour, minute) for hour, minute in times}))
    both = {(crontab.instant(day, hour, minute, fold), hour, minute) for hour, minute in times for fold in (0, 1)}
    return tuple(sorted({tick for tick, hour, minute in both if crontab.shows(tick, hour, minute)}))


def spelled(chosen: frozenset[int], known: range) -> str:
    """A crontab field: `*`, or numbers and runs of numbers."""
    if chosen == frozenset(known):
        return "*"
    numbers = sorted(chosen)
    breaks = [0, *(place + 1 for place, (one, next_) in enumerate(pairwise(numbers)) if next_ != one + 1), len(numbers)]
    runs = [numbers[start:end] for start, end in pairwise(breaks)]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
