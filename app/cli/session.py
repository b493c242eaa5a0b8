"""The database session of one command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from psycopg2.extensions import connection as PgConnection

from app.settings import settings
from db.session import connect


@contextmanager
def database() -> Iterator[PgConnection]:
    """A session for one command."""
    connection = connect(settings().need_database(), "deadsure cli", statement_timeout_s=60)
    try:
        yield connection
    finally:
        connection.close()
