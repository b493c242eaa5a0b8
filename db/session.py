"""One engine per process, and the raw autocommit connections on which arrows run.

A forked child must never use its parent's sockets: the engine is keyed by process id, and `disown_inherited`
points every registered socket of the parent to /dev/null in the child, so that neither a query nor the
`Terminate` of a garbage-collected connection can reach the parent's session.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

import psycopg2
from psycopg2.errors import FeatureNotSupported, InvalidSqlStatementName
from psycopg2.extensions import TRANSACTION_STATUS_IDLE
from psycopg2.extensions import connection as PgConnection
from sqlalchemy import Engine, create_engine, make_url
from sqlalchemy.exc import ArgumentError

from db.prepared import PlanningConnection, Prepared

DRIVER = "postgresql+psycopg2"
CONNECT_TIMEOUT_S = 5
# A silent network must end a wait within half a minute, and a dead client must free its locks within two seconds.
SOCKET_OPTIONS: dict[str, Any] = {
    "connect_timeout": CONNECT_TIMEOUT_S,
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
CHECK_CLIENT_MS = 500

_lock = threading.Lock()
_engines: dict[tuple[int, str], Engine] = {}
_sockets: dict[int, list[PgConnection]] = {}
_disowned: list[PgConnection] = []

Row = tuple[Any, ...]


class DatabaseUrlError(ValueError):
    """The database URL cannot be used; raised at start, shown to the user as it is."""


def check_url(url: str) -> str:
    """Return `url` when it names psycopg2; raises DatabaseUrlError that says what to write instead."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise DatabaseUrlError(
            f"DATABASE_URL cannot be read; write {DRIVER}://user:password@host:port/database"
        ) from None
    if parsed.drivername != DRIVER:
        raise DatabaseUrlError(
            f"DATABASE_URL names the driver {parsed.drivername!r}; write {DRIVER}://… "
            "(since SQLAlchemy 2.1 a bare postgresql:// means another driver)"
        )
    return url


def engine(url: str) -> Engine:
    """This process' engine for business queries; a forked child gets its own."""
    key = (os.getpid(), url)
    with _lock:
        if key not in _engines:
            _engines[key] = create_engine(
                check_url(url), connect_args=SOCKET_OPTIONS, pool_pre_ping=True, pool_size=2, hide_parameters=True
            )
        return _engines[key]


def autocommit_pool(url: str, statement_timeout_s: float) -> Engine:
    """A small pool of autocommit connections for this process' submits; no query waits longer than the timeout."""
    key = (os.getpid(), f"{url} {statement_timeout_s}")
    with _lock:
        if key not in _engines:
            _engines[key] = create_engine(
                check_url(url),
                isolation_level="AUTOCOMMIT",
                connect_args={
                    **SOCKET_OPTIONS,
                    "connection_factory": PlanningConnection,
                    "application_name": "deadsure submit",
                    "options": f"{own_options(url)} -c statement_timeout={int(statement_timeout_s * 1000)}".strip(),
                },
                hide_parameters=True,
                pool_reset_on_return=None,
                pool_timeout=statement_timeout_s,
            )
        return _engines[key]


def own_options(url: str) -> str:
    """The server options that the URL itself names; ours are added to them."""
    found = make_url(url).query.get("options", "")
    return found if isinstance(found, str) else " ".join(found)


def dsn(url: str) -> str:
    """The libpq connection string of a SQLAlchemy URL."""
    parsed = make_url(check_url(url))
    return parsed.set(drivername="postgresql").render_as_string(hide_password=False)


def connect(url: str, application_name: str = "deadsure", statement_timeout_s: float | None = None) -> PgConnection:
    """A raw connection in autocommit: each statement is one round trip and its own transaction.

    Raises psycopg2.OperationalError when no server answers within `CONNECT_TIMEOUT_S`.
    """
    options = f"-c client_connection_check_interval={CHECK_CLIENT_MS}"
    if statement_timeout_s is not None:
        options += f" -c statement_timeout={int(statement_timeout_s * 1000)}"
    settings = dict(SOCKET_OPTIONS)
    settings["options"] = f"{own_options(url)} {options}".strip()
    connection: PgConnection = psycopg2.connect(
        dsn(url), connection_factory=PlanningConnection, application_name=application_name, **settings
    )
    connection.autocommit = True
    with _lock:
        known = _sockets.setdefault(os.getpid(), [])
        known[:] = [other for other in known if not other.closed]
        known.append(connection)
    return connection


def rows(connection: PgConnection, sql: str | bytes, parameters: Any = None) -> list[Row]:
    """Run `sql` (one or several statements, one round trip) and return the rows of the last statement."""
    if isinstance(sql, Prepared) and isinstance(connection, PlanningConnection):
        return planned_rows(connection, sql, parameters)
    with connection.cursor() as cursor:
        cursor.execute(sql, parameters)
        return cursor.fetchall() if cursor.description else []


def planned_rows(connection: PlanningConnection, sql: Prepared, parameters: Any) -> list[Row]:
    """`rows` by prepared statements; by plain text when they are no good any more and nothing else is lost by it.

    The server has lost them, or a migration has changed the type of a column that one of them returns.
    """
    try:
        with connection.cursor() as cursor:
            cursor.execute(connection.text(sql), parameters)
            return cursor.fetchall() if cursor.description else []
    except (InvalidSqlStatementName, FeatureNotSupported) as error:
        lost = isinstance(error, InvalidSqlStatementName)
        if lost:
            connection.forget()
        if sql.begins:
            connection.cursor().execute("ROLLBACK")
        elif connection.info.transaction_status != TRANSACTION_STATUS_IDLE:
            raise
        if not lost:
            connection.plan_anew()
        return rows(connection, str(sql), parameters)


def one(connection: PgConnection, sql: str, parameters: Any = None) -> Row | None:
    """The first row of `rows`, or None."""
    found: Sequence[Row] = rows(connection, sql, parameters)
    return found[0] if found else None


def disown_inherited() -> None:
    """In a forked child: make the parent's database sockets unreachable without ending its sessions."""
    global _lock  # noqa: PLW0603  # a lock that was held at the fork would stay locked here
    _lock = threading.Lock()
    null = os.open(os.devnull, os.O_RDWR)
    for pid in [pid for pid in _sockets if pid != os.getpid()]:
        for connection in _sockets.pop(pid):
            if not connection.closed:
                os.dup2(null, connection.fileno())
            _disowned.append(connection)
    os.close(null)
    for inherited in [key for key in _engines if key[0] != os.getpid()]:
        _engines.pop(inherited).dispose(close=False)
