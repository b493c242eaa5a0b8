"""A schedule of one second ticks for real beats (`celery -A tests.faults.beat_app beat`, and a worker on the same)."""

from __future__ import annotations

from datetime import datetime

from app.periodic import FromTick
from tests.faults.plain_jobs import app

__all__ = ["app"]


def second(tick: datetime) -> int:
    return int(tick.timestamp())


def fails_in_service(tick: datetime) -> int:
    """Right when beat starts and tries it with a tick to come, wrong when its time is there."""
    return second(tick) if tick.timestamp() > datetime.now(tick.tzinfo).timestamp() else 1 // 0


DURABLE = {"task": "tests.leased_effect", "schedule": 1, "kwargs": {"n": FromTick(second)}}
app.conf.beat_schedule = {
    "all": {**DURABLE, "options": {"catch_up": "all"}},
    "last": {**DURABLE, "options": {"catch_up": "last"}},
    "failing": {**DURABLE, "kwargs": {"n": FromTick(fails_in_service)}},
    "unknown": {**DURABLE, "task": "no.such.task"},
    "invalid": {**DURABLE, "kwargs": {"n": "no number"}},
    "plain": {"task": "tests.plain", "schedule": 1},
}
