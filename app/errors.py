"""One hierarchy of errors: who raises it, who catches it, which state follows. Messages never carry a payload."""

from __future__ import annotations

from uuid import UUID

from pydantic import ValidationError


class DeadsureError(Exception):
    """Base of everything that Deadsure raises on purpose."""


class ConfigurationError(DeadsureError):
    """Raised at start by settings and the database check; ends the process with a next step."""


class UnknownJobType(DeadsureError):
    """Raised by the registry for a (type, version) that is not on the allowlist; nothing is written."""


class PayloadTooLarge(DeadsureError):
    """Raised by submit before any write; the caller stores the document and sends its id."""


class IdempotencyConflict(DeadsureError):
    """Raised by submit: the key is taken by a job with another payload; nothing is written."""

    def __init__(self, job_id: UUID, job_type: str, key: str | None) -> None:
        super().__init__(
            f"{job_type}: the idempotency key {key!r} belongs to job {job_id} with another payload; "
            f"look at it with `deadsure show {job_id}`, or use another key"
        )
        self.job_id = job_id


class LeaseLost(DeadsureError):
    """Raised inside a handler by `job.call` and by every fenced write once another worker may own the job.

    The attempt ends without a write; the job belongs to whoever claims it next.
    """


class JobQuarantined(DeadsureError):
    """Raised by `AsyncResult.get()` for a quarantined job."""

    def __init__(self, job_id: UUID | str, cause: str, reason: str) -> None:
        super().__init__(job_id, cause, reason)
        self.job_id, self.cause, self.reason = job_id, cause, reason

    def __str__(self) -> str:
        return f"job {self.job_id} is quarantined ({self.cause}): {self.reason}"


class JobCancelled(DeadsureError):
    """Raised by `AsyncResult.get()` for a cancelled job."""


class TransientError(DeadsureError):
    """Raised by a handler: try again later. `retry_after_s`: not sooner than this many seconds."""

    def __init__(self, *args: object, retry_after_s: float | None = None) -> None:
        super().__init__(*args)
        self.retry_after_s = retry_after_s


class UncertainError(DeadsureError):
    """Raised by a handler that cannot tell whether its effect happened."""


class UncertainEffect(DeadsureError):
    """Raised by `job.call` when an earlier attempt started this call and nobody knows whether it took effect.

    The job is quarantined as `uncertain`.
    """


class UnrecoverableError(DeadsureError):
    """Raised by a handler that knows that no retry can help; the job is quarantined at once."""


class UnsupportedOption(DeadsureError):
    """Raised where a Celery option is used that a durable task cannot honour; nothing is written."""


class InvalidPayload(DeadsureError, ValueError):
    """Raised by submit before any write: the payload is no storable JSON (NUL, lone surrogate, NaN)."""


class EditRefused(DeadsureError):
    """Raised by an edit of a quarantined job's payload that cannot be; nothing is written."""


def invalid(error: ValidationError) -> str:
    """Field and complaint of each validation error, without the values."""
    complaints = [f"{'.'.join(map(str, e['loc'])) or 'payload'}: {e['msg']}" for e in error.errors(include_input=False)]
    return f"{error.title}: " + "; ".join(complaints)
