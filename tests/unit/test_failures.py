"""What an error means for its job: the class, the decision, and an account without values."""

from __future__ import annotations

import re
import smtplib
import socket
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import httpx
import psycopg2.errors
import pytest
from pydantic import BaseModel
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError, ProgrammingError

from app.domain.errors import MailServerAway, MailUncertain, UnknownAccount, UnreadableCharge
from app.errors import (
    InvalidPayload,
    PayloadTooLarge,
    TransientError,
    UncertainEffect,
    UncertainError,
    UnrecoverableError,
    UnsupportedOption,
)
from app.failures import (
    Decision,
    Failure,
    History,
    account,
    classify,
    decide,
    parse_retry_after,
    proves_nothing_happened,
    retry_after_s,
)
from app.retry_policy import RetryPolicy
from tests.unit.raising import raise_in_a_library, raised

TRANSIENT, UNCERTAIN, PERMANENT = Failure.TRANSIENT, Failure.UNCERTAIN, Failure.PERMANENT
CARD = "4242-4242"
POLICY = RetryPolicy(limit=3, first_s=1, cap_s=8)
FRESH = History(failures=0, limit=3)


class Form(BaseModel):
    n: int


def status(code: int, **headers: str) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", f"http://user:{CARD}@far.test/{CARD}")
    answer = httpx.Response(code, request=request, headers={k.replace("_", "-"): v for k, v in headers.items()})
    return httpx.HTTPStatusError(f"{code} for {CARD}", request=request, response=answer)


def invalid() -> Exception:
    return raised(lambda: Form.model_validate({"n": CARD}))


def refused(*codes: int) -> smtplib.SMTPRecipientsRefused:
    return smtplib.SMTPRecipientsRefused({f"{n}@example.com": (code, b"no") for n, code in enumerate(codes)})


def from_database(code: str, wrapper: type[DBAPIError] | None = None) -> Exception:
    """An error as the server reports it, through SQLAlchemy or not."""
    kind = psycopg2.errors.lookup(code)
    made = type(kind.__name__, (kind,), {"pgcode": code})(CARD)
    return wrapper("INSERT", {"x": CARD}, made) if wrapper else made


CLASSES: list[tuple[Failure, Exception]] = [
    # what a handler says itself
    (TRANSIENT, TransientError("later")),
    (UNCERTAIN, UncertainError("who knows")),
    (UNCERTAIN, UncertainEffect("who knows")),
    (PERMANENT, UnrecoverableError("never")),
    (PERMANENT, UnknownAccount(7)),
    (TRANSIENT, MailServerAway("away")),
    (UNCERTAIN, MailUncertain("broke")),
    (UNCERTAIN, UnreadableCharge("odd")),
    (PERMANENT, InvalidPayload("NUL")),
    (PERMANENT, PayloadTooLarge("big")),
    (PERMANENT, UnsupportedOption("link")),
    # HTTP statuses
    *((TRANSIENT, status(code)) for code in (302, 408, 425, 429, 500, 502, 503, 504, 599)),
    *((PERMANENT, status(code)) for code in (400, 401, 403, 404, 409, 410, 413, 422, 451)),
    # httpx without an answer
    *((TRANSIENT, kind("x")) for kind in (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)),
    *(
        (UNCERTAIN, kind("x"))
        for kind in (
            httpx.ReadTimeout,
            httpx.WriteTimeout,
            httpx.ReadError,
            httpx.WriteError,
            httpx.CloseError,
            httpx.RemoteProtocolError,
        )
    ),
    *((PERMANENT, kind("x")) for kind in (httpx.UnsupportedProtocol, httpx.InvalidURL, httpx.TooManyRedirects)),
    # SMTP
    (TRANSIENT, smtplib.SMTPConnectError(554, b"no")),
    (TRANSIENT, smtplib.SMTPHeloError(501, b"no")),
    (TRANSIENT, smtplib.SMTPSenderRefused(451, b"later", "a@b")),
    (PERMANENT, smtplib.SMTPSenderRefused(550, b"no", "a@b")),
    (TRANSIENT, smtplib.SMTPDataError(452, b"full")),
    (PERMANENT, smtplib.SMTPDataError(554, b"spam")),
    (UNCERTAIN, smtplib.SMTPDataError(-1, b"\x16\x03")),
    (TRANSIENT, refused(450)),
    (PERMANENT, refused(550)),
    (TRANSIENT, refused(550, 450)),
    (PERMANENT, smtplib.SMTPAuthenticationError(535, b"no")),
    (PERMANENT, smtplib.SMTPNotSupportedError("SMTPUTF8")),
    (UNCERTAIN, smtplib.SMTPServerDisconnected("gone")),
    # the operating system
    (TRANSIENT, ConnectionRefusedError(111, "refused")),
    *((UNCERTAIN, kind()) for kind in (ConnectionResetError, BrokenPipeError, ConnectionAbortedError, TimeoutError)),
    (TRANSIENT, socket.gaierror(-2, "no name")),
    (TRANSIENT, OSError(28, "no space left")),
    (TRANSIENT, FileNotFoundError(2, "gone")),
    # the database
    (TRANSIENT, from_database("40P01", OperationalError)),
    (TRANSIENT, from_database("40001")),
    (TRANSIENT, from_database("57P01", OperationalError)),
    (TRANSIENT, from_database("23505", IntegrityError)),
    (PERMANENT, from_database("42P01", ProgrammingError)),
    (PERMANENT, from_database("22003")),
    # anything else
    (PERMANENT, invalid()),
    (TRANSIENT, KeyError(CARD)),
    (TRANSIENT, ZeroDivisionError()),
]


