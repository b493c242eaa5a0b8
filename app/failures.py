"""What an error means for the job: its class, and a decision as a value.

A reason names the error's type and the place in the handler's code, never its message: messages quote payloads.
"""

from __future__ import annotations

import email.utils
import hashlib
import smtplib
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import httpx
import psycopg2
from pydantic import ValidationError
from sqlalchemy.exc import DBAPIError

from app.errors import (
    IdempotencyConflict,
    InvalidPayload,
    PayloadTooLarge,
    TransientError,
    UncertainEffect,
    UncertainError,
    UnrecoverableError,
    UnsupportedOption,
)
from app.retry_policy import RetryPolicy

INSTALLED = tuple({str(Path(p).resolve()) for p in (sys.prefix, sys.base_prefix)})
OWN = str(Path(__file__).parent)
FRAMES_LIMIT = 30


class Failure(StrEnum):
    """The class of an error, as the journal names it."""

    TRANSIENT = "transient"
    UNCERTAIN = "uncertain"
    PERMANENT = "permanent"


Classifier = Callable[[BaseException], Failure | None]

BY_TYPE: tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], Failure], ...] = (
    (TransientError, Failure.TRANSIENT),
    ((UncertainError, UncertainEffect), Failure.UNCERTAIN),
    (
        (UnrecoverableError, ValidationError, IdempotencyConflict, InvalidPayload, PayloadTooLarge, UnsupportedOption),
        Failure.PERMANENT,
    ),
    # Nothing was sent yet, or it was refused at the door.
    ((httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.ProxyError), Failure.TRANSIENT),
    ((httpx.UnsupportedProtocol, httpx.InvalidURL, httpx.TooManyRedirects), Failure.PERMANENT),
    # The request was on its way: the other side may have acted on it.
    ((httpx.TimeoutException, httpx.TransportError), Failure.UNCERTAIN),
    ((smtplib.SMTPConnectError, smtplib.SMTPHeloError), Failure.TRANSIENT),
    (smtplib.SMTPServerDisconnected, Failure.UNCERTAIN),
    (smtplib.SMTPNotSupportedError, Failure.PERMANENT),
    (ConnectionRefusedError, Failure.TRANSIENT),
    ((ConnectionError, TimeoutError), Failure.UNCERTAIN),
)
TRY_AGAIN_STATUS = (408, 425, 429)
SERVER_ERROR, CLIENT_ERROR = 500, 400
SMTP_REPLIES = range(400, 600)
SMTP_PERMANENT = 500
REPLY_CODES = range(100, 600)
# Nothing was sent, or the other side said no: errors after which a call may be made again as if it never was.
NOTHING_HAPPENED = (
    TransientError,
    UnrecoverableError,
    ConnectionRefusedError,
    socket.gaierror,
    httpx.ConnectError,
    httpx.ConnectTimeout,
    httpx.PoolTimeout,
    httpx.UnsupportedProtocol,
    httpx.InvalidURL,
    smtplib.SMTPConnectError,
    smtplib.SMTPHeloError,
    smtplib.SMTPNotSupportedError,
)
# What a status below 500 does not rule out: the request came in slowly, or another one with the same key is at work.
MAYBE_HAPPENED_STATUS = (408, 409)
# Data that this database will refuse every time: SQLSTATE classes 22 (data), 42 (syntax, unknown table).
PERMANENT_SQLSTATES = ("22", "42")


@dataclass(frozen=True)
class Decision:
    """`delay_s` is None when the job is to be quarantined.

    `frames`: where it happened, for people; see `Account`.
    """

    failure: Failure
    cause: str
    reason: str
    fingerprint: str
    delay_s: float | None
    frames: tuple[str, ...] = ()


@dataclass(frozen=True)
class History:
    """What the decision depends on beside the error: earlier failures, their limit, age and last delay (seconds)."""

    failures: int
    limit: int
    age_s: float = 0.0
    last_s: float | None = None


def classify(error: BaseException, own: Classifier | None = None) -> Failure:
    """The class of an error: the job type's own classifier first; an unknown exception is transient, and bounded."""
    if own is not None and (said := own(error)) is not None:
        return Failure(said)
    if (replied := reply_class(error)) is not None:
        return replied
    for kinds, failure in BY_TYPE:
        if isinstance(error, kinds):
            return failure
    if (state := sqlstate(error)) is not None and state[:2] in PERMANENT_SQLSTATES:
        return Failure.PERMANENT
    return Failure.TRANSIENT


def reply_class(error: BaseException) -> Failure | None:
    """The class of what another system answered; None when the error is no answer."""
    if isinstance(error, httpx.HTTPStatusError):
        status = error.response.status_code
        again = status in TRY_AGAIN_STATUS or status >= SERVER_ERROR or status < CLIENT_ERROR
        return Failure.TRANSIENT if again else Failure.PERMANENT
    code = smtp_code(error)
    if code is None:
        return None
    if code not in SMTP_REPLIES:
        return Failure.UNCERTAIN  # no reply of the protocol: it may stand for anything
    return Failure.PERMANENT if code >= SMTP_PERMANENT else Failure.TRANSIENT


