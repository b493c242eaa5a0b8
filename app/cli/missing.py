"""`deadsure submit TYPE --missing`: the jobs that a type expects and that nobody has submitted."""

from __future__ import annotations

import click
from psycopg2.extensions import connection as PgConnection

from app import expected
from app.cli.output import print_json
from app.job_types import JobType
from app.settings import settings


def submit_missing(connection: PgConnection, job_type: JobType, *, yes: bool, as_json: bool) -> None:
    """Count, ask, submit; exits with 1 when some have no payload to submit."""
    if job_type.expected is None:
        raise click.ClickException(f"{job_type.name} does not say what it expects: give it expected=")
    url = settings().need_database()
    count = sum(1 for _ in expected.missing(connection, url, job_type, expected.Missing()))
    if count and not yes:
        click.confirm(f"Submit {count} missing jobs of {job_type.name}?", abort=True, err=True)
    submitted, skipped = expected.submit_missing(connection, url, job_type) if count else (0, 0)
    if as_json:
        print_json({"missing": count, "submitted": submitted, "without_payload": skipped})
    else:
        click.echo(f"{submitted} of {count} missing jobs of {job_type.name} submitted.")
    if skipped:
        raise click.ClickException(f"{skipped} have no payload: let {job_type.name}'s expected= yield it")
