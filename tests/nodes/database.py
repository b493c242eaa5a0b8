"""A database per test, copied from a migrated template."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import create_engine, pool, text

from db import migrate, session
from tests.faults.effects import CREATE_TABLE
from tests.nodes.servers import with_path

TEMPLATE = "template_migrated"


def execute(url: str, statement: str) -> None:
    """One statement in autocommit, on a connection of its own."""
    made = create_engine(url, isolation_level="AUTOCOMMIT", poolclass=pool.NullPool)
    with made.connect() as connection:
        connection.exec_driver_sql(statement)


def exists(server_url: str, name: str) -> bool:
    """Whether the server has a database of this name."""
    made = create_engine(server_url, poolclass=pool.NullPool)
    with made.connect() as connection:
        return connection.scalar(text("SELECT 1 FROM pg_database WHERE datname = :name"), {"name": name}) is not None


def make_template(server_url: str) -> str:
    """A database migrated to head with the tests' effect table, made unless it is there: its name."""
    if exists(server_url, TEMPLATE):
        return TEMPLATE
    execute(server_url, f"CREATE DATABASE {TEMPLATE} TEMPLATE template0")
    url = with_path(server_url, TEMPLATE)
    migrate.upgrade(url)
    execute(url, CREATE_TABLE)
    return TEMPLATE


@contextmanager
def database(server_url: str, name: str, template: str) -> Iterator[str]:
    """URL of a copy of `template`, dropped at the end whoever is still connected."""
    execute(server_url, f"CREATE DATABASE {name} TEMPLATE {template}")
    url = with_path(server_url, name)
    try:
        yield url
    finally:
        forget_engines(url)
        execute(server_url, f"DROP DATABASE {name} WITH (FORCE)")


def forget_engines(url: str) -> None:
    """Close this process' pools for `url`, so that a session of many tests does not collect them."""
    for key in [key for key in session._engines if key[1].partition(" ")[0] == url]:
        session._engines.pop(key).dispose()
