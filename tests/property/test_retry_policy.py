"""Delays of the retry policy: bounds for every draw, and the spread of many jobs that failed at once."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from app.clock import pause_s
from app.retry_policy import Jitter, RetryPolicy

JITTERS: tuple[Jitter, ...] = ("equal", "full", "decorrelated")
seconds = st.floats(min_value=0.001, max_value=1e5)
draws = st.floats(min_value=0, max_value=1, exclude_max=True)
failures = st.integers(min_value=1, max_value=10_000)
asked_for = st.floats(allow_nan=True, allow_infinity=True)
JOBS, SLICES = 500, 10
# P(chi² > 60), 9 degrees of freedom, is 1.3e-9: chance does not fail this test, a cluster does.
CHI_SQUARE = 60.0


@st.composite
def policies(draw: st.DrawFn, jitter: Jitter | None = None) -> RetryPolicy:
    first, cap = draw(seconds), draw(seconds)
    assume(first <= cap)
    drawn: Jitter = draw(st.sampled_from(JITTERS)) if jitter is None else jitter
    return RetryPolicy(first_s=first, cap_s=cap, jitter=drawn)


@given(policies(), failures)
def test_the_base_doubles_up_to_the_cap(policy: RetryPolicy, n: int) -> None:
    base = policy.base_s(n)
    assert policy.first_s <= base <= policy.cap_s
    assert base <= policy.base_s(n + 1) <= 2 * base
    if base < policy.cap_s:
        assert base == policy.first_s * 2.0 ** (n - 1)


@given(policies("equal"), failures, draws)
def test_equal_jitter_keeps_half_of_the_base(policy: RetryPolicy, n: int, draw: float) -> None:
    base = policy.base_s(n)
    assert base / 2 <= policy.delay_s(n, draw=draw) <= base


@given(policies("full"), failures, draws)
def test_full_jitter_draws_all_of_it(policy: RetryPolicy, n: int, draw: float) -> None:
    assert 0 <= policy.delay_s(n, draw=draw) <= policy.base_s(n)
    assert policy.delay_s(n, draw=0) == 0


@given(policies("decorrelated"), failures, draws, st.none() | seconds)
def test_decorrelated_jitter_goes_from_the_first_delay_to_thrice_the_last(
    policy: RetryPolicy, n: int, draw: float, last: float | None
) -> None:
    delay = policy.delay_s(n, draw=draw, last_s=last)
    top = max(policy.first_s, min(policy.cap_s, 3 * (last or policy.first_s)))
    assert policy.first_s <= delay <= top * (1 + 1e-9)


@given(policies(), st.lists(draws, min_size=1, max_size=30))
def test_no_history_leads_past_the_cap(policy: RetryPolicy, chances: list[float]) -> None:
    last = None
    for n, chance in enumerate(chances, 1):
        last = policy.delay_s(n, draw=chance, last_s=last)
        assert 0 <= last <= policy.cap_s * (1 + 1e-9)


@given(policies(), failures, draws, asked_for)
def test_never_before_retry_after_and_never_for_ever(policy: RetryPolicy, n: int, draw: float, asked: float) -> None:
    delay = policy.delay_s(n, draw=draw, retry_after_s=asked)
    assert math.isfinite(delay)
    plain = policy.delay_s(n, draw=draw)
    wanted = 0.0 if math.isnan(asked) else min(max(asked, 0.0), policy.retry_after_cap_s)
    assert delay >= max(wanted, plain)
    assert delay <= wanted + policy.cap_s * (1 + 1e-9)


@given(policies(), st.integers(1, 20), st.lists(draws, min_size=2, max_size=2, unique=True))
def test_another_draw_is_another_delay_in_the_same_order(policy: RetryPolicy, n: int, chances: list[float]) -> None:
    low, high = sorted(chances)
    assert policy.delay_s(n, draw=low) <= policy.delay_s(n, draw=high)


@pytest.mark.parametrize("asked", [None, 30.0])
@pytest.mark.parametrize("n", [1, 2, 5, 12])
@pytest.mark.parametrize("jitter", JITTERS)
def test_500_jobs_that_fail_at_once_come_back_evenly_over_the_window(
    jitter: Jitter, n: int, asked: float | None
) -> None:
    """A property of the distribution: each tenth of the window gets its tenth of the jobs."""
    policy = RetryPolicy(jitter=jitter)
    low = policy.delay_s(n, draw=0.0, retry_after_s=asked)
    high = policy.delay_s(n, draw=1.0, retry_after_s=asked)
    delays = [policy.delay_s(n, retry_after_s=asked) for _ in range(JOBS)]
    slices = [0] * SLICES
    for delay in delays:
        assert low <= delay <= high
        slices[min(SLICES - 1, int((delay - low) / (high - low) * SLICES))] += 1
    share = JOBS / SLICES
    assert sum((count - share) ** 2 / share for count in slices) < CHI_SQUARE, slices
    assert len(set(delays)) > JOBS * 0.99


@given(st.sampled_from(JITTERS), st.integers(1, 12))
def test_the_window_is_a_straight_image_of_the_draw(jitter: Jitter, n: int) -> None:
    """With evenly spread draws the delays are evenly spread: no two of 500 are closer than half their share."""
    policy = RetryPolicy(jitter=jitter)
    delays = sorted(policy.delay_s(n, draw=i / JOBS) for i in range(JOBS))
    share = (delays[-1] - delays[0]) / (JOBS - 1)
    assert all(abs(later - earlier - share) < share / 2 for earlier, later in pairwise(delays))


def test_the_default_is_the_contract() -> None:
    policy = RetryPolicy()
    assert (policy.jitter, policy.limit) == ("equal", 5)
    assert [policy.base_s(n) for n in range(1, 12)] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]
    assert [policy.delay_s(n, draw=0.0) for n in (1, 2, 9, 10, 11)] == [0.5, 1, 128, 150, 150]


@pytest.mark.parametrize("wrong", [{"limit": 0}, {"first_s": 0.0}, {"first_s": 10.0, "cap_s": 5.0}])
def test_a_policy_that_makes_no_sense(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="limit must be at least 1"):
        replace(RetryPolicy(), **wrong)  # type: ignore[arg-type]


@given(st.integers(0, 10_000), st.floats(0.001, 10), st.floats(0.001, 100))
def test_pauses_of_our_own_are_jittered_and_capped(tries: int, first_s: float, cap_s: float) -> None:
    base = min(first_s * 2.0 ** min(tries, 30), cap_s)
    assert base / 2 <= pause_s(tries, first_s, cap_s) <= base
