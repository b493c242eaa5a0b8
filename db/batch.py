"""The table of batches: a coordinator's cursor. Children are counted from `jobs`, never from counters."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy.orm import Mapped, mapped_column

from db.models import FALSE, NOW, Base


class Batch(Base):
    """A coordinator's progress: cursor and source; children are counted from `jobs`."""

    __tablename__ = "batches"

    batch_id: Mapped[UUID] = mapped_column(primary_key=True)
    coordinator_id: Mapped[UUID]
    cursor: Mapped[dict[str, Any] | None]
    exhausted: Mapped[bool] = mapped_column(server_default=FALSE)
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    finished_at: Mapped[datetime | None]
