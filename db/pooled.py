"""Short work on a borrowed autocommit connection: bounded in time, and tried again when the pool was stale."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import TypeVar

import psycopg2
from psycopg2.extensions import connection as PgConnection

from db.session import autocommit_pool
from db.watchdog import bounded

T = TypeVar("T")


def with_pooled(url: str, limit_s: float, work: Callable[[PgConnection], T]) -> T:
    """Do `work`, which may be done twice: after a broken connection every other one of the pool is replaced too.

    Raises psycopg2.OperationalError when the database is away, or silent for `limit_s` seconds.
    """
    pool = autocommit_pool(url, limit_s)
    for last_try in (False, True):
        with closing(pool.raw_connection()) as borrowed:
            connection = borrowed.driver_connection
            assert isinstance(connection, PgConnection)
            try:
                with bounded(connection, limit_s):
                    return work(connection)
            except (psycopg2.OperationalError, psycopg2.InterfaceError):
                borrowed.invalidate()
                pool.dispose()
                if last_try:
                    raise
            except psycopg2.Error:
                borrowed.invalidate()
                raise
    raise AssertionError("unreachable")
