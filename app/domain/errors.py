"""Errors of the business: permanent ones, so a job that meets one is quarantined and not retried."""

from __future__ import annotations

from app.errors import UnrecoverableError


class UnknownAccount(UnrecoverableError):
    """Raised by the export and the ledger, before any effect, when no account has this number."""

    def __init__(self, account_id: int) -> None:
        super().__init__(f"there is no account {account_id}: replay the job with another account, or cancel it")
        self.account_id = account_id
