"""The Celery application."""

from __future__ import annotations

from celery import Celery

app = Celery("deadsure", set_as_current=True)
app.config_from_object("celeryconfig")
