"""Errors of the business; the class that each inherits decides whether its job is retried or quarantined."""

from __future__ import annotations

from app.errors import TransientError, UncertainError, UnrecoverableError


class UnknownAccount(UnrecoverableError):
    """Raised by every job about an account, before any effect, when no account has this number."""

    def __init__(self, account_id: int) -> None:
        super().__init__(f"there is no account {account_id}: replay the job with another account, or cancel it")
        self.account_id = account_id


class UndeliverableAddress(UnrecoverableError):
    """Raised before anything is sent: the account's e-mail is no single address. Correct it, then replay the job."""


class MailServerAway(TransientError):
    """The mail server did not take the envelope: nothing was sent."""


class MailUncertain(UncertainError):
    """The connection broke, or the answer made no sense, after the mail was sent: it may have been accepted."""


class UnreadableCharge(UncertainError):
    """The payment service answered with success and no charge in it: ask it again by the same key."""
