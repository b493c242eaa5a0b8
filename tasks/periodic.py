"""`deadsure periodic`: the schedule as beat reads it, and how far each entry is."""

from __future__ import annotations

import click
from psycopg2.extensions import connection as PgConnection

from app.cli.main import database
from app.cli.output import json_option, print_json, print_table, reporting_errors
from app.periodic import Entry
from db.session import rows
from tasks.application import app
from tasks.schedule import read

LAST = "SELECT name, schedule, last_tick FROM periodic_ticks"
NOW = "SELECT clock_timestamp()"
COLUMNS = ("entry", "type", "schedule", "catch_up", "last_tick", "next_tick")


@click.command("periodic")
@json_option
@reporting_errors
def periodic(as_json: bool) -> None:
    """List the entries of beat_schedule that are durable jobs; exit code 1 when an entry is wrong."""
    schedule = read(app)
    with database() as connection:
        listed = described(connection, schedule.durable)
    if as_json:
        print_json({"entries": listed, "wrong": schedule.wrong, "plain": list(schedule.plain)})
    else:
        print_table("periodic jobs (UTC)", COLUMNS, [list(entry.values()) for entry in listed])
        for name, why in schedule.wrong.items():
            click.echo(f"left out: entry {name!r}: {why}", err=True)
    if schedule.wrong:
        raise SystemExit(1)


def described(connection: PgConnection, entries: list[Entry]) -> list[dict[str, object]]:
    """Each entry with its last tick (None before beat has seen it) and the next one."""
    ((now,),) = rows(connection, NOW)
    last = {(name, schedule): tick for name, schedule, tick in rows(connection, LAST)}
    return [
        {
            "entry": entry.name,
            "type": entry.job_type.name,
            "schedule": entry.schedule,
            "catch_up": entry.catch_up.value,
            "last_tick": last.get((entry.name, entry.schedule)),
            "next_tick": entry.ticks.after(now),
        }
        for entry in entries
    ]
