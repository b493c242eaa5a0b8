"""The worker app on Redis/Valkey with a short visibility timeout, looked at every second."""

from __future__ import annotations

import os

from tests.faults.worker_app import app

__all__ = ["app"]

app.conf.broker_transport_options = {
    **app.conf.broker_transport_options,
    "visibility_timeout": float(os.environ["VISIBILITY_TIMEOUT_S"]),
    "unacked_restore_interval": 1,
    "unacked_restore_throttle": 1,
}