@pytest.mark.parametrize(("failure", "error"), CLASSES, ids=[f"{error!r:.50}-{failure}" for failure, error in CLASSES])
def test_class(failure: Failure, error: Exception) -> None:
    assert classify(error) is failure


def test_an_own_classifier_goes_first_and_may_pass() -> None:
    def own(error: BaseException) -> Failure | None:
        return Failure.PERMANENT if isinstance(error, KeyError) else None

    assert classify(KeyError("x"), own) is PERMANENT
    assert classify(TransientError("x"), own) is TRANSIENT
    assert classify(UncertainError("x"), lambda _: Failure("transient")) is TRANSIENT


@pytest.mark.parametrize(
    ("error", "proven"),
    [
        (ConnectionRefusedError(), True),
        (httpx.ConnectTimeout("x"), True),
        (status(422), True),
        (status(429), True),
        (status(404), True),
        (refused(450), True),
        (refused(550), True),
        (smtplib.SMTPDataError(554, b"no"), True),
        (MailServerAway("x"), True),
        (UnrecoverableError("x"), True),
        (status(408), False),
        (status(409), False),
        (status(500), False),
        (status(503), False),
        (status(302), False),
        (httpx.ReadTimeout("x"), False),
        (smtplib.SMTPDataError(-1, b"?"), False),
        (smtplib.SMTPServerDisconnected("x"), False),
        (MailUncertain("x"), False),
        (TimeoutError(), False),
        (ConnectionResetError(), False),
        (RuntimeError("a bug after the call"), False),
    ],
    ids=repr,
)
def test_only_a_plain_no_proves_that_nothing_happened(error: Exception, proven: bool) -> None:
    assert proves_nothing_happened(error) is proven


# Retry-After


def test_retry_after_in_seconds_and_as_a_date() -> None:
    assert parse_retry_after(httpx.Headers({"Retry-After": " 120 "})) == 120
    in_a_minute = format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True)
    asked = parse_retry_after(httpx.Headers({"retry-after": in_a_minute}))
    assert asked is not None
    assert 55 < asked <= 60
    assert parse_retry_after(httpx.Headers({"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"})) == 0


@pytest.mark.parametrize("text", ["", "soon", "-5", "1.5", "٣x", "1e3", "Wed, 99 Oct 2015", "²", "inf"])
def test_a_retry_after_that_means_nothing(text: str) -> None:
    assert parse_retry_after({"retry-after": text}) is None
    assert parse_retry_after({}) is None


@pytest.mark.parametrize("asked", ["9" * 5000, "86401"])
def test_nobody_can_ask_for_more_than_a_day(asked: str) -> None:
    decision = decide(status(429, Retry_After=asked), FRESH, POLICY)
    assert decision.delay_s is not None
    assert 86_400 <= decision.delay_s <= 86_401


