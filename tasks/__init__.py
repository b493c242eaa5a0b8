"""The Celery application and its job files; the only package that imports celery and kombu."""

from tasks import (
    emails,
    ledger,
    monthly,
    payments,
    reports,
    revoking,
    upkeep,
    worker,  # signals and bootsteps must be there before the job files
)
from tasks.application import app

__all__ = ["app", "emails", "ledger", "monthly", "payments", "reports", "revoking", "upkeep", "worker"]
