"""The real Celery app with test jobs and faults: `celery -A tests.faults.worker_app worker`."""

from __future__ import annotations

import tests.faults.jobs  # noqa: F401  registers the test job types
from tasks import app
from tests.faults.inject import install_from_environment

__all__ = ["app"]

install_from_environment()
