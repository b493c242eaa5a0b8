"""`deadsure prune`: delete what ended long ago, after it was exported if that is wanted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click

from app.ages import Age
from app.cli.main import database
from app.cli.output import Seconds, json_option, print_json, print_table, reporting_errors
from app.clock import boottime_s
from app.retention.archive import Archive
from app.retention.policy import Retention
from app.retention.prune import PAGE_ROWS, PAUSE_S, Pruned, Run
from app.settings import settings
from db.migrate import check

HELP = {
    "succeeded": "Jobs that succeeded so long ago.",
    "cancelled": "Jobs that were cancelled so long ago.",
    "quarantined": "Quarantined jobs whose entries are all closed; open ones always stay.",
    "journal": "Journal rows whose job is gone.",
    "dead_letters": "Dead letters of jobs that have ended, and dismissed ones; others stay.",
    "replay_runs": "Records of replays in stages.",
    "batches": "Batches that have ended and whose jobs are gone.",
    "workers": "Rows of workers that are gone.",
    "tombstones": "Tombstones: their keys are free again, and run again.",
    "keyless": "Tombstones of jobs without a key.",
}
JOBS = ("succeeded", "cancelled", "quarantined")


class AgeType(click.ParamType[Age]):
    """`30d`, `12h`, `45min`, `90s` or `never`."""

    name = "age"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Age:
        """The age; fails with what is expected."""
        try:
            return value if isinstance(value, Age) else Age(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def age_options(command: Callable[..., None]) -> Callable[..., None]:
    """One option for each age; without it, its setting counts."""
    for f in reversed(fields(Retention)):
        option = "--" + f.name.replace("_", "-")
        command = click.option(option, f.name, type=AgeType(), help=HELP[f.name])(command)
    return command


@click.command("prune")
@age_options
@click.option("--export", type=click.Path(dir_okay=False, path_type=Path), help="Append each job to FILE first (.gz).")
@click.option("--for", "for_s", type=Seconds(), help="End after so many seconds; run it again for the rest.")
@click.option("--rows", "page_rows", type=click.IntRange(1, 10_000), default=PAGE_ROWS, show_default=True)
@click.option("--pause", "pause_s", type=Seconds(), default=PAUSE_S, show_default=True, help="Between two deletes.")
@click.option("--dry-run", is_flag=True, help="Only count.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
@reporting_errors
def prune(
    export: Path | None,
    for_s: float | None,
    page_rows: int,
    pause_s: float,
    dry_run: bool,
    yes: bool,
    as_json: bool,
    **ages: Age | None,
) -> None:
    """Delete what ended long ago. A job that something still needs stays, and so does the key of one that goes.

    Ages are 30d, 12h, 45min, 90s or never; without an option the setting DEADSURE_RETENTION_… counts. Safe to stop, to
    kill and to run twice at once.
    """
    retention = replace(Retention.of(settings()), **{name: age for name, age in ages.items() if age is not None})
    if not dry_run and not yes:
        if as_json:
            raise click.UsageError("this deletes: add --yes, or --dry-run to count only")
        click.confirm(f"Delete for good: {question(retention)}?", abort=True)
    began = boottime_s()

    def over() -> bool:
        return for_s is not None and boottime_s() - began >= for_s

    with database() as connection, Archive(export) if export and not dry_run else nullcontext() as archive:
        check(connection)
        run = Run(connection, retention, page_rows, pause_s, over, archive, dry_run)
        done = run.go()
    if as_json:
        print_json(described(done, dry_run))
    else:
        tell(done, dry_run)


def question(retention: Retention) -> str:
    """What would go, in words."""
    return ", ".join(
        f"{name} older than {getattr(retention, name)}" for name in JOBS if getattr(retention, name) != Age("never")
    )


def described(done: Pruned, dry_run: bool) -> dict[str, Any]:
    """The run for scripts."""
    return {
        "dry_run": dry_run,
        "complete": done.complete,
        "jobs": [{"state": state, "type": kind, "count": count} for (state, kind), count in sorted(done.jobs.items())],
        "kept": dict(done.kept),
        "rest": dict(done.rest),
    }


def tell(done: Pruned, dry_run: bool) -> None:
    """The run for people."""
    total = f"{done.jobs.total()} jobs {'would go' if dry_run else 'pruned'}"
    print_table(total, ("state", "type", "count"), [(*key, count) for key, count in sorted(done.jobs.items())])
    for title, counted in (("kept, because of", done.kept), ("besides", done.rest)):
        if +counted:
            click.echo(f"{title}: " + ", ".join(f"{count} {what}" for what, count in sorted(counted.items())))
    if not done.complete:
        click.echo("It ended before everything was looked at; run it again for the rest.")