def test_what_asks_for_a_delay() -> None:
    assert retry_after_s(status(429, Retry_After="7")) == 7
    assert retry_after_s(status(503, Retry_After="7")) == 7
    assert retry_after_s(status(429)) is None
    assert retry_after_s(TransientError("x", retry_after_s=3.5)) == 3.5
    assert retry_after_s(TransientError("x")) is None
    assert retry_after_s(KeyError("x")) is None


# decisions


def test_transient_is_tried_again_after_a_delay_of_the_policy() -> None:
    decision = decide(TransientError("x"), FRESH, POLICY)
    assert (decision.failure, decision.cause) == (TRANSIENT, "transient")
    assert decision.delay_s is not None
    assert 0.5 <= decision.delay_s <= 1


def test_the_other_side_is_not_asked_before_it_wants_to_be() -> None:
    decision = decide(status(429, Retry_After="100"), FRESH, POLICY)
    assert decision.delay_s is not None
    assert 100 <= decision.delay_s <= 101


def test_permanent_is_quarantined_at_once() -> None:
    assert cause(decide(UnrecoverableError("x"), FRESH, POLICY)) == "permanent"


def test_the_last_failure_that_is_allowed_is_the_end() -> None:
    assert decide(TransientError("x"), History(failures=1, limit=3), POLICY).delay_s is not None
    assert cause(decide(TransientError("x"), History(failures=2, limit=3), POLICY)) == "attempts_spent"
    raised_by_a_replay = History(failures=2, limit=6)
    assert decide(TransientError("x"), raised_by_a_replay, POLICY).delay_s is not None


def test_no_attempt_starts_after_the_deadline() -> None:
    policy = RetryPolicy(first_s=1, cap_s=8, deadline_s=60)
    assert decide(TransientError("x"), History(0, 5, age_s=30), policy).delay_s is not None
    assert cause(decide(TransientError("x"), History(0, 5, age_s=59.9), policy)) == "deadline"
    assert cause(decide(status(429, Retry_After="50"), History(0, 5, age_s=30), policy)) == "deadline"


def test_uncertain_is_tried_again_only_where_that_is_safe() -> None:
    assert cause(decide(UncertainError("x"), FRESH, POLICY)) == "uncertain"
    again = decide(UncertainError("x"), FRESH, POLICY, uncertain_may_retry=True)
    assert (again.failure, again.delay_s is not None) == (UNCERTAIN, True)
    spent = decide(UncertainError("x"), History(2, 3), POLICY, uncertain_may_retry=True)
    assert (spent.failure, cause(spent)) == (UNCERTAIN, "attempts_spent")


def cause(decision: Decision) -> str:
    assert decision.delay_s is None, "it is tried again"
    return decision.cause


# the account of it


@pytest.mark.parametrize("error", [error for _, error in CLASSES], ids=lambda error: f"{error!r:.50}")
def test_a_reason_has_no_values(error: Exception) -> None:
    error.__traceback__ = None

    def handler() -> None:
        raise error

    reason, fingerprint, frames = account(raised(handler))
    assert CARD not in reason
    kind = re.escape(type(error).__qualname__)
    assert re.fullmatch(rf"[\w.]*{kind}( \d{{1,3}})? in test_failures\.py:handler", reason)
    assert len(fingerprint) == 12
    assert CARD not in str(frames)
    assert re.fullmatch(r"unit/test_failures\.py:\d+ handler", frames[-1])


def test_the_fingerprint_is_type_and_place() -> None:
    def here() -> None:
        raise ValueError(CARD)

    def elsewhere() -> None:
        raise ValueError(CARD)

    def other_type() -> None:
        raise KeyError(CARD)

    def print_of(function: Callable[[], object]) -> str:
        return account(raised(function)).fingerprint

    assert print_of(here) == print_of(here)
    assert len({print_of(here), print_of(elsewhere), print_of(other_type)}) == 3


def test_frames_of_libraries_are_left_out() -> None:
    reason, _, _ = account(raised(lambda: raise_in_a_library(CARD)))
    assert reason == "json.decoder.JSONDecodeError in raising.py:raise_in_a_library"


def test_an_error_that_was_never_raised() -> None:
    assert account(KeyError(CARD))[0] == "KeyError"
