"""`deadsure quarantine`: the worklist for people and scripts. Payloads are printed with their secrets hidden."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID

import click
from psycopg2.extensions import connection as PgConnection

from app import letters, quarantine
from app.cancel import cancel_quarantined
from app.candidate import read
from app.cli.output import json_option, plain, print_events, print_fields, print_json, print_table, reporting_errors
from app.cli.replay import replay_command, runs_command
from app.cli.selection import author_option, given_ids, narrowing, reason_option, select, yes_option
from app.cli.session import database
from app.errors import DeadsureError
from app.json_text import to_json
from app.quarantine import Filters
from app.replay import Decider
from app.settle import settle

LEFT = 3  # exit code: some of the jobs were left as they are
BODY_SHOWN = 4000
GROUP_SHOWN = ("fingerprint", "count", "first_seen", "last_seen", "types", "causes", "sample_reason", "sample_job_id")
ENTRY_SHOWN = ("job_id", "type", "scope", "cause", "reason", "attempt", "quarantined_at")


@click.group("quarantine")
def quarantine_group() -> None:
    """The worklist: what failed for good, why, and what to do about it."""


@quarantine_group.command("list")
@narrowing
@click.option("--jobs", "each", is_flag=True, help="One line for each job instead of each group.")
@click.option("--unreadable", is_flag=True, help="Dead letters that belong to no job.")
@click.option("--limit", type=click.IntRange(1, 100_000), default=50, show_default=True)
@json_option
@reporting_errors
def list_command(each: bool, unreadable: bool, limit: int, as_json: bool, **narrow: Any) -> None:
    """List what is in quarantine: groups by fingerprint, or with --fingerprint or --jobs the jobs themselves."""
    filters = Filters(**narrow)
    with database() as connection:
        if unreadable:
            found = letters.without_job(connection, limit)
            title = "dead letters without a job"
            columns: tuple[str, ...] = ("dead_letter_id", "received_at", "reason", "size", "source")
        elif each or filters.fingerprint:
            found = quarantine.entries(connection, filters, limit)
            title, columns = "quarantined jobs", ENTRY_SHOWN
        else:
            found = quarantine.groups(connection, filters, limit)
            title, columns = "groups in quarantine", GROUP_SHOWN
    if as_json:
        print_json(found)
        return
    cells = [[", ".join(v) if isinstance(v := entry[name], list) else v for name in columns] for entry in found]
    print_table(f"{len(found)} {title}", columns, cells)


@quarantine_group.command("show")
@click.argument("target", metavar="JOB_ID|LETTER")
@click.option("--body", is_flag=True, help="Of a dead letter: its body too, as it came. It may hold secrets.")
@json_option
@reporting_errors
def show_command(target: str, body: bool, as_json: bool) -> None:
    """Show one job: history, attempts, ledger, dead letters, traceback, payload; or one dead letter by its number."""
    if target.isdecimal():
        show_letter(int(target), body, as_json)
        return
    (job_id,) = given_ids([target])
    with database() as connection:
        found = quarantine.show(connection, job_id)
    if found is None:
        raise click.ClickException(f"there is no job {job_id}; `deadsure quarantine list --jobs` shows them")
    if as_json:
        print_json(found)
        return
    parts = {name: found.pop(name) for name in ("entries", "attempts", "effects", "actions", "dead_letters", "journal")}
    debt, payload = found.pop("debt"), found.pop("payload")
    print_fields({name: value for name, value in found.items() if value not in (None, "", False)})
    for entry in parts["entries"]:
        click.echo(f"\nquarantine {entry['episode']}")
        print_fields({name: value for name, value in entry.items() if name not in ("episode", "traceback")})
        for frame in entry["traceback"] or ():
            click.echo(f"    {frame}")
    click.echo("\npayload")
    click.echo(json.dumps(payload, indent=2, ensure_ascii=False))
    for name in ("attempts", "effects", "actions", "dead_letters"):
        if parts[name]:
            click.echo(f"\n{name}")
        for line in parts[name]:
            click.echo("  " + json.dumps({k: v for k, v in line.items() if v is not None}, default=plain))
    if debt:
        click.echo()
        print_fields({f"debt.{name}": value for name, value in debt.items()})
    click.echo("\njournal (UTC)")
    print_events(parts["journal"])


def show_letter(number: int, body: bool, as_json: bool) -> None:
    """Print one dead letter."""
    with database() as connection:
        found = letters.letter(connection, number)
        raw = letters.body(connection, number) if body else None
    if found is None:
        raise click.ClickException(f"there is no dead letter {number}; see `deadsure quarantine list --unreadable`")
    if raw is not None:
        found["body"] = raw[:BODY_SHOWN].decode("utf-8", "backslashreplace")
    if as_json:
        print_json(found)
    else:
        print_fields(found)


@quarantine_group.command("note")
@click.argument("job_id", type=click.UUID)
@click.argument("text")
@author_option
@json_option
@reporting_errors
def note_command(job_id: UUID, text: str, author: str, as_json: bool) -> None:
    """Add a note to a job's newest quarantine."""
    with database() as connection:
        if not quarantine.note(connection, job_id, author, text):
            raise click.ClickException(f"job {job_id} never was in quarantine")
    if as_json:
        print_json({"job_id": job_id, "noted": True})
    else:
        click.echo("Noted.")


