"""`deadsure diagnose JOB_ID`: the likely cause of a job's state, and the next command."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any
from uuid import UUID

import click

from app.cli.main import database
from app.cli.output import json_option, print_events, print_json, reporting_errors
from app.diagnose import UNKNOWN, diagnose
from app.diagnose.facts import Facts
from app.diagnose.reading import queue_of, read
from app.diagnose.words import Diagnosis
from app.settings import settings
from tasks.broker_facts import broker_facts

EXIT_WRONG, EXIT_UNKNOWN = 3, 4
IN_TIMELINE = ("settings", "events", "asked", "older_events")


@click.command("diagnose")
@click.argument("job_id", type=click.UUID)
@json_option
@reporting_errors
def diagnose_job(job_id: UUID, as_json: bool) -> None:
    """Name the likely cause of a job's state, and the next command.

    Looks at database and broker and changes nothing. Exit code 0: it runs, waits its turn, or has ended as wanted; 3:
    something is wrong; 4: there is no such job; 1: the database does not answer.
    """
    facts, found = examine(job_id)
    if as_json:
        print_json(
            {
                "job_id": found.job_id,
                "state": found.state,
                "cause": found.cause,
                "explanation": found.explanation,
                "next": found.next,
                "evidence": evidence(facts),
                "timeline": found.timeline,
            }
        )
    else:
        print_diagnosis(facts, found)
    if found.wrong:
        raise SystemExit(EXIT_UNKNOWN if found.state == UNKNOWN else EXIT_WRONG)


def examine(job_id: UUID) -> tuple[Facts, Diagnosis]:
    """Ask the broker, then the database: what the message has done meanwhile is in the row already."""
    with database() as connection:
        queue = queue_of(connection, job_id)
        broker = broker_facts(settings(), queue) if queue is not None else None
        facts = read(connection, job_id, settings(), broker)
    return facts, diagnose(facts)


def evidence(facts: Facts) -> dict[str, Any]:
    """What the cause was concluded from; the events are in the timeline."""
    return {name: value for name, value in asdict(facts).items() if name not in IN_TIMELINE}


def print_diagnosis(facts: Facts, found: Diagnosis) -> None:
    """For people: what, why, what next, and the story."""
    kind = f"{facts.job.versioned}, " if facts.job else ""
    click.echo(f"{found.job_id}  {kind}{found.state}")
    click.echo(f"\ncause  {found.cause}\n\n{found.explanation}\n\nnext   {found.next}")
    if found.timeline:
        click.echo("\ntimeline (UTC)")
        print_events(found.timeline)
