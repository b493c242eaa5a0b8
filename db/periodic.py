"""The table of periodic jobs: up to which tick each entry of the schedule was submitted."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import PrimaryKeyConstraint
from sqlalchemy.orm import Mapped, mapped_column

from db.models import NOW, Base


class PeriodicTick(Base):
    """The last tick of one schedule entry that was submitted, or left out by its catch-up policy.

    `schedule` is in the key: a release with another schedule for the entry has a row of its own, so that old and new
    beats of a rolling deploy do not move each other's.
    """

    __tablename__ = "periodic_ticks"

    name: Mapped[str]
    schedule: Mapped[str]
    last_tick: Mapped[datetime]
    changed_at: Mapped[datetime] = mapped_column(server_default=NOW)

    __table_args__ = (PrimaryKeyConstraint("name", "schedule"),)
