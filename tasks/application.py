"""The Celery application."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

from celery import Celery

from app.errors import ConfigurationError
from app.settings import settings
from tasks import valkey

PROGRAMS = ("celery", "deadsure", "-m")  # a wrong environment ends them in one line

# Celery announces that its default will change; ours is set, for the reason that celeryconfig gives.
warnings.filterwarnings("ignore", message=".*worker_cancel_long_running_tasks_on_connection_loss", module="celery")

try:
    if settings().broker_url:
        settings().need_broker()
except ConfigurationError as wrong:
    if Path(sys.argv[0]).name in PROGRAMS:
        sys.exit(f"Error: {wrong}")
    raise  # an importing application decides for itself

valkey.use_for_redis_urls()
app = Celery("deadsure", set_as_current=True, control="tasks.control:JobControl")
app.config_from_object("celeryconfig")
