"""`deadsure`: the group and its read-and-write commands on the database."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID

import click

from app import story, submit
from app.cli.cancel import cancel_jobs
from app.cli.missing import submit_missing
from app.cli.output import Seconds, json_option, print_events, print_fields, print_json, print_table, reporting_errors
from app.cli.quarantine import quarantine_group
from app.cli.session import database
from app.domain.cli import seed
from app.job_types import find
from app.settings import Settings, settings
from app.settings_reference import markdown
from app.states import State
from db.migrate import upgrade


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="deadsure")
def deadsure() -> None:
    """Background jobs that finish once."""


@deadsure.group("db")
def database_group() -> None:
    """The schema."""


@database_group.command("upgrade")
@json_option
@reporting_errors
def db_upgrade(as_json: bool) -> None:
    """Bring the schema to this release; workers of the previous one keep running meanwhile."""
    before, after = upgrade(settings().need_database())
    if as_json:
        print_json({"before": before, "after": after})
    elif before == after:
        click.echo(f"The schema is at {after:04d} already.")
    else:
        click.echo(f"The schema went from {before:04d} to {after:04d}.")


@deadsure.command("submit")
@click.argument("job_type", metavar="TYPE")
@click.option("--payload", help="The payload as a JSON object.")
@click.option("--key", help="Idempotency key: the same key and payload give the same job.")
@click.option("--scope", default="", help="Business boundary of the key, for instance an account.")
@click.option("--countdown", type=Seconds(), help="Seconds before it may start.")
@click.option("--priority", type=click.IntRange(0, 9), help="9 is first.")
@click.option("--missing", is_flag=True, help="Instead: every job that the type expects and that does not exist.")
@click.option("--yes", is_flag=True, help="With --missing: do not ask.")
@json_option
@reporting_errors
def submit_job(
    job_type: str,
    payload: str | None,
    key: str | None,
    scope: str,
    countdown: float | None,
    priority: int | None,
    missing: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Submit one job of TYPE, or with --missing those that `deadsure doctor` misses."""
    if missing:
        if payload is not None or key is not None or scope or countdown is not None or priority is not None:
            raise click.UsageError("--missing takes keys, scopes and payloads from the type's expected=")
        with database() as connection:
            submit_missing(connection, find(job_type), yes=yes, as_json=as_json)
        return
    if payload is None:
        raise click.UsageError("give --payload, or --missing")
    try:
        fields = json.loads(payload)
    except ValueError as error:
        raise click.BadParameter(f"no JSON: {error}", param_hint="--payload") from None
    if not isinstance(fields, dict):
        raise click.BadParameter("must be a JSON object", param_hint="--payload")
    found = find(job_type)
    job = submit.prepare(
        found,
        found.parse(fields),
        idempotency_key=key,
        scope=scope,
        countdown_s=countdown,
        priority=priority,
    )
    answer = submit.alone(job)
    if as_json:
        print_json({"job_id": answer.job_id, "created": answer.created, "state": answer.state})
    elif answer.created:
        click.echo(f"{answer.job_id} submitted. Follow it: deadsure show {answer.job_id}")
    else:
        click.echo(f"{answer.job_id} was there already, it is {answer.state}.")


@deadsure.command("show")
@click.argument("job_id", type=click.UUID)
@json_option
@reporting_errors
def show_job(job_id: UUID, as_json: bool) -> None:
    """Tell the story of one job: its row, its debt, its journal."""
    with database() as connection:
        found = story.show(connection, job_id)
    if found is None:
        raise click.ClickException(f"there is no job {job_id}; `deadsure jobs list` shows the newest")
    if as_json:
        print_json(found)
        return
    journal, debt = found.pop("journal"), found.pop("debt")
    if "pruned_at" in found:
        click.echo(f"pruned on {found['pruned_at']:%Y-%m-%d}: only its end and its key are kept")
    print_fields({k: v for k, v in found.items() if v not in (None, "", False)})
    if debt:
        click.echo()
        print_fields({f"debt.{k}": v for k, v in debt.items()})
    if journal:
        click.echo()
        click.echo("journal (UTC)")
        print_events(journal)


@deadsure.group("jobs")
def jobs_group() -> None:
    """Many jobs."""


@jobs_group.command("list")
@click.option("--state", type=click.Choice([s.value for s in State]))
@click.option("--type", "job_type", help="Only this job type.")
@click.option("--older", "older_s", type=Seconds(), default=0.0, help="At least SECONDS old.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True)
@json_option
@reporting_errors
def jobs_list(state: str | None, job_type: str | None, older_s: float, limit: int, as_json: bool) -> None:
    """List jobs, newest first."""
    with database() as connection:
        found = story.list_jobs(connection, state, job_type, older_s, limit)
    if as_json:
        print_json(found)
    else:
        print_table(f"{len(found)} jobs", story.LIST_COLUMNS, [list(job.values()) for job in found])


@deadsure.command("settings")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print docs/configuration.md.")
@json_option
@reporting_errors
def show_settings(as_markdown: bool, as_json: bool) -> None:
    """List every setting: environment variable, default, what it is."""
    if as_markdown:
        click.echo(markdown(), nl=False)
        return
    known: list[Any] = [list(entry) for entry in Settings.describe()]
    if as_json:
        print_json([dict(zip(("name", "default", "doc"), entry, strict=True)) for entry in known])
    else:
        print_table("settings", ("variable", "default", "what it is"), known)


jobs_group.add_command(cancel_jobs)

deadsure.add_command(quarantine_group)

deadsure.add_command(seed)

__all__ = ["database", "deadsure"]
