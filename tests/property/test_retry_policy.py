"""Retry delays: bounded, growing, capped and spread."""

from __future__ import annotations

import statistics

from hypothesis import given
from hypothesis import strategies as st

from app.clock import pause_s
from app.retry_policy import RetryPolicy

policies = st.builds(
    RetryPolicy,
    limit=st.integers(1, 20),
    first_s=st.floats(0.001, 60),
    cap_s=st.floats(0.001, 86_400),
)
failures = st.integers(1, 10_000)
draws = st.floats(0, 1, exclude_max=True)


def base_s(policy: RetryPolicy, failed: int) -> float:
    """The contract's min(first · 2^(n - 1), cap), without overflow."""
    return min(policy.first_s * 2.0 ** min(failed - 1, 60), policy.cap_s)


@given(policies, failures, draws)
def test_a_delay_is_in_the_upper_half_of_its_base(policy: RetryPolicy, failed: int, draw: float) -> None:
    base = base_s(policy, failed)
    assert base / 2 <= policy.delay_s(failed, draw) <= base
    assert base / 2 <= policy.delay_s(failed) <= base


@given(policies, failures, draws)
def test_no_delay_exceeds_the_cap(policy: RetryPolicy, failed: int, draw: float) -> None:
    assert 0 < policy.delay_s(failed, draw) <= policy.cap_s


@given(policies, st.integers(1, 200), draws)
def test_delays_never_shrink_with_more_failures(policy: RetryPolicy, failed: int, draw: float) -> None:
    assert policy.delay_s(failed, draw) <= policy.delay_s(failed + 1, draw)


@given(policies, failures, draws, draws)
def test_a_higher_draw_waits_longer(policy: RetryPolicy, failed: int, one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert policy.delay_s(failed, low) <= policy.delay_s(failed, high)


def test_the_defaults_are_the_contracts() -> None:
    policy = RetryPolicy()
    assert policy.limit == 5
    assert [policy.delay_s(failed, 0.0) for failed in range(1, 12)] == [
        *(0.5, 1, 2, 4, 8, 16, 32, 64, 128),
        *(150, 150),
    ]


def test_jobs_that_failed_together_do_not_come_back_together() -> None:
    """Twenty bins over [base/2, base]: each holds its share, within six standard deviations."""
    policy, count, bins = RetryPolicy(), 20_000, 20
    delays = [policy.delay_s(4) for _ in range(count)]
    base = base_s(policy, 4)
    filled = [0] * bins
    for delay in delays:
        filled[min(int((delay - base / 2) / (base / 2) * bins), bins - 1)] += 1
    share = count / bins
    assert all(abs(held - share) < 6 * share**0.5 for held in filled)
    assert abs(statistics.fmean(delays) - base * 0.75) < base * 0.01


@given(st.integers(0, 10_000), st.floats(0.001, 10), st.floats(0.001, 100))
def test_pauses_of_our_own_are_jittered_and_capped(tries: int, first_s: float, cap_s: float) -> None:
    pause = pause_s(tries, first_s, cap_s)
    base = min(first_s * 2.0 ** min(tries, 30), cap_s)
    assert base / 2 <= pause <= base