def proves_nothing_happened(error: BaseException) -> bool:
    """Whether an error of an external call rules out that the call took effect."""
    if isinstance(error, httpx.HTTPStatusError):
        status = error.response.status_code
        return CLIENT_ERROR <= status < SERVER_ERROR and status not in MAYBE_HAPPENED_STATUS
    if (code := smtp_code(error)) is not None:
        return code in SMTP_REPLIES
    return isinstance(error, NOTHING_HAPPENED)


def known(error: BaseException) -> bool:
    """Whether the defaults have a class of their own for this error."""
    if isinstance(error, httpx.HTTPStatusError) or smtp_code(error) is not None or sqlstate(error) is not None:
        return True
    return any(isinstance(error, kinds) for kinds, _ in BY_TYPE)


def smtp_code(error: BaseException) -> int | None:
    """The reply code of an SMTP error; of several refused recipients the one most worth trying again."""
    if isinstance(error, smtplib.SMTPRecipientsRefused):
        return min((code for code, _ in error.recipients.values()), default=SMTP_PERMANENT)
    at_the_door = isinstance(error, smtplib.SMTPConnectError | smtplib.SMTPHeloError)
    if isinstance(error, smtplib.SMTPResponseException) and not at_the_door:
        return int(error.smtp_code)
    return None


def sqlstate(error: BaseException) -> str | None:
    """PostgreSQL's error code, through SQLAlchemy or not."""
    original = error.orig if isinstance(error, DBAPIError) else error
    return original.pgcode if isinstance(original, psycopg2.Error) else None


def retry_after_s(error: BaseException) -> float | None:
    """What the other side asked for, in seconds: an attribute `retry_after_s`, or HTTP's Retry-After."""
    asked = getattr(error, "retry_after_s", None)
    if isinstance(asked, int | float):
        return float(asked)
    if isinstance(error, httpx.HTTPStatusError):
        return parse_retry_after(error.response.headers)
    return None


def parse_retry_after(headers: Mapping[str, str]) -> float | None:
    """RFC 9110 §10.2.3: a number of seconds or an HTTP date; None when absent or unreadable."""
    text = headers.get("retry-after", "").strip()
    if text.isdecimal():
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (TypeError, ValueError):
        return None


def decide(
    error: BaseException,
    history: History,
    policy: RetryPolicy,
    own: Classifier | None = None,
    *,
    uncertain_may_retry: bool = False,
) -> Decision:
    """Retry or quarantine. An uncertain error is retried only where asking or repeating is safe."""
    failure = classify(error, own)
    reason, fingerprint, frames = account(error)
    # A replay raised the limit: what failed before it is history, and the delays begin anew.
    failures = history.failures - min(history.failures, max(0, history.limit - policy.limit))

    def quarantined(cause: str) -> Decision:
        return Decision(failure, cause, reason, fingerprint, None, frames=frames)

    if failure is Failure.PERMANENT:
        return quarantined("permanent")
    if failure is Failure.UNCERTAIN and not uncertain_may_retry:
        return quarantined("uncertain")
    if history.failures + 1 >= history.limit:
        return quarantined("attempts_spent")
    delay = policy.delay_s(failures + 1, last_s=history.last_s, retry_after_s=retry_after_s(error))
    if policy.deadline_s is not None and history.age_s + delay > policy.deadline_s:
        return quarantined("deadline")
    return Decision(failure, failure.value, reason, fingerprint, delay, frames=frames)


class Account(NamedTuple):
    """What may be told of an error: its type and the project's own frames, without values.

    `frames`: `folder/file:line function`, outermost first, the innermost `FRAMES_LIMIT` of them.
    """

    reason: str
    fingerprint: str
    frames: tuple[str, ...]


def account(error: BaseException) -> Account:
    """The safe account of an error; the fingerprint, which outlives a deploy, leaves out lines and reply codes."""
    kind = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
    own = own_frames(error.__traceback__)
    places = [f"{path.name}:{function}" for path, _, function in own]
    code = error.response.status_code if isinstance(error, httpx.HTTPStatusError) else smtp_code(error)
    said = f"{kind} {code}" if code in REPLY_CODES else kind
    reason = f"{said} in {places[-1]}" if places else said
    fingerprint = hashlib.sha256("\n".join([kind, *places]).encode()).hexdigest()[:12]
    frames = (f"{path.parent.name}/{path.name}:{line} {function}" for path, line, function in own[-FRAMES_LIMIT:])
    return Account(reason, fingerprint, tuple(frames))


def own_frames(trace: TracebackType | None) -> list[tuple[Path, int, str]]:
    """File, line, function of the frames that belong to neither Python, an installed package, nor this layer's top."""
    frames = []
    for frame, line in traceback.walk_tb(trace):
        code = frame.f_code
        path = Path(code.co_filename)
        if str(path.parent) == OWN or any(code.co_filename.startswith(p) for p in INSTALLED):
            continue
        frames.append((path, line, code.co_name))
    return frames
