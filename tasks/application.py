"""The Celery application."""

from __future__ import annotations

import warnings

from celery import Celery

from app.settings import settings

# Celery announces that its default will change; ours is set, for the reason that celeryconfig gives.
warnings.filterwarnings("ignore", message=".*worker_cancel_long_running_tasks_on_connection_loss", module="celery")

settings()  # a wrong environment is reported here, not from somewhere inside Celery
app = Celery("deadsure", set_as_current=True, control="tasks.control:JobControl")
app.config_from_object("celeryconfig")
