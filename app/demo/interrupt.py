"""Ctrl-C, SIGTERM and SIGHUP end the demo in good order, but never in the middle of a start or a stop."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn all of SIGNALS into KeyboardInterrupt, so that every `finally` runs."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold a signal back until the block is done, then raise KeyboardInterrupt.

    Servers start in threads: an interrupt in between would stop them while they are still starting.
    """
    held: list[int] = []

    def hold(number: int, _frame: FrameType | None) -> None:
        held.append(number)

    before = {number: signal.signal(number, hold) for number in SIGNALS}
    try:
        yield
    except Exception:
        if held:  # a terminal's Ctrl-C reaches the programs that the block runs too: that is why it failed
            raise KeyboardInterrupt from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if held:
        raise KeyboardInterrupt