@quarantine_group.command("settle")
@click.argument("job_id", type=click.UUID)
@click.option("--evidence", required=True, help="What proves that the effect is done; recorded. No secrets here.")
@click.option("--result-key", help="The proof of the effect; `job:JOB_ID` by default.")
@click.option("--result", help="What the handler would have returned, as JSON.")
@author_option
@json_option
@reporting_errors
def settle_command(
    job_id: UUID, evidence: str, result_key: str | None, result: str | None, author: str, as_json: bool
) -> None:
    """Close a quarantined job as succeeded: its effect is proven done."""
    text = None
    if result is not None:
        try:
            text = to_json(json.loads(result))
        except ValueError as error:
            raise click.BadParameter(f"no JSON: {error}", param_hint="--result") from None
    with database() as connection:
        episode = in_quarantine(connection, job_id)
        if not settle(connection, job_id, episode, Decider(author, evidence), result_key, text):
            raise DeadsureError(f"job {job_id}: somebody else decided about it meanwhile")
    if as_json:
        print_json({"job_id": job_id, "state": "succeeded"})
    else:
        click.echo(f"{job_id} is closed as succeeded.")


def in_quarantine(connection: PgConnection, job_id: UUID) -> int:
    """The episode of a quarantined job; raises DeadsureError for any other."""
    jobs, left = select(connection, [job_id], None)
    if left:
        raise DeadsureError(f"job {job_id} is {left[0]['outcome'].removeprefix('left: ')}")
    return jobs[0][1]


@quarantine_group.command("cancel")
@click.argument("targets", nargs=-1, metavar="[JOB_ID... | -]")
@narrowing
@author_option
@reason_option
@yes_option
@json_option
@reporting_errors
def cancel_command(targets: tuple[str, ...], author: str, reason: str, yes: bool, as_json: bool, **narrow: Any) -> None:
    """Give up quarantined jobs: those named, those on stdin (-), or a group. Exit code 3 when some were left."""
    filters = Filters(**narrow)
    if bool(targets) == (filters != Filters()):
        raise click.UsageError("name jobs, or a group with --fingerprint or another filter")
    with database() as connection:
        jobs, left = select(connection, given_ids(targets), None if targets else filters)
        if jobs and not yes:
            click.confirm(f"Cancel {len(jobs)} jobs for good?", abort=True, err=True)
        cancelled = 0
        for job_id, episode in jobs:
            if cancel_quarantined(connection, job_id, episode, author, reason):
                cancelled += 1
            else:
                now = read(connection, job_id, episode)
                left.append({"job_id": str(job_id), "outcome": f"left: {now.decided or now.state if now else 'gone'}"})
    if as_json:
        print_json({"cancelled": cancelled, "left": left})
    else:
        click.echo(f"{cancelled} cancelled, {len(left)} left.")
        for entry in left:
            click.echo(f"  {entry['job_id']}  {entry['outcome']}")
    if left:
        raise SystemExit(LEFT)


@quarantine_group.command("dismiss")
@click.argument("letter", type=int)
@author_option
@reason_option
@json_option
@reporting_errors
def dismiss_command(letter: int, author: str, reason: str, as_json: bool) -> None:
    """Take a dead letter that belongs to no job off the list; it stays stored."""
    with database() as connection:
        if not letters.dismiss(connection, letter, author, reason):
            raise click.ClickException(f"there is no dead letter {letter} to dismiss: it has a job, or is dismissed")
    if as_json:
        print_json({"dead_letter_id": letter, "dismissed": True})
    else:
        click.echo("Dismissed.")


@quarantine_group.command("export")
@narrowing
@click.option("--limit", type=click.IntRange(min=1), help="At most so many, oldest first.")
@click.option("--json", "as_json", is_flag=True, help="One JSON array instead of JSON lines.")
@reporting_errors
def export_command(limit: int | None, as_json: bool, **narrow: Any) -> None:
    """Print quarantined jobs as JSON lines, oldest first, secrets hidden."""
    with database() as connection:
        found = quarantine.export(connection, Filters(**narrow), limit)
        if as_json:
            print_json(list(found))
            return
        for entry in found:
            print_json(entry)


quarantine_group.add_command(replay_command)
quarantine_group.add_command(runs_command)
