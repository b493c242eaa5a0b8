"""`deadsure quarantine replay`: one job, a list, a group in stages; and the runs that there were."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from uuid import UUID

import click
from psycopg2.extensions import connection as PgConnection

from app import candidate, replay_run
from app.cli.output import Seconds, json_option, print_json, print_table, reporting_errors
from app.cli.replay_options import JsonObject, Stages
from app.cli.replay_output import EXIT_CODES, Preview, conclude, progress, tell
from app.cli.selection import author_option, given_ids, narrowing, select, yes_option
from app.cli.session import database
from app.edit import Edit
from app.errors import DeadsureError
from app.quarantine import Filters
from app.replay_run import Run, Terms
from app.replay_walk import Stopped, Walk
from app.triage import Leave, Replay, Why, Wish, consider

INTERRUPTED = 130
GROUP_STAGES = (1, 10, None)
DIFFS_SHOWN = 20


@click.command("replay", epilog=EXIT_CODES)
@click.argument("targets", nargs=-1, metavar="[JOB_ID... | -]")
@narrowing
@click.option("--resume", type=click.UUID, metavar="RUN_ID", help="Go on with a run that stopped or was killed.")
@click.option("--patch", type=JsonObject(), help="Merge this into the payload first (RFC 7396).")
@click.option("--payload", type=JsonObject(), help="Put this in the payload's place first; for one job.")
@click.option("--stages", type=Stages(), help="Jobs that go out in each stage; 1,10,all for a group.")
@click.option("--wait/--no-wait", default=None, help="Wait for the jobs to end; the default for stages and groups.")
@click.option("--stage-timeout", type=Seconds(), default=900.0, show_default=True, help="Longest wait for a stage.")
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), help="At most so many jobs a second.")
@click.option("--accept-uncertain", is_flag=True, help="Also jobs of which a call may be done already.")
@click.option("--settle-done", is_flag=True, help="Close jobs whose calls are all done instead of running them again.")
@click.option("--dry-run", is_flag=True, help="Only say what would become of each job; asks checks, writes nothing.")
@author_option
@click.option("--reason", help="Why; recorded, required. No secrets here.")
@yes_option
@json_option
@reporting_errors
def replay_command(  # one option, one name
    targets: tuple[str, ...],
    resume: UUID | None,
    patch: dict[str, Any] | None,
    payload: dict[str, Any] | None,
    stages: tuple[int | None, ...] | None,
    wait: bool | None,
    stage_timeout: float,
    rate: float | None,
    accept_uncertain: bool,
    settle_done: bool,
    dry_run: bool,
    author: str,
    reason: str | None,
    yes: bool,
    as_json: bool,
    **narrow: Any,
) -> None:
    """Run quarantined jobs again: those named, those on stdin (-), or a group (--fingerprint F).

    Each job is asked about first: calls that are done are not made again, a job of which nobody knows whether a call
    took effect is left (--accept-uncertain takes it along). A group goes in stages and stops by itself when the same
    failure comes back; a run that stopped or was killed goes on with --resume.
    """
    filters = Filters(**narrow)
    group = filters != Filters()
    if sum((bool(targets), group, resume is not None)) != 1:
        raise click.UsageError("name jobs, or a group with --fingerprint or another filter, or --resume a run")
    if patch is not None and payload is not None:
        raise click.UsageError("give --patch or --payload, not both")
    if payload is not None and (group or len(targets) != 1 or targets[0] == "-"):
        raise click.UsageError("--payload is for one job; a patch can change many")
    if resume is not None:
        go_on(resume, author, stage_timeout, yes, as_json)
        return
    if not reason and not dry_run:
        raise click.UsageError("Missing option '--reason'")
    edit = Edit(patch, payload) if patch is not None or payload is not None else None
    wish = Wish(edit, accept_uncertain, settle_done)
    stages = stages or (GROUP_STAGES if group else (None,))
    waits = group or len(stages) > 1 if wait is None else wait
    if not waits and len(stages) > 1:
        raise click.UsageError("stages without waiting for them say nothing; leave out --no-wait")
    terms = Terms(author, reason or "", stages, waits, rate, filters.fingerprint, wish)
    with database() as connection:
        jobs, left = select(connection, given_ids(targets), filters if group else None)
        if dry_run:
            tell(preview(connection, jobs, wish), left, as_json)
            return
        if edit is not None:
            jobs = editable(connection, jobs, wish, left, quiet=as_json)
        if jobs and not yes and (group or edit is not None or len(jobs) > 1):
            click.confirm(f"Replay {len(jobs)} jobs?", abort=True, err=True)
        if not jobs:
            summary: dict[str, Any] = {"run_id": None, "counts": {}, "stopped": None, "left": left}
            raise SystemExit(conclude(summary, as_json))
        run = replay_run.plan(connection, terms, jobs)
        raise SystemExit(conclude(walk(connection, run, author, stage_timeout, left, as_json), as_json))


def go_on(run_id: UUID, author: str, stage_timeout_s: float, yes: bool, as_json: bool) -> None:
    """Resume a run; asks first when it stopped because something came back."""
    with database() as connection:
        run = replay_run.read(connection, run_id)
        if run.finished:
            raise DeadsureError(f"run {run_id} has ended; what is in quarantine now needs a new one")
        if run.stopped in (Stopped.RETURNED, Stopped.ANOTHER_CAUSE) and not yes:
            click.confirm(f"It stopped because jobs came back ({run.stopped}). Go on?", abort=True, err=True)
        replay_run.resume(connection, run)
        raise SystemExit(conclude(walk(connection, run, author, stage_timeout_s, [], as_json), as_json))


def walk(
    connection: PgConnection,
    run: Run,
    author: str,
    stage_timeout_s: float,
    left: Sequence[dict[str, Any]],
    as_json: bool,
) -> dict[str, Any]:
    """Walk through the run with a progress bar; what became of it."""
    if not as_json:
        click.echo(f"run {run.run_id}", err=True)
    try:
        with progress(as_json, run.terms.wait) as report:
            stopped = Walk(connection, run, author, stage_timeout_s, report).go()
    except KeyboardInterrupt:
        click.echo(f"Interrupted. Go on: deadsure quarantine replay --resume {run.run_id}", err=True)
        raise SystemExit(INTERRUPTED) from None
    except Exception:
        click.echo(f"What was done is kept. Go on: deadsure quarantine replay --resume {run.run_id}", err=True)
        raise
    return {
        "run_id": run.run_id,
        "counts": replay_run.counts(connection, run),
        "stopped": stopped,
        "left": [*left, *replay_run.of_note(connection, run, 1000)],
    }


def preview(connection: PgConnection, jobs: Sequence[tuple[UUID, int]], wish: Wish) -> Iterator[Preview]:
    """What would become of each job, writing nothing."""
    for job_id, episode in jobs:
        found = candidate.read(connection, job_id, episode)
        decision = consider(found, episode, wish)
        diff: list[str] = []
        if isinstance(decision, Replay) and decision.edited and found and found.job_type:
            diff = decision.edited.diff(found.job_type.payload)
        yield job_id, str(decision), diff, isinstance(decision, Leave)


def editable(
    connection: PgConnection, jobs: Sequence[tuple[UUID, int]], wish: Wish, left: list[dict[str, Any]], *, quiet: bool
) -> list[tuple[UUID, int]]:
    """The jobs that take the edit, with the first diffs shown; raises DeadsureError when none does."""
    taken, complaints = [], []
    for job_id, episode in jobs:
        found = candidate.read(connection, job_id, episode)
        decision = consider(found, episode, wish)
        if isinstance(decision, Leave) and decision.why is Why.INVALID:
            complaints.append(decision.detail)
            left.append({"job_id": str(job_id), "outcome": f"left: {decision}"})
            continue
        taken.append((job_id, episode))
        edited = isinstance(decision, Replay) and decision.edited
        if edited and found and found.job_type and not quiet and len(taken) <= DIFFS_SHOWN:
            click.echo(f"{job_id}", err=True)
            for line in edited.diff(found.job_type.payload):
                click.echo(f"    {line}", err=True)
    if complaints and not taken:
        raise DeadsureError(f"no payload was changed and nothing replayed: {complaints[0]}")
    return taken


@click.command("runs")
@click.option("--limit", type=click.IntRange(1, 10_000), default=20, show_default=True)
@json_option
@reporting_errors
def runs_command(limit: int, as_json: bool) -> None:
    """List replay runs, newest first: how far each came, and why it stopped."""
    with database() as connection:
        found = replay_run.newest(connection, limit)
    if as_json:
        print_json(found)
        return
    columns = (
        "run_id",
        "created_at",
        "fingerprint",
        "jobs",
        "to_come",
        "stopped_reason",
        "finished_at",
        "author",
        "reason",
    )
    print_table(f"{len(found)} replay runs", columns, [[run[name] for name in columns] for run in found])
