"""The local clock that a lease is trusted by: it never jumps and it runs in suspend (seconds)."""

from __future__ import annotations

import random
import time

CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # macOS counts suspend in MONOTONIC


def boottime_s() -> float:
    """Seconds since boot, suspend included. Python's `monotonic` stops in suspend on Linux."""
    return time.clock_gettime(CLOCK)


def pause_s(tries: int, first_s: float = 0.1, cap_s: float = 3.0) -> float:
    """A jittered pause before the next try at something of ours that is away; `tries` counts from 0."""
    base = min(first_s * 2.0 ** min(tries, 30), cap_s)
    return base / 2 + base / 2 * random.random()  # noqa: S311
