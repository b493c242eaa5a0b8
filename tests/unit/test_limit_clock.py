"""What counts against a time limit, and what does not."""

from __future__ import annotations

import os

import pytest

from app import limit_clock
from app.limit_clock import CHILDREN, NO_CLOCK, LimitClocks, Outages


class Time:
    """A clock that a test turns."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    made = Time()
    monkeypatch.setattr(limit_clock, "time", made)
    return made


def counted(clocks: LimitClocks, time: Time, pid: int = 7) -> float:
    start = clocks.counted_from(pid)
    assert start is not None
    return time.now_s - start


def test_a_handler_counts_from_its_start_and_not_while_it_waits(time: Time) -> None:
    clocks = LimitClocks()
    child = clocks.child(3, 7)
    assert clocks.counted_from(7) is None
    child.deliver()
    time.now_s += 5
    assert counted(clocks, time) == 0, "it has not started"
    child.start()
    time.now_s += 2
    assert counted(clocks, time) == 2
    child.wait()
    time.now_s += 10
    child.wait()
    time.now_s += 10
    assert counted(clocks, time) == 2
    child.go_on()
    child.go_on()
    time.now_s += 1
    assert counted(clocks, time) == 3
    child.start()
    assert counted(clocks, time) == 0, "another attempt"
    child.end()
    assert clocks.counted_from(7) is None


def test_each_child_has_a_clock_of_its_own(time: Time) -> None:
    clocks = LimitClocks()
    first, last = clocks.child(0, 7), clocks.child(CHILDREN - 1, 8)
    for child in (first, last):
        child.deliver()
        child.start()
    first.wait()
    time.now_s += 5
    assert (counted(clocks, time, 7), counted(clocks, time, 8)) == (0, 5)
    assert clocks.child(CHILDREN, 9) is NO_CLOCK


def test_a_child_writes_what_its_parent_reads() -> None:
    clocks = LimitClocks()
    pid = os.fork()
    if pid == 0:
        clocks.child(0, 7).deliver()
        os._exit(0)
    os.waitpid(pid, 0)
    assert clocks.counted_from(7) is not None


def test_an_outage_lasts_from_the_last_good_renewal_to_the_next(time: Time) -> None:
    outages, start = Outages(gap_s=10), time.now_s
    for _ in range(3):
        time.now_s += 5
        outages.good()
    assert outages.since_s(start) == 0
    time.now_s += 2
    outages.broken()
    time.now_s += 3
    assert outages.since_s(start) == 5, "it goes on"
    assert outages.since_s(time.now_s - 1) == 1
    outages.good()
    time.now_s += 20
    assert outages.since_s(start) == 25, "a renewal that hangs is an outage too"
    outages.good()
    time.now_s += 5
    outages.good()
    assert outages.since_s(start) == 25
    assert outages.since_s(time.now_s) == 0
