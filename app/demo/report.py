"""What the demo says at its end, for people: the table, one job's story, what to try next."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.table import Table

from app.cli.output import print_table
from app.demo.play import Outcome
from app.demo.stage import shown

COLUMNS = {
    "jobs": "jobs",
    "succeeded": "succeeded",
    "lost": "lost",
    "doubled": "doubled",
    "redelivered": "redelivered",
    "attempts_over_1": "attempts > 1",
    "crashes": "crashes",
}
LEGEND = """\
  lost          jobs without their effect: no file, no row
  doubled       effects beyond one per job
  redelivered   messages that came a second time, and had to do no harm
  attempts > 1  jobs that were started again, because their worker was dead
  crashes       times that a worker died in the middle of a job"""
MEANINGS = {
    "submit": "job and debt written in one commit",
    "published": "a message went to the broker",
    "received": "a worker took the message",
    "claim": "the worker owns the job, committed",
    "result_saved": "the effect and ...",
    "succeed": "... the success, in one commit",
    "ack_sent": "only now the broker may forget the message",
}
STUCK_SHOWN = 5


def show(outcome: Outcome, *, keep: bool) -> None:
    """Print everything but the JSON line."""
    click.echo()
    table = Table(box=box.SIMPLE_HEAD, padding=0)
    table.add_column("job type")
    for title in COLUMNS.values():
        table.add_column(title, justify="right")
    for entry in outcome.types:
        table.add_row(entry.type, *(str(getattr(entry, name)) for name in COLUMNS))
    table.add_row("together", *(str(outcome.total(name)) for name in COLUMNS), style="bold")
    Console().print(table)
    click.echo(LEGEND)
    click.echo()
    verdict(outcome)
    story(outcome)
    what_next(outcome, keep=keep)


def verdict(outcome: Outcome) -> None:
    """Say in words what the table says."""
    total = outcome.total
    if outcome.stuck:
        click.echo(f"{len(outcome.stuck)} jobs have not succeeded.")
    elif outcome.good:
        click.echo(f"Nothing was lost, nothing was done twice, and all {len_files(outcome)} CSV files are whole.")
    if total("doubled"):
        click.echo(f"{total('doubled')} effects happened more often than once.")
    for job_id in outcome.bad_files[:STUCK_SHOWN]:
        click.echo(f"The CSV file of job {job_id} is missing or not the one that was recorded.")
    if outcome.recovery_s is not None:
        click.echo(
            f"The next effect was committed {outcome.recovery_s:.1f} s after the kill, "
            f"the last one {outcome.last_effect_s:.1f} s after it."
        )
    elif outcome.kill is None:
        click.echo("Time was up before enough jobs were finished, so no worker was killed.")
    elif not outcome.stuck:
        click.echo("All jobs were finished before the kill: run it again with more --jobs.")


def story(outcome: Outcome) -> None:
    """Print the journal of one job that was being worked on when the worker died."""
    if outcome.story_of is None or outcome.kill is None:
        return
    click.echo()
    entries = [
        [f"{at:.3f}", event, attempt, worker(pid, outcome.kill.pid), meaning(event, reason)]
        for at, event, attempt, _copy, pid, reason in outcome.story
    ]
    columns = ("second", "event", "attempt", "worker", "what it means")
    print_table(f"The story of job {outcome.story_of}, whose worker was killed", columns, entries)


def meaning(event: str, reason: str | None) -> str | None:
    """An event in words."""
    return f"nothing to do: {reason}" if reason and event == "received" else reason or MEANINGS.get(event)


def worker(pid: int | None, killed: int) -> str | None:
    """A worker as people know it."""
    return None if pid is None else f"{pid}, killed" if pid == killed else str(pid)


def what_next(outcome: Outcome, *, keep: bool) -> None:
    """Say where the files are and what to try."""
    stage, root = outcome.stage, shown(outcome.stage.root)
    activate = "" if shutil.which("deadsure") else f". {shown(Path(sys.prefix))}/bin/activate && "
    example = outcome.story_of or "JOB_ID"
    click.echo()
    click.echo(f"The CSV files are in {shown(stage.reports)}, the workers' logs beside it ({root}/worker-*.log).")
    click.echo("What to try next:")
    if keep:
        entries = [
            ("point your shell at these servers", f"{activate}. {shown(stage.env_file)}"),
            ("one job's story", f"deadsure show {example}"),
            ("the newest jobs", "deadsure jobs list"),
            ("a worker, and Flower to watch it", "celery -A tasks worker -c 2"),
            ("", "celery -A tasks flower --address=127.0.0.1"),
            ("stop the servers", f"python -m app.stack down --root {root}/stack"),
        ]
    else:
        other = "rabbitmq" if stage.broker == "valkey" else "valkey"
        entries = [
            ("keep the servers, to look around", f"make demo BROKER={stage.broker} ARGS=--keep"),
            ("the same on the other broker", f"make demo BROKER={other}"),
            ("servers to develop on", "make services"),
        ]
    entries.append(("write your own job", "docs/first-job.md, in ten minutes"))
    for what, how in entries:
        click.echo(f"  {what:<35}{how}")


def len_files(outcome: Outcome) -> int:
    """How many CSV files were compared with their record."""
    return sum(entry.succeeded for entry in outcome.types if entry.type == "reports.export")


def complaint(outcome: Outcome) -> str:
    """The error of a run that lost or doubled something; names the first stuck jobs and the way to their stories."""
    stage, total, bad = outcome.stage, outcome.total, len(outcome.bad_files)
    parts = [
        f"of {total('jobs')} jobs, lost: {total('lost')}, doubled: {total('doubled')}, bad files: {bad}",
        *(
            f"  {job['job_id']}  {job['type']} is {job['state']}, attempt {job['attempt']}"
            for job in outcome.stuck[:STUCK_SHOWN]
        ),
    ]
    if len(outcome.stuck) > STUCK_SHOWN:
        parts.append(f"  ... and {len(outcome.stuck) - STUCK_SHOWN} more")
    if outcome.stuck:
        only = f"--only postgres --only {stage.broker}"
        parts += [
            f"To see why, read {shown(stage.root)}/worker-*.log, or start the servers again and look:",
            f"  python -m app.stack up --root {shown(stage.root)}/stack {only}",
            f"  . {shown(stage.env_file)} && deadsure show {outcome.stuck[0]['job_id']}",
        ]
    return "\n".join(parts)
