"""The Celery application."""

from __future__ import annotations

from celery import Celery

from app.settings import settings

settings()  # a wrong environment is reported here, not from somewhere inside Celery
app = Celery("deadsure", set_as_current=True)
app.config_from_object("celeryconfig")
