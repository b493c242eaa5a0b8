"""How long to wait before the next attempt: pure functions, delays in seconds.

Equal jitter keeps half of the exponential base and draws the other half, so that jobs which failed together do not
come back together and none comes back at once. `full` draws all of it; `decorrelated` draws between the first delay
and three times the last one (AWS Architecture Blog, "Exponential Backoff And Jitter").
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

Jitter = Literal["equal", "full", "decorrelated"]


@dataclass(frozen=True)
class RetryPolicy:
    """`limit` failed attempts end in quarantine; delays double from `first_s` up to `cap_s`.

    `deadline_s`: no attempt starts later than this after the submit; None: no deadline. `retry_after_cap_s` bounds
    what another side may ask for.
    """

    limit: int = 5
    first_s: float = 1.0
    cap_s: float = 300.0
    jitter: Jitter = "equal"
    deadline_s: float | None = None
    retry_after_cap_s: float = 86_400.0

    def __post_init__(self) -> None:
        if self.limit < 1 or self.first_s <= 0 or self.cap_s < self.first_s:
            raise ValueError(f"{self}: limit must be at least 1 and 0 < first_s <= cap_s")

    def base_s(self, failures: int) -> float:
        """The exponential base after the `failures`-th failure (1, 2, …): first_s · 2^(failures - 1), capped."""
        return float(min(self.first_s * 2.0 ** min(failures - 1, 60), self.cap_s))

    def delay_s(
        self,
        failures: int,
        *,
        draw: float | None = None,
        last_s: float | None = None,
        retry_after_s: float | None = None,
    ) -> float:
        """The delay after the `failures`-th failure; `draw` in [0, 1) replaces chance.

        A `Retry-After` of the other side is a lower bound: the jitter is added to it, so that those who were turned
        away together do not come back together either.
        """
        chance = random.random() if draw is None else draw  # noqa: S311
        base = self.base_s(failures)
        match self.jitter:
            case "equal":
                delay = base / 2 + base / 2 * chance
            case "full":
                delay = base * chance
            case "decorrelated":
                top = min(self.cap_s, 3 * (last_s or self.first_s))
                delay = self.first_s + max(0.0, top - self.first_s) * chance
        if retry_after_s is None:
            return delay
        return min(max(0.0, retry_after_s), self.retry_after_cap_s) + delay  # NaN is 0 in this order
