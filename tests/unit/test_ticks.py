"""Ticks are instants: the same for every beat, over changes of the clock, from both ends of a window."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest

from app.ticks import DAYS, HOURS, MINUTES, MONTHS, WEEKDAYS, Crontab, Every, Ticks

DAY = timedelta(days=1)
BERLIN = ZoneInfo("Europe/Berlin")


def crontab(
    minutes: set[int] | None = None,
    hours: set[int] | None = None,
    days: set[int] | None = None,
    months: set[int] | None = None,
    weekdays: set[int] | None = None,
    zone: str = "Europe/Berlin",
) -> Crontab:
    chosen = zip((minutes, hours, days, months, weekdays), (MINUTES, HOURS, DAYS, MONTHS, WEEKDAYS), strict=True)
    return Crontab(*(frozenset(known if some is None else some) for some, known in chosen), ZoneInfo(zone))  # type: ignore[call-arg,arg-type]


def forwards(ticks: Ticks, after: datetime, until: datetime) -> list[datetime]:
    """The ticks of a window, one by one from its beginning."""
    found, moment = [], ticks.after(after)
    while moment is not None and moment <= until:
        found.append(moment)
        moment = ticks.after(moment)
    return found


def walls(ticks: Crontab, after: datetime, until: datetime) -> list[str]:
    """What the wall clock shows at the ticks of a window."""
    return [tick.astimezone(ticks.zone).strftime("%d %H:%M %z") for tick in forwards(ticks, after, until)]


def test_an_interval_is_aligned_to_the_epoch() -> None:
    every = Every(timedelta(hours=7))
    tick = every.after(datetime(2026, 10, 1, tzinfo=UTC))
    assert tick is not None
    assert int(tick.timestamp()) % (7 * 3600) == 0
    assert every.after(tick) == tick + every.period
    assert every.after(tick - timedelta(microseconds=1)) == tick
    assert list(every.between(tick, tick + 2 * every.period)) == [tick + 2 * every.period, tick + every.period]


def test_an_interval_of_a_fraction_does_not_drift() -> None:
    every = Every(timedelta(seconds=1.1))
    tick = every.after(datetime(2026, 10, 1, tzinfo=UTC))
    assert tick is not None
    assert (tick - datetime(1970, 1, 1, tzinfo=UTC)) % every.period == timedelta(0)


def test_an_interval_is_at_least_a_second() -> None:
    with pytest.raises(ValueError, match="shorter than a second"):
        Every(timedelta(seconds=0.5))


SPRING = datetime(2026, 3, 28, 12, tzinfo=UTC), datetime(2026, 3, 30, 12, tzinfo=UTC)  # 02:00 -> 03:00 on the 29th
AUTUMN = datetime(2026, 10, 24, 12, tzinfo=UTC), datetime(2026, 10, 26, 12, tzinfo=UTC)  # 03:00 -> 02:00 on the 25th


def test_a_time_that_the_clock_jumps_over_comes_later_that_day() -> None:
    assert walls(crontab({30}, {2}), *SPRING) == ["29 03:30 +0200", "30 02:30 +0200"]


def test_a_time_that_the_clock_shows_twice_comes_once() -> None:
    assert walls(crontab({30}, {2}), *AUTUMN) == ["25 02:30 +0200", "26 02:30 +0100"]


def test_two_times_that_fall_together_are_one_tick() -> None:
    assert walls(crontab({30}, {2, 3}), *SPRING) == ["29 03:30 +0200", "30 02:30 +0200", "30 03:30 +0200"]


@pytest.mark.parametrize("window", [SPRING, AUTUMN])
def test_every_hour_ticks_every_hour(window: tuple[datetime, datetime]) -> None:
    found = forwards(crontab({0}), *window)
    assert len(found) == 48
    assert {later - sooner for sooner, later in pairwise(found)} == {timedelta(hours=1)}


def test_a_tick_pushed_into_the_next_day() -> None:
    """In Nuuk the clock goes from 23:00 to 00:00: half past eleven is half past midnight then, and comes once."""
    nuuk = crontab({30}, {0, 23}, zone="America/Nuuk")
    window = datetime(2025, 3, 29, 12, tzinfo=UTC), datetime(2025, 3, 31, 1, tzinfo=UTC)
    assert walls(nuuk, *window) == ["30 00:30 -0100", "30 23:30 -0100"]


@pytest.mark.parametrize(
    ("ticks", "days"),
    [
        (Every(timedelta(minutes=61)), 5),
        (crontab({0, 30}), 5),
        (crontab({0, 17}, {1, 2, 3}), 5),
        (crontab({0}, {9, 23}, zone="Pacific/Apia"), 5),  # it left out 30 December 2011
        (crontab({15}, {0, 23}, zone="America/Nuuk"), 5),
        (crontab({0}, {0}, {1}, zone="Australia/Lord_Howe"), 400),  # half an hour of summer time
        (crontab({0}, {3}, {31}, {1, 3, 5}, zone="UTC"), 800),
        (crontab({0}, {3}, weekdays={0, 6}), 30),
    ],
    ids=str,
)
@pytest.mark.parametrize("start", ["2026-03-27", "2026-10-23", "2011-12-28", "2025-03-28"])
def test_a_window_holds_the_same_ticks_from_both_ends(ticks: Ticks, days: int, start: str) -> None:
    after = datetime.fromisoformat(start).replace(tzinfo=UTC)
    until = after + days * DAY
    assert list(ticks.between(after, until)) == forwards(ticks, after, until)[::-1]


def test_a_rare_day_is_found_and_an_impossible_one_is_none() -> None:
    leap_monday = crontab({0}, {0}, {29}, {2}, {1}, zone="UTC")
    assert leap_monday.after(datetime(2080, 3, 1, tzinfo=UTC)) == datetime(2112, 2, 29, tzinfo=UTC)
    assert crontab({0}, {0}, {30}, {2}).after(datetime(2026, 1, 1, tzinfo=UTC)) is None


def test_a_schedule_is_known_by_its_text() -> None:
    assert str(crontab({0, 15, 16, 17}, {4})) == "crontab 0,15-17 4 * * * Europe/Berlin"
    texts = [str(Every(timedelta(seconds=seconds))) for seconds in (1, 1.5, 1234567, 1234567.000001)]
    assert len(set(texts)) == 4
