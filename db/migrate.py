"""Migrations by code: `upgrade` for `deadsure db upgrade`, and the range of schemas this release can work on.

Revisions are numbers in a row. A release works on every schema from `OLDEST` to any `NEWEST` or newer revision whose
own `compatible_from` allows it; so old workers keep running while a newer release migrates.
"""

from __future__ import annotations

import time
from importlib.resources import files
from typing import TYPE_CHECKING

from psycopg2.errors import UndefinedTable
from psycopg2.extensions import connection as PgConnection
from sqlalchemy import create_engine, pool

from db.session import SOCKET_OPTIONS, check_url, one

if TYPE_CHECKING:
    from alembic.config import Config

OLDEST, NEWEST = 2, 2
UPGRADE_LOCK = 0x6465_6164_7375_7265  # "deadsure": two upgrades at once wait for each other
LOOK_S = 0.1


class SchemaError(RuntimeError):
    """The schema is outside this release's range; the message names the command that helps."""


def config() -> Config:
    """Alembic's configuration, without an ini file."""
    from alembic.config import Config  # noqa: PLC0415  # a worker only reads the revision, and starts sooner without

    made = Config()
    made.set_main_option("script_location", str(files("db") / "migrations"))
    return made


def upgrade(url: str, revision: str = "head") -> tuple[int, int]:
    """Bring the schema to `revision`; returns (before, after) as revision numbers, 0 for an empty database."""
    from alembic import command  # noqa: PLC0415  # as above

    engine = create_engine(check_url(url), poolclass=pool.NullPool, connect_args=SOCKET_OPTIONS)
    with engine.connect() as connection:
        # Not waiting in the server: a waiting session's snapshot would hold up CREATE INDEX CONCURRENTLY for ever.
        while not connection.exec_driver_sql("SELECT pg_try_advisory_lock(%s)", (UPGRADE_LOCK,)).scalar():
            connection.commit()
            time.sleep(LOOK_S)
        raw = connection.connection.driver_connection
        assert isinstance(raw, PgConnection)
        before = current(raw)
        connection.commit()
        made = config()
        made.attributes["connection"] = connection
        command.upgrade(made, revision)
        connection.commit()
        after = current(raw)
        connection.exec_driver_sql("SELECT pg_advisory_unlock(%s)", (UPGRADE_LOCK,))
        connection.commit()
    return before, after


def current(connection: PgConnection) -> int:
    """The schema's revision number; 0 when nothing was ever migrated."""
    try:
        row = one(connection, "SELECT version_num FROM alembic_version")
    except UndefinedTable:
        connection.rollback()
        return 0
    return int(row[0]) if row else 0


def compatible_from(connection: PgConnection) -> int:
    """The oldest release (by its newest revision) that the present schema still serves."""
    try:
        row = one(connection, "SELECT compatible_from FROM schema_compatibility")
    except UndefinedTable:
        connection.rollback()
        return 0
    return int(row[0]) if row else 0


def check(connection: PgConnection) -> None:
    """Raises SchemaError unless this release can work on the schema, older or newer."""
    found = current(connection)
    if found < OLDEST:
        state = "has no Deadsure schema" if found == 0 else f"is at schema {found:04d}"
        raise SchemaError(f"the database {state}, this release needs at least {OLDEST:04d}: run `deadsure db upgrade`")
    if found > NEWEST and compatible_from(connection) > NEWEST:
        raise SchemaError(
            f"the database is at schema {found:04d}, this release works up to {NEWEST:04d}: "
            "install the newer release of deadsure on this host"
        )
