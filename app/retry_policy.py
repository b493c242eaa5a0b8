"""How long to wait before the next attempt: pure functions, delays in seconds.

Equal jitter keeps half of the exponential base and draws the other half, so that jobs which failed together do not
come back together and none comes back at once (AWS Architecture Blog, "Exponential Backoff And Jitter").
"""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class RetryPolicy:
    """`limit` failed attempts end in quarantine; delays double from `first_s` up to `cap_s`."""

    limit: int = 5
    first_s: float = 1.0
    cap_s: float = 300.0

    def delay_s(self, failures: int, draw: float | None = None) -> float:
        """The delay after the `failures`-th failure (1, 2, …): a point in [base/2, base]; `draw` in [0, 1)."""
        base = min(self.first_s * 2.0 ** min(failures - 1, 60), self.cap_s)
        return base / 2 + base / 2 * (random.random() if draw is None else draw)  # noqa: S311
