"""What an error means for the job: a decision as a value, and a safe account of the error.

A reason names the error's type and the place in the handler's code, never its message: messages quote payloads.
"""

from __future__ import annotations

import hashlib
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from pydantic import ValidationError

from app.errors import IdempotencyConflict, InvalidPayload, PayloadTooLarge, UncertainEffect, UnrecoverableError
from app.retry_policy import RetryPolicy

INSTALLED = tuple({str(Path(p).resolve()) for p in (sys.prefix, sys.base_prefix)})
OWN = str(Path(__file__).parent)
PERMANENT = (UnrecoverableError, ValidationError, IdempotencyConflict, InvalidPayload, PayloadTooLarge)


@dataclass(frozen=True)
class Decision:
    """`delay_s` is None when the job is to be quarantined. `failed` says whether a failure is counted."""

    cause: str
    reason: str
    fingerprint: str
    delay_s: float | None
    failed: bool = True


def decide(error: BaseException, failures: int, limit: int, policy: RetryPolicy) -> Decision:
    """Retry or quarantine, after `failures` earlier failed attempts of at most `limit`."""
    reason, fingerprint = account(error)
    if isinstance(error, UncertainEffect):
        return Decision("uncertain", reason, fingerprint, None)
    if isinstance(error, PERMANENT):
        return Decision("permanent", reason, fingerprint, None)
    if failures + 1 >= limit:
        return Decision("attempts_spent", reason, fingerprint, None)
    return Decision("transient", reason, fingerprint, policy.delay_s(failures + 1))


def account(error: BaseException) -> tuple[str, str]:
    """(safe reason, fingerprint) of an error: its type and the project's own frames, without values."""
    kind = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
    frames = own_frames(error.__traceback__)
    reason = f"{kind} in {frames[-1]}" if frames else kind
    return reason, hashlib.sha256("\n".join([kind, *frames]).encode()).hexdigest()[:12]


def own_frames(trace: TracebackType | None) -> list[str]:
    """`file:function` of the frames that belong to neither Python, an installed package, nor this layer's top level."""
    frames = []
    for frame in traceback.extract_tb(trace):
        path = Path(frame.filename)
        if path.parent == Path(OWN) or any(frame.filename.startswith(p) for p in INSTALLED):
            continue
        frames.append(f"{path.name}:{frame.name}")
    return frames
