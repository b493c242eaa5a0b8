"""The table of periodic jobs: up to which tick each entry of the schedule was submitted."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy.orm import Mapped, mapped_column

from db.models import NOW, Base


class PeriodicTick(Base):
    """The last tick of one schedule entry that was submitted, or left out by its catch-up policy."""

    __tablename__ = "periodic_ticks"

    name: Mapped[str] = mapped_column(primary_key=True)
    last_tick: Mapped[datetime]
    changed_at: Mapped[datetime] = mapped_column(server_default=NOW)
