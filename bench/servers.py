"""The private servers of a run: a fresh database and empty queues before each phase."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import psycopg2
from kombu import Connection

from app.stack import Stack
from bench.effects import CREATE_TABLES
from db import migrate
from db.session import dsn

TEMPLATE, DATABASE = "bench_template", "bench"
QUEUES = ("bench", "jobs", "quarantine")


class Servers:
    """PostgreSQL and RabbitMQ as both systems use them."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self._server_url = stack.postgres.url
        self.database_url = self._server_url.rpartition("/")[0] + f"/{DATABASE}"
        self.broker_url = stack.rabbitmq.url
        self._execute(self._server_url, f"CREATE DATABASE {TEMPLATE}")
        template = self._server_url.rpartition("/")[0] + f"/{TEMPLATE}"
        migrate.upgrade(template)
        self._execute(template, CREATE_TABLES)

    def refresh(self) -> None:
        """An empty migrated database, no queues, no checkpoint due."""
        self._execute(self._server_url, f"DROP DATABASE IF EXISTS {DATABASE} WITH (FORCE)")
        self._execute(self._server_url, f"CREATE DATABASE {DATABASE} TEMPLATE {TEMPLATE}")
        self._execute(self._server_url, "CHECKPOINT")
        with Connection(self.broker_url) as connection:
            for queue in QUEUES:
                with connection.channel() as channel:
                    channel.queue_delete(queue)

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Rows of one query in the benchmark's database."""
        return self._execute(self.database_url, sql, values)

    def roots(self) -> dict[str, int | None]:
        """The servers' main processes, for `bench.cpu`."""
        return {"postgres": self.stack.postgres.pid, "rabbitmq": self.stack.rabbitmq.pid}

    def wal(self) -> dict[str, float]:
        """WAL bytes and commits so far, of the whole server."""
        row = self.rows(
            "SELECT (pg_current_wal_lsn() - '0/0')::float8, (SELECT sum(xact_commit) FROM pg_stat_database)::float8"
        )[0]
        return {"wal_bytes": row[0], "commits": row[1]}

    def versions(self) -> dict[str, str]:
        """Versions of the servers."""
        overview = self.stack.rabbitmq.api("overview")
        assert isinstance(overview, dict)
        return {
            "postgresql": str(self.rows("SHOW server_version")[0][0]),
            "rabbitmq": str(overview["rabbitmq_version"]),
            "erlang": str(overview["erlang_version"]),
        }

    def _execute(self, url: str, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with closing(psycopg2.connect(dsn(url))) as connection:
            connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute(sql, values or None)
                return cursor.fetchall() if cursor.description else []
