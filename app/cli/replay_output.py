"""How a replay is told: a progress bar, a dry run, and what became of it with its exit code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bars

from app.cli.output import print_json
from app.replay_walk import Progress, Report, Stopped

SOME_LEFT, CAME_BACK, TOO_SLOW = 3, 4, 5
EXIT_CODES = """\b
Exit codes:
  0  every job was replayed (and succeeded, where the command waited) or settled
  1  an error; what was done before it is in `deadsure quarantine runs`
  2  wrong options
  3  some jobs were left as they are, were cancelled, or are still to come
  4  stopped: jobs came back into quarantine
  5  stopped: a stage did not end in time
"""
SHOWN = 20
DONE = {"succeeded", "settled", "replayed"}
COLUMNS = (
    TextColumn("stage {task.fields[stage]}"),
    BarColumn(),
    MofNCompleteColumn(),
    TextColumn("{task.fields[out]} out"),
)
# (job, what would become of it, diff of its payload, whether it would be left)
Preview = tuple[UUID, str, list[str], bool]


@contextmanager
def progress(as_json: bool, waits: bool) -> Iterator[Report]:
    """A bar on a terminal, a line for each stage elsewhere, nothing for scripts."""
    console = Console(stderr=True)
    if as_json or not waits:
        yield lambda _: None
    elif console.is_terminal:
        with Bars(*COLUMNS, console=console) as bars:
            task = bars.add_task("replay", stage="1", out=0, total=None)
            most = 0

            def show(now: Progress) -> None:
                nonlocal most
                most = max(most, now.out + now.left_to_do)
                done = most - now.out - now.left_to_do
                bars.update(task, total=most, completed=done, stage=f"{now.stage}/{now.stages}", out=now.out)

            yield show
    else:
        seen, told = 0, False

        def say(now: Progress) -> None:
            nonlocal seen, told
            if now.stage > seen:
                seen = now.stage
                click.echo(f"stage {now.stage} of {now.stages}: {now.size or 'all that are left'}", err=True)
            if now.stopped and not told:
                told = True
                click.echo(f"stopped ({now.stopped}); waiting for the {now.out} that are out", err=True)

        yield say


def tell(previewed: Iterable[Preview], left: list[dict[str, Any]], as_json: bool) -> None:
    """Print a dry run; exit code 3 when something would be left."""
    found = [*previewed]
    some_left = bool(left) or any(leave for *_, leave in found)
    if as_json:
        jobs = [{"job_id": job_id, "would": would, "diff": diff} for job_id, would, diff, _ in found]
        print_json({"dry_run": True, "jobs": jobs, "left": left})
    else:
        for job_id, would, diff, _ in found:
            click.echo(f"{job_id}  {would}")
            for line in diff:
                click.echo(f"    {line}")
        for entry in left:
            click.echo(f"{entry['job_id']}  {entry['outcome']}")
        click.echo("Nothing was changed.")
    if some_left:
        raise SystemExit(SOME_LEFT)


def conclude(summary: dict[str, Any], as_json: bool) -> int:
    """Print what became of a run; its exit code."""
    counts, stopped = summary["counts"], summary["stopped"]
    if stopped in (Stopped.RETURNED, Stopped.ANOTHER_CAUSE):
        code = CAME_BACK
    elif stopped is not None:
        code = TOO_SLOW
    else:
        code = SOME_LEFT if summary["left"] or counts.keys() - DONE else 0
    if as_json:
        print_json({**summary, "exit_code": code})
        return code
    for outcome, count in counts.items():
        click.echo(f"{count:>7}  {outcome}")
    for entry in summary["left"][:SHOWN]:
        click.echo(f"{entry['job_id']}  {entry['outcome']}")
    if stopped:
        what = "a stage did not end in time" if code == TOO_SLOW else f"jobs came back into quarantine ({stopped})"
        click.echo(f"Stopped: {what}. Go on: deadsure quarantine replay --resume {summary['run_id']}")
    elif not counts:
        click.echo("There was nothing to replay.")
    return code
