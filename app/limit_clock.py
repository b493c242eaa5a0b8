"""From when a child's time limits count: not while its job waits for a database that is away.

The main process owns the timers, and only the child knows that it holds. The race: the database is away for longer
than the limit, the timer strikes, and a job that did nothing wrong has a crash to its name. So each child says, in
memory that it shares with the main process, since when its handler works and since when it waits; before a limit
strikes, the main process looks there. A handler that works on while the database is away goes on being counted.
"""

from __future__ import annotations

import mmap
import time
from collections import deque

CHILDREN = 1024
FIELDS = 3  # process, counted from, waiting since; in seconds of the clock that all processes of the machine share
OUTAGES = 100


class LimitClock:
    """One child's clock, as the child keeps it; does nothing where nobody watches (eager mode, a pool of threads)."""

    def __init__(self, numbers: memoryview[float] | None = None, pid: int = 0) -> None:
        self._numbers, self._pid = numbers, pid

    def deliver(self) -> None:
        """A delivery is at hand: nothing counts before its handler starts."""
        if self._numbers is not None:
            now = time.monotonic()
            self._numbers[1], self._numbers[2], self._numbers[0] = now, now, self._pid

    def start(self) -> None:
        """A handler starts: its limits count from now."""
        if self._numbers is not None:
            self._numbers[1], self._numbers[2] = time.monotonic(), 0.0

    def wait(self) -> None:
        """The job waits for the database from now on; again and again is the same as once."""
        if self._numbers is not None and not self._numbers[2]:
            self._numbers[2] = time.monotonic()

    def go_on(self) -> None:
        """It waits no longer: what it waited is not counted."""
        if self._numbers is not None and self._numbers[2]:
            self._numbers[1] += time.monotonic() - self._numbers[2]
            self._numbers[2] = 0.0

    def end(self) -> None:
        """The delivery is done: what the process does next has limits of its own."""
        if self._numbers is not None:
            self._numbers[0] = 0


NO_CLOCK = LimitClock()


class LimitClocks:
    """The clocks of all children, in memory that is shared over fork."""

    def __init__(self) -> None:
        self._numbers = memoryview(mmap.mmap(-1, CHILDREN * FIELDS * 8)).cast("d")

    def child(self, place: int, pid: int) -> LimitClock:
        """The clock of the child at this place of the pool, for the child itself."""
        if not 0 <= place < CHILDREN:
            return NO_CLOCK
        return LimitClock(self._numbers[place * FIELDS : (place + 1) * FIELDS], pid)

    def counted_from(self, pid: int) -> float | None:
        """From when the limits of this child's job count, waits left out; None when it runs no job of ours."""
        for place in range(0, CHILDREN * FIELDS, FIELDS):
            if self._numbers[place] == pid:
                counted_from, waiting_since = self._numbers[place + 1], self._numbers[place + 2]
                return counted_from + (time.monotonic() - waiting_since if waiting_since else 0.0)
        return None


class Outages:
    """When the database was away, as the renewals of the lease saw it: from the last good one to the next.

    A statement that hangs in a silent network looks to its child like one that takes long; nobody else knows better.
    """

    def __init__(self, gap_s: float) -> None:
        """`gap_s`: two good renewals that are further apart have an outage between them."""
        self._gap_s = gap_s
        self._good_at = time.monotonic()
        self._broken = False
        self._past: deque[tuple[float, float]] = deque(maxlen=OUTAGES)

    def good(self) -> None:
        """The database has answered."""
        now = time.monotonic()
        if self._broken or now - self._good_at > self._gap_s:
            self._past.append((self._good_at, now))
        self._good_at, self._broken = now, False

    def broken(self) -> None:
        """The database did not answer."""
        self._broken = True

    def since_s(self, start: float) -> float:
        """Seconds of outage since `start` (monotonic)."""
        now = time.monotonic()
        present = [(self._good_at, now)] if self._broken or now - self._good_at > self._gap_s else []
        return sum(max(0.0, end - max(begin, start)) for begin, end in [*self._past, *present])
