"""Waiting in tests: on a condition with a deadline, never for a fixed time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from pytest_docker_tools.exceptions import TimeoutError as DockerToolsTimeout

POLL_S = 0.05

T = TypeVar("T")


class WaitTimeoutError(DockerToolsTimeout, AssertionError):
    """A condition did not come true in time.

    Raised by `wait_for`. It is an assertion, so pytest reports a failure, and the time-out that
    pytest-celery's `assert_log_exists` and `assert_log_does_not_exist` expect.
    """


def wait_for(
    condition: Callable[[], T],
    timeout_s: float = 30,
    message: str = "",
    *,
    poll_s: float = POLL_S,
    retry_on: tuple[type[Exception], ...] = (),
) -> T:
    """Return the first true value of `condition`.

    Exceptions named in `retry_on` count as "not yet". Raises `WaitTimeoutError`, with what was seen
    last, after `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            seen = condition()
            if seen:
                return seen
            last = repr(seen)
        except retry_on as error:
            last = f"{type(error).__name__}: {error}"
        if time.monotonic() >= deadline:
            what = message or getattr(condition, "__qualname__", repr(condition))
            raise WaitTimeoutError(f"not within {timeout_s:g} s: {what}; last seen: {last}")
        time.sleep(poll_s)


def stays_true(
    condition: Callable[[], object],
    duration_s: float,
    message: str = "",
    *,
    poll_s: float = POLL_S,
) -> None:
    """Assert that `condition` is true now and stays so for `duration_s` seconds.

    For claims about what must not happen; raises `AssertionError` with what was seen instead.
    """
    started = time.monotonic()
    while (passed_s := time.monotonic() - started) < duration_s:
        seen = condition()
        what = message or getattr(condition, "__qualname__", repr(condition))
        assert seen, f"stopped being true after {passed_s:.2f} s: {what}; seen: {seen!r}"
        time.sleep(poll_s)
