"""`deadsure doctor`: what is wrong or missing in database, broker and configuration, and what to do about it."""

from __future__ import annotations

from contextlib import closing

import click
import psycopg2
from psycopg2.extensions import connection as PgConnection

from app.checks.everything import DATABASE, PRE_DEPLOY
from app.checks.finding import Finding, Look, Severity, error, info, name_of, ok, run, unchecked
from app.cli.output import json_option, print_json, print_table, reporting_errors
from app.errors import ConfigurationError
from app.job_types import REGISTRY
from app.journal import configure_logging
from app.repair import forget_orphans, repair
from app.settings import settings
from db.migrate import SchemaError, check
from db.session import connect
from tasks.application import app
from tasks.checks.broker import check_broker

STATEMENT_TIMEOUT_S = 60
WORST_FIRST = (Severity.ERROR, Severity.WARNING, Severity.INFO, Severity.OK)


@click.command("doctor")
@click.option("--pre-deploy", is_flag=True, help="Only: waiting jobs that the installed code cannot handle.")
@click.option("--fix", is_flag=True, help="First create debts that are missing, and delete those of no job; journaled.")
@click.option("--strict", is_flag=True, help="Warnings count as errors.")
@json_option
@reporting_errors
def doctor(pre_deploy: bool, fix: bool, strict: bool, as_json: bool) -> None:
    """Look for what is wrong or missing in database, broker and configuration.

    It changes nothing, but for --fix. Exit code: 0 nothing is wrong (warnings may be), 1 errors (or warnings, with
    --strict), 2 no errors, but something could not be checked. Each finding has a code that stays the same for scripts.
    """
    if pre_deploy and fix:
        raise click.UsageError("--pre-deploy only looks at waiting types; run --fix by itself")
    configure_logging(settings().log, "ERROR")  # to stderr; the intake of the probe would log into the answer
    found = examine(pre_deploy=pre_deploy, fix=fix)
    if as_json:
        print_json([as_record(finding) for finding in found])
    else:
        columns = ("severity", "code", "what", "next step")
        ordered = sorted(found, key=lambda finding: WORST_FIRST.index(finding.severity))
        print_table("doctor", columns, [(f.severity, f.code, f.what, f.next_step) for f in ordered])
    if code := exit_code(found, strict=strict):
        raise SystemExit(code)


def as_record(finding: Finding) -> dict[str, object]:
    """A finding for scripts."""
    return {
        "severity": finding.severity,
        "code": finding.code,
        "what": finding.what,
        "next_step": finding.next_step,
        "checked": finding.checked,
    }


def exit_code(found: list[Finding], *, strict: bool) -> int:
    """0: nothing is wrong; 1: errors; 2: something could not be checked."""
    wrong = {Severity.ERROR, Severity.WARNING} if strict else {Severity.ERROR}
    if any(finding.severity in wrong and finding.checked for finding in found):
        return 1
    return 0 if all(finding.checked for finding in found) else 2


def examine(*, pre_deploy: bool, fix: bool) -> list[Finding]:
    """All findings; a server that is away is one of them, and what the other can tell is told."""
    try:
        connection = connect(settings().need_database(), "deadsure cli", statement_timeout_s=STATEMENT_TIMEOUT_S)
    except psycopg2.OperationalError as away:
        step = "is the server of DATABASE_URL up? host, port, user, password"
        what = f"the database does not answer ({type(away).__name__})"
        gone = Finding(Severity.ERROR, "database.unreachable", what, step, checked=False)
        return [gone] if pre_deploy else [gone, *broker(None)]
    with closing(connection):
        try:
            check(connection)
        except SchemaError as wrong:
            return [error("database.schema", str(wrong), "deadsure db upgrade, or install the fitting release")]
        look = Look(connection, settings(), REGISTRY)
        if pre_deploy:
            return run(PRE_DEPLOY, look)
        found = [ok("database.schema", "the schema fits this release")]
        if fix:
            found += mend(connection)
        return [*found, *run(DATABASE, look), *broker(connection)]


def broker(database: PgConnection | None) -> list[Finding]:
    """What the broker tells, under the configuration of the installed application."""
    try:
        settings().need_broker()
    except ConfigurationError as wrong:
        return [error("broker.url", str(wrong), "set BROKER_URL")]
    conf = app.conf
    return check_broker(settings(), REGISTRY, database, conf.broker_transport_options, conf.worker_concurrency)


def mend(connection: PgConnection) -> list[Finding]:
    """Create what is missing and delete what nobody needs, until nothing is left; each job is journaled.

    Safe beside workers at any moment: no arrow leaves a job without its debt, not even for a moment.
    """
    mended: list[str] = []
    try:
        while page := repair(connection, age_s=0.0):
            mended += page
        orphans = forget_orphans(connection)
    except psycopg2.Error as failed:  # a standby, or a role that may only read
        what = f"nothing more could be mended ({name_of(failed)}); {len(mended)} debts were created"
        return [unchecked("unchecked.fix", what, "may the role of DATABASE_URL write, and is it the primary?")]
    what = f"{len(mended)} missing debts were created, {len(orphans)} that nobody needs were deleted"
    return [info("doctor.fixed", what, f"deadsure show {(mended or orphans)[0]}" if mended or orphans else "")]
