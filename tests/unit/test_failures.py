"""What an error means: retry or quarantine, and an account of it that quotes nothing."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import pytest
from pydantic import BaseModel, ValidationError

from app.errors import (
    IdempotencyConflict,
    InvalidPayload,
    PayloadTooLarge,
    UncertainEffect,
    UnrecoverableError,
)
from app.failures import Decision, account, decide
from app.retry_policy import RetryPolicy

POLICY = RetryPolicy()
QUOTED = "iban-DE4711"


def raised(raiser: Callable[[], object]) -> Exception:
    try:
        raiser()
    except Exception as error:  # noqa: BLE001  whatever it is
        return error
    raise AssertionError("nothing was raised")


def throw(error: Exception) -> Callable[[], object]:
    def thrower() -> object:
        raise error

    return thrower


class Amount(BaseModel):
    amount: int


def decision(error: Exception, failures: int = 0) -> Decision:
    return decide(raised(throw(error)), failures, POLICY.limit, POLICY)


@pytest.mark.parametrize("error", [TimeoutError(QUOTED), ValueError(QUOTED), OSError(QUOTED), KeyError(QUOTED)])
def test_an_error_of_no_known_kind_is_tried_again(error: Exception) -> None:
    made = decision(error)
    assert made.cause == "transient"
    assert made.delay_s is not None
    assert 0.5 <= made.delay_s <= 1
    assert made.failed


def test_delays_follow_the_failures_so_far() -> None:
    for failures in range(4):
        made = decision(OSError(), failures)
        assert made.delay_s is not None
        assert 2**failures / 2 <= made.delay_s <= 2**failures


def test_the_last_attempt_that_is_allowed_quarantines() -> None:
    assert decision(OSError(), 3).delay_s is not None
    last = decision(OSError(), 4)
    assert (last.cause, last.delay_s) == ("attempts_spent", None)


@pytest.mark.parametrize(
    "error",
    [
        UnrecoverableError(QUOTED),
        InvalidPayload(QUOTED),
        IdempotencyConflict(uuid.uuid4(), "t", "k"),
        PayloadTooLarge(QUOTED),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_cannot_get_better_quarantines_at_once(error: Exception) -> None:
    made = decision(error)
    assert (made.cause, made.delay_s) == ("permanent", None)


def test_an_invalid_payload_quarantines_without_its_values() -> None:
    error = raised(lambda: Amount.model_validate({"amount": QUOTED}))
    assert isinstance(error, ValidationError)
    made = decide(error, 0, 5, POLICY)
    assert (made.cause, made.delay_s) == ("permanent", None)
    assert QUOTED not in made.reason


def test_an_effect_that_nobody_knows_of_quarantines_as_uncertain() -> None:
    assert decision(UncertainEffect(QUOTED)).cause == "uncertain"


def test_a_reason_names_type_and_place_and_quotes_nothing() -> None:
    reason, fingerprint = account(raised(throw(ValueError(QUOTED))))
    assert reason == "ValueError in test_failures.py:thrower"
    assert QUOTED not in reason + fingerprint


def test_the_reason_of_a_chain_quotes_nothing_either() -> None:
    def chained() -> None:
        try:
            throw(KeyError(QUOTED))()
        except KeyError as error:
            raise RuntimeError(QUOTED) from error

    reason, _ = account(raised(chained))
    assert QUOTED not in reason


def test_one_fault_has_one_fingerprint_whatever_the_values() -> None:
    def divide(by: int) -> float:
        return 1 / by

    same = {account(raised(throw(ValueError(text))))[1] for text in ("a", "b")}
    assert len(same) == 1
    other = account(raised(lambda: divide(0)))[1]
    assert other not in same


def test_an_error_without_a_traceback() -> None:
    reason, fingerprint = account(ValueError(QUOTED))
    assert reason == "ValueError"
    assert fingerprint
