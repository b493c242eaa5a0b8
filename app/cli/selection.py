"""Which quarantined jobs a command is about, and who gives it: options that the worklist's commands share."""

from __future__ import annotations

import getpass
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar
from uuid import UUID

import click
from psycopg2.extensions import connection as PgConnection

from app import quarantine
from app.cli.output import Seconds
from app.quarantine import Filters
from app.states import State

F = TypeVar("F", bound=Callable[..., Any])
NARROWING = (
    click.option("--fingerprint", help="Only this group."),
    click.option("--type", "job_type", help="Only this job type."),
    click.option("--cause", "--code", "cause", help="Only this cause code, for instance attempts_spent."),
    click.option("--scope", help="Only this scope."),
    click.option("--older", "--age", "older_s", type=Seconds(), help="In quarantine for at least SECONDS."),
    click.option("--newer", "newer_s", type=Seconds(), help="In quarantine for less than SECONDS."),
)


def narrowing(command: F) -> F:
    """The filters."""
    for option in reversed(NARROWING):
        command = option(command)
    return command


def os_user() -> str:
    """The user who runs the command; raises click.UsageError where there is no such name."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        raise click.UsageError("nobody knows who you are here; say it with --author") from None


author_option = click.option("--author", default=os_user, show_default="you", help="Who decides; recorded.")
reason_option = click.option("--reason", required=True, help="Why; recorded. No secrets here.")
yes_option = click.option("--yes", is_flag=True, help="Do not ask.")


def given_ids(targets: Sequence[str]) -> list[UUID]:
    """Job ids from the command line; `-` reads them from stdin: one in a line, or what a list prints with --json."""
    found = []
    for target in targets:
        found += [found for line in lines(sys.stdin) for found in job_ids(line)] if target == "-" else [job_id(target)]
    return list(dict.fromkeys(found))


def job_ids(text: str) -> list[UUID]:
    """The id in a word or in a JSON object, or those in a JSON list; raises click.BadParameter."""
    if not text.startswith("["):
        return [job_id(text)]
    try:
        return [job_id(entry if isinstance(entry, str) else json.dumps(entry)) for entry in json.loads(text)]
    except (ValueError, TypeError):
        raise click.BadParameter(f"{text[:50]!r} is no list of jobs") from None


def lines(stream: Iterable[str]) -> Iterable[str]:
    """Lines with something in them."""
    return (line.strip() for line in stream if line.strip())


def job_id(text: str) -> UUID:
    """The id in a word or in a JSON object; raises click.BadParameter."""
    try:
        return UUID(str(json.loads(text)["job_id"]) if text.startswith("{") else text)
    except (ValueError, KeyError, TypeError):
        raise click.BadParameter(f"{text[:50]!r} is no job id") from None


def select(
    connection: PgConnection, job_ids: Sequence[UUID], filters: Filters | None
) -> tuple[list[tuple[UUID, int]], list[dict[str, Any]]]:
    """(id and episode of the quarantined jobs, the others with the reason why they are left)."""
    if filters is not None:
        entries = quarantine.entries(connection, filters, None)
        return [(UUID(entry["job_id"]), entry["episode"]) for entry in entries], []
    known = quarantine.chosen(connection, job_ids)
    jobs, left = [], []
    for wanted in job_ids:
        episode, state = known.get(wanted, (0, "no such job"))
        if state == State.QUARANTINED:
            jobs.append((wanted, episode))
        else:
            why = state if wanted not in known else f"not in quarantine: {state}"
            left.append({"job_id": str(wanted), "outcome": f"left: {why}"})
    return jobs, left
