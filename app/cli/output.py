"""How commands print: one JSON object for scripts, a table for people; and what they do with errors."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, ParamSpec, TypeVar
from uuid import UUID

import click
import psycopg2
from pydantic import ValidationError
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from sqlalchemy.exc import DBAPIError

from app.errors import DeadsureError, invalid
from db.migrate import SchemaError
from db.session import DatabaseUrlError

P = ParamSpec("P")
R = TypeVar("R")

# Never broken over lines: people copy them.
WHOLE = ("job_id", "sample_job_id", "run_id", "fingerprint", "created_at", "changed_at")
MIN_WIDTH = 160  # of a table in a file or a pipe


class Seconds(click.FloatRange):
    """A number of seconds, 0 to a hundred years."""

    name = "seconds"

    def __init__(self) -> None:
        super().__init__(min=0, max=100 * 366 * 86_400)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number; fails for NaN and infinity, which compare as in range."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is no number of seconds", param, ctx)
        return number


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")


def plain(value: Any) -> Any:
    """`value` as JSON can carry it; times in ISO 8601."""
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, UUID):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not printable")


def print_json(value: Any) -> None:
    """One JSON value on one line."""
    click.echo(json.dumps(value, default=plain, ensure_ascii=False))


def print_table(title: str, columns: Sequence[str], entries: Sequence[Sequence[Any]]) -> None:
    """A table; empty cells for None."""
    table = Table(title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=column in WHOLE, overflow="fold")
    for entry in entries:
        table.add_row(*["" if cell is None else cell_text(cell) for cell in entry])
    console = Console()
    console.width = max(console.width, MIN_WIDTH) if not console.is_terminal else console.width
    console.print(table)


def print_events(events: Sequence[Mapping[str, Any]]) -> None:
    """The journal, one line for each event: time, event, and what else is known."""
    for event in events:
        known = {name: value for name, value in event.items() if value is not None}
        at, word = known.pop("at"), known.pop("event")
        if "worker_id" in known:
            known["worker_id"] = str(known["worker_id"])[:8]
        details = "  ".join(f"{name}={value}" for name, value in known.items())
        click.echo(f"{cell_text(at)}  {word:<16} {details}".rstrip())


def print_fields(fields: Mapping[str, Any]) -> None:
    """Name and value, one line each; None is left out."""
    width = max(map(len, fields), default=0)
    for name, value in fields.items():
        if value is not None:
            click.echo(f"{name.ljust(width)}  {cell_text(value)}")


def cell_text(value: Any) -> str:
    """A value for people: times in seconds, UTC."""
    if isinstance(value, datetime):
        return value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    return str(value)


def reporting_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Turn expected errors into one line and exit code 1; a bug keeps its traceback."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except ValidationError as error:
            raise click.ClickException(invalid(error)) from None
        except (DeadsureError, DatabaseUrlError, SchemaError, ValueError) as error:
            raise click.ClickException(str(error)) from None
        except (psycopg2.OperationalError, DBAPIError) as error:
            raise click.ClickException(
                f"the database does not answer ({type(error).__name__}): is the server of DATABASE_URL up?"
            ) from None
        except psycopg2.errors.UndefinedTable:
            raise click.ClickException("the database has no Deadsure schema: run `deadsure db upgrade`") from None

    return wrapped
