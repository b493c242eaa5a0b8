"""The private servers of a run: each system has a database and a virtual host of its own on the same two servers."""

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

TEMPLATE = "bench_template"
QUEUES = ("bench", "jobs", "quarantine")


class Servers:
    """PostgreSQL and RabbitMQ, as all systems use them."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        execute(stack.postgres.url, f"CREATE DATABASE {TEMPLATE}")
        template = self.database_url(TEMPLATE)
        migrate.upgrade(template)
        execute(template, CREATE_TABLES)

    def database_url(self, name: str) -> str:
        """URL of one database."""
        return self._stack.postgres.url.rpartition("/")[0] + f"/{name}"

    def site(self, system: str) -> Site:
        """A new database and virtual host for `system`."""
        name = f"bench_{system.replace('-', '_')}"
        self._stack.rabbitmq.ctl("add_vhost", name)
        self._stack.rabbitmq.ctl("set_permissions", "-p", name, "deadsure", ".*", ".*", ".*")
        return Site(self, name, self._stack.rabbitmq.url.removesuffix("/") + name)

    def execute(self, sql: str) -> None:
        """One statement in the maintenance database."""
        execute(self._stack.postgres.url, sql)

    def roots(self) -> dict[str, int | None]:
        """The servers' main processes, for `bench.cpu`."""
        return {"postgres": self._stack.postgres.pid, "rabbitmq": self._stack.rabbitmq.pid}

    def versions(self) -> dict[str, str]:
        """Versions of the servers."""
        overview = self._stack.rabbitmq.api("overview")
        assert isinstance(overview, dict)
        return {
            "postgresql": str(execute(self._stack.postgres.url, "SHOW server_version")[0][0]),
            "rabbitmq": str(overview["rabbitmq_version"]),
            "erlang": str(overview["erlang_version"]),
        }


class Site:
    """Where one system lives."""

    def __init__(self, servers: Servers, name: str, broker_url: str) -> None:
        self.servers, self.name, self.broker_url = servers, name, broker_url
        self.database_url = servers.database_url(name)

    def refresh(self) -> None:
        """An empty migrated database, no queues, no checkpoint due."""
        self.servers.execute(f"DROP DATABASE IF EXISTS {self.name} WITH (FORCE)")
        self.servers.execute(f"CREATE DATABASE {self.name} TEMPLATE {TEMPLATE}")
        self.servers.execute("CHECKPOINT")
        with Connection(self.broker_url) as connection:
            for queue in QUEUES:
                with connection.channel() as channel:
                    channel.queue_delete(queue)

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Rows of one query in this system's database."""
        return execute(self.database_url, sql, values)

    def wal(self) -> dict[str, float]:
        """WAL bytes (whole server) and commits (this database) so far."""
        row = self.rows(
            "SELECT (pg_current_wal_lsn() - '0/0')::float8, xact_commit::float8"
            " FROM pg_stat_database WHERE datname = current_database()"
        )[0]
        return {"wal_bytes": row[0], "commits": row[1]}


def execute(url: str, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
    """One statement on a connection of its own, in autocommit: its rows."""
    with closing(psycopg2.connect(dsn(url))) as connection:
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute(sql, values or None)
            return cursor.fetchall() if cursor.description else []
