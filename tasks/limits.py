"""Time limits that do not count our own outages: before one strikes, it is looked whether its time is really over."""

from __future__ import annotations

import time
from typing import Any

from app.limit_clock import LimitClocks, Outages

EARLY_S = 0.01  # how much before its time a timer may strike


def count_the_handler_alone(pool: Any, hub: Any, clocks: LimitClocks, outages: Outages) -> None:
    """Make the timers of a prefork pool ask the child's clock, and start anew for what is left.

    billiard has no hook for this: the two methods that its timers call are replaced on the pool at hand.
    """
    strike_softly, strike = pool._on_soft_timeout, pool._on_hard_timeout  # noqa: SLF001

    def left_s(job: int, limit_s: float) -> float:
        running = pool._cache.get(job)  # noqa: SLF001
        start = None if running is None else clocks.counted_from(running._worker_pid)  # noqa: SLF001
        if start is None:
            return 0.0
        return limit_s - (time.monotonic() - start) + outages.since_s(start)

    def on_soft_limit(job: int, soft: float, hard: float | None, _hub: Any) -> None:
        if (later_s := left_s(job, soft)) > EARLY_S:
            again = hub.call_later(later_s, on_soft_limit, job, soft, hard, hub)
            pool._tref_for_id[job] = again  # noqa: SLF001
        else:
            strike_softly(job, soft, hard, hub)

    def on_hard_limit(job: int) -> None:
        running = pool._cache.get(job)  # noqa: SLF001
        if running is not None and (later_s := left_s(job, running._timeout)) > EARLY_S:  # noqa: SLF001
            pool._tref_for_id[job] = hub.call_later(later_s, on_hard_limit, job)  # noqa: SLF001
        else:
            strike(job)

    pool._on_soft_timeout, pool._on_hard_timeout = on_soft_limit, on_hard_limit  # noqa: SLF001
