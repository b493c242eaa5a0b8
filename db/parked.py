"""The table of parked messages: what came without a job, and what no worker that saw it could read."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Identity, Index, Text
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.orm import Mapped, mapped_column

from db.models import NOW, Base


class ParkedMessage(Base):
    """A message that another release may be able to read, kept until a worker of that release lives.

    `envelope` (JSON) and `body` make the message again; `tried` is what the worker that parked it accepts under this
    task name; `digest` knows the message however often it is delivered.
    """

    __tablename__ = "parked_messages"

    parked_id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    digest: Mapped[bytes] = mapped_column(unique=True)
    task: Mapped[str]
    tried: Mapped[list[str]] = mapped_column(ARRAY(Text()))
    queue: Mapped[str]
    envelope: Mapped[str]
    body: Mapped[bytes]
    reason: Mapped[str]
    parked_at: Mapped[datetime] = mapped_column(server_default=NOW)
    due_at: Mapped[datetime] = mapped_column(server_default=NOW)

    __table_args__ = (Index("ix_parked_messages_due", "due_at"),)
