"""A worker whose main process says that its number is 1, as in a container (`celery -A tests.faults.jobs_same_pid`)."""

from __future__ import annotations

from types import SimpleNamespace

import app.lease
from tests.faults.worker_app import app as celery_app

__all__ = ["celery_app"]

vars(app.lease)["os"] = SimpleNamespace(getpid=lambda: 1)
