"""Findings, and how checks run: one that raises becomes a finding that something could not be checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

import psycopg2
from psycopg2.extensions import connection as PgConnection
from sqlalchemy.exc import DBAPIError

from app.job_types import JobType
from app.settings import Settings

L = TypeVar("L")


class Severity(StrEnum):
    """How bad it is; an error makes `deadsure doctor` exit with 1."""

    OK = "ok"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """One thing looked at. `code` is for scripts and stays; `checked` is False when nobody could look."""

    severity: Severity
    code: str
    what: str
    next_step: str = ""
    checked: bool = True


@dataclass(frozen=True)
class Look:
    """What the checks of the database see: a session in autocommit, the settings, the types of the installed code."""

    connection: PgConnection
    settings: Settings
    types: Mapping[tuple[str, int], JobType]


def ok(code: str, what: str) -> Finding:
    """Nothing is wrong."""
    return Finding(Severity.OK, code, what)


def info(code: str, what: str, next_step: str = "") -> Finding:
    """Worth knowing, nothing to do."""
    return Finding(Severity.INFO, code, what, next_step)


def warning(code: str, what: str, next_step: str) -> Finding:
    """Nothing is lost, but somebody should act."""
    return Finding(Severity.WARNING, code, what, next_step)


def error(code: str, what: str, next_step: str) -> Finding:
    """A promise does not hold, or work stands still."""
    return Finding(Severity.ERROR, code, what, next_step)


def unchecked(code: str, what: str, next_step: str) -> Finding:
    """Nobody could look."""
    return Finding(Severity.WARNING, code, what, next_step, checked=False)


def run(checks: Sequence[Callable[[L], Iterable[Finding]]], look: L) -> list[Finding]:
    """The findings of all checks in their order; whatever one raises is a finding, and the next one runs."""
    found: list[Finding] = []
    for check in checks:
        try:
            found += check(look)
        except Exception as failed:  # noqa: BLE001  # a check must not hide what the others find
            what = f"could not check {check.__name__.replace('_', ' ')} ({name_of(failed)})"
            found.append(unchecked(f"unchecked.{check.__name__}", what, hint(failed)))
    return found


def name_of(failed: BaseException) -> str:
    """The kind of an error, without its text: that may quote a payload or a password."""
    code = getattr(failed, "pgcode", None) or getattr(failed, "code", None)  # PostgreSQL's, HTTP's or AMQP's
    return f"{type(failed).__name__} {code}" if code else type(failed).__name__


def hint(failed: BaseException) -> str:
    """What may help against an error of a check."""
    if isinstance(failed, psycopg2.errors.InsufficientPrivilege):
        return "let the role of DATABASE_URL read it (GRANT pg_monitor), or run doctor as one that may"
    if isinstance(failed, psycopg2.errors.QueryCanceled):
        return "the database is slow: run doctor again when it is not"
    if isinstance(failed, psycopg2.ProgrammingError):
        return "is the schema this release's? deadsure db upgrade"
    if isinstance(failed, psycopg2.Error | DBAPIError):
        return "is the server of DATABASE_URL up? run doctor again"
    if isinstance(failed, OSError):
        return "does RABBITMQ_MANAGEMENT_URL answer (or BROKER_URL), and may its user read this?"
    return "may the user of BROKER_URL do this? run doctor again; if it stays, it is a bug of this check"


def lasted(seconds: Any) -> str:
    """A duration for people: "42 s", "7 min", "3 h", "2 days"."""
    number = max(0.0, float(seconds or 0))
    for limit, size, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if number < limit:
            return f"{number / size:.0f} {unit}"
    return f"{number / 86_400:.0f} days"
