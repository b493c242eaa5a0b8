"""`deadsure jobs cancel`: give up jobs that wait, and ask running ones to stop."""

from __future__ import annotations

from collections import Counter
from uuid import UUID

import click

from app import quarantine
from app.cancel import Cancelled, cancel
from app.cli.output import json_option, print_json, reporting_errors
from app.cli.selection import author_option, given_ids, reason_option, yes_option
from app.cli.session import database
from app.states import State

LEFT = 3
DONE = (Cancelled.CANCELLED, Cancelled.REQUESTED)


@click.command("cancel")
@click.argument("targets", nargs=-1, required=True, metavar="[JOB_ID... | -]")
@author_option
@reason_option
@yes_option
@json_option
@reporting_errors
def cancel_jobs(targets: tuple[str, ...], author: str, reason: str, yes: bool, as_json: bool) -> None:
    """Cancel jobs: those named, or those on stdin (-: ids, or the JSON lines of a list).

    One that waits is cancelled at once; one that runs is asked, and cancelled when its handler looks, fails or ends its
    attempt otherwise. Quarantined jobs are decided about with `deadsure quarantine cancel`. Exit code 3 when some were
    left as they are.
    """
    job_ids = given_ids(targets)
    if not yes:
        click.confirm(f"Cancel {len(job_ids)} jobs for good?", abort=True, err=True)
    answers: list[tuple[UUID, str, bool]] = []
    with database() as connection:
        states = quarantine.chosen(connection, job_ids)
        for job_id in job_ids:
            if states.get(job_id, (0, ""))[1] == State.QUARANTINED:
                answers.append((job_id, f"quarantined: deadsure quarantine cancel {job_id}", False))
                continue
            answer = cancel(connection, job_id, reason=f"{author}: {reason}", author=author)
            answers.append((job_id, answer.value, answer in DONE))
    if as_json:
        print_json([{"job_id": job_id, "answer": told, "done": done} for job_id, told, done in answers])
    else:
        for job_id, told, done in answers:
            if not done:
                click.echo(f"{job_id}  {told}")
        for told, count in Counter(told for _, told, done in answers if done).items():
            click.echo(f"{count} {told}")
    if not all(done for _, _, done in answers):
        raise SystemExit(LEFT)
