"""What the checks of a Redis/Valkey see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from psycopg2.extensions import connection as PgConnection

from app.job_types import JobType
from app.settings import Settings


@dataclass(frozen=True)
class RedisLook:
    """What the checks of a Redis/Valkey see; `options` are the transport's."""

    settings: Settings
    types: Mapping[tuple[str, int], JobType]
    database: PgConnection | None
    channel: Any
    options: Mapping[str, Any]
    work_queues: tuple[str, ...]

    @property
    def untouched(self) -> bool:
        """Whether no worker and no relay has ever used this database number."""
        return not any(self.channel.client.exists(f"_kombu.binding.{name}") for name in self.work_queues)
