"""The test app with a result store that is not there (`celery -A tests.faults.dead_results_app worker`)."""

from __future__ import annotations

from tests.faults.jobs_messages import hopeless
from tests.faults.worker_app import app

__all__ = ["app", "hopeless"]

app.conf.result_backend = "redis://127.0.0.1:1/0"
app.conf.result_backend_always_retry = False
