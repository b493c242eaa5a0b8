"""The worker app of the fault tests with small pages of accounts, so that few reports make many pages."""

from __future__ import annotations

from app.domain.monthly import active_accounts
from tests.faults.worker_app import app

PAGE = 20

__all__ = ["PAGE", "app"]

active_accounts.__defaults__ = (PAGE,)
