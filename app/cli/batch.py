"""`deadsure batch list | show | cancel`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import click
from psycopg2.extensions import connection as PgConnection
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from app import batch_story
from app.batch_cancel import cancel_batch
from app.cli.main import database
from app.cli.output import json_option, print_fields, print_json, print_table, reporting_errors
from app.cli.selection import author_option

FOLLOW_S = 1.0
ENDS = ("finished", "cancelled")
LIST_COLUMNS = ("batch_id", "type", "phase", "children", "ended", "total", "created_at")


@click.group("batch")
def batch_group() -> None:
    """Big work that is many small jobs: a coordinator, its children, their completion."""


@batch_group.command("list")
@click.option("--open", "only_open", is_flag=True, help="Only batches that have not ended.")
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True)
@json_option
@reporting_errors
def batch_list(only_open: bool, limit: int, as_json: bool) -> None:
    """List batches, newest first."""
    with database() as connection:
        found = batch_story.list_batches(connection, only_open, limit)
    if as_json:
        print_json(found)
        return
    cells = [{**story, "children": by_state(story)} for story in found]
    print_table(f"{len(found)} batches", LIST_COLUMNS, [[story[name] for name in LIST_COLUMNS] for story in cells])


@batch_group.command("show")
@click.argument("batch_id", type=click.UUID)
@click.option("--follow", is_flag=True, help="Go on until the batch has ended; exits 1 when it was cancelled.")
@json_option
@reporting_errors
def batch_show(batch_id: UUID, follow: bool, as_json: bool) -> None:
    """Show one batch (its id is its coordinator's): children by state, and what still blocks it."""
    with database() as connection:
        if follow and as_json:
            for story in changes(connection, batch_id):
                print_json(story)
        else:
            story = follow_bar(connection, batch_id) if follow else need(connection, batch_id)
            print_json(story) if as_json else print_story(story)
    if follow and story["phase"] != "finished":
        raise SystemExit(1)


@batch_group.command("cancel")
@click.argument("batch_id", type=click.UUID)
@click.option("--reason", required=True, help="Why; it is kept with the batch and with each job.")
@author_option
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
@reporting_errors
def batch_cancel(batch_id: UUID, reason: str, author: str, yes: bool, as_json: bool) -> None:
    """Cancel the coordinator and all open children; there will be no completion job. Can be repeated."""
    with database() as connection:
        story = need(connection, batch_id)
        if story["phase"] == "finished":
            raise click.ClickException(f"batch {batch_id} has finished: nothing is left to cancel")
        if not yes:
            open_children = story["total"] - story["ended"]
            click.confirm(
                f"Cancel {story['type']} {batch_id}: its coordinator is {story['coordinator']}, "
                f"{open_children} of {story['total']} children are open. Cancel them?",
                abort=True,
                err=True,
            )
        done = cancel_batch(connection, batch_id, author=author, reason=reason)
        story = need(connection, batch_id)
    if done is None or done.finished:
        raise click.ClickException(f"batch {batch_id} finished in this moment: nothing was cancelled")
    if as_json:
        print_json({"cancelled": done.cancelled, "asked": done.asked, "coordinator": done.coordinator.value, **story})
        return
    click.echo(f"{done.cancelled} children are cancelled, {done.asked} running ones are asked to stop.")
    click.echo(f"The coordinator: {done.coordinator.value}.")
    if left := story["total"] - story["ended"]:
        click.echo(f"{left} children still run. Watch them: deadsure batch show {batch_id}")


def need(connection: PgConnection, batch_id: UUID) -> dict[str, Any]:
    """The story of a batch; raises click.ClickException when there is none."""
    story = batch_story.show(connection, batch_id)
    if story is None:
        raise click.ClickException(
            f"there is no batch {batch_id}: `deadsure batch list` shows the newest, `deadsure show {batch_id}` a job"
        )
    return story


def changes(connection: PgConnection, batch_id: UUID) -> Iterator[dict[str, Any]]:
    """The story each time that it has changed, until the batch has ended."""
    last = None
    while True:
        story = need(connection, batch_id)
        seen = (story["phase"], story["exhausted"], story["children"])
        if seen != last:
            yield story
        last = seen
        if story["phase"] in ENDS:
            return
        time.sleep(FOLLOW_S)


def follow_bar(connection: PgConnection, batch_id: UUID) -> dict[str, Any]:
    """A live bar on a terminal, else a line for each change; the story at the end."""
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    story: dict[str, Any] = {}
    if not console.is_terminal:
        for story in changes(connection, batch_id):
            click.echo(f"{story['phase']}: {story['ended']} of {story['total']} ({by_state(story)})", err=True)
        return story
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=None)
        for story in changes(connection, batch_id):
            total = story["total"] if story["exhausted"] else None  # nobody knows it before
            label = f"{story['phase']}  {by_state(story)}"
            progress.update(task, description=label, completed=story["ended"], total=total)
    return story


def by_state(story: dict[str, Any]) -> str:
    """The children in one line."""
    return ", ".join(f"{count} {state}" for state, count in story["children"].items()) or "none"


def print_story(story: dict[str, Any]) -> None:
    """One batch for people."""
    groups = story["blocking"]
    shown = {name: value for name, value in story.items() if name not in ("blocking", "children", "total", "ended")}
    print_fields({name: value for name, value in shown.items() if value not in (None, "", False)})
    click.echo()
    click.echo(f"{story['ended']} of {story['total']} children have ended")
    for state, count in story["children"].items():
        click.echo(f"  {count:>9}  {state}")
    if groups:
        click.echo()
        click.echo("what blocks it")
    for group in groups:
        click.echo(f"  {group['count']:>9}  {group['what']}" + (f": {group['reason']}" if group["reason"] else ""))
        for job_id in group["jobs"]:
            click.echo(f"             {job_id}")
        click.echo(f"             next: {group['next']}")
