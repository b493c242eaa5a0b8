"""The Celery application."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

from celery import Celery
from kombu.transport import TRANSPORT_ALIASES

from app.errors import ConfigurationError
from app.settings import settings

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

# By the alias and not by Celery's `broker_transport`: the URL keeps its scheme, which Flower and the banner show.
TRANSPORT_ALIASES.update(dict.fromkeys(("redis", "rediss"), "tasks.valkey:Transport"))
app = Celery("deadsure", set_as_current=True, control="tasks.control:JobControl")
app.config_from_object("celeryconfig")
