"""`deadsure seed`: accounts and orders to work on."""

from __future__ import annotations

import dataclasses
import json
import time

import click

from app.domain import seed as seeding
from app.settings import settings
from db.session import engine


@click.command()
@click.option("--accounts", type=click.IntRange(min=0), default=200, show_default=True)
@click.option("--orders", type=click.IntRange(min=0), default=20_000, show_default=True)
@click.option("--rng-seed", type=int, default=1, show_default=True, help="Another number, other rows.")
@click.option(
    "--month",
    "months",
    multiple=True,
    metavar="YYYY-MM",
    help="Month to put orders in; repeat it for more. Default: the last 12 whole months.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def seed(*, accounts: int, orders: int, rng_seed: int, months: tuple[str, ...], as_json: bool) -> None:
    """Fill the database up to a size; what is there already counts, so a repeat adds nothing."""
    started = time.monotonic()
    try:
        with engine(settings().need_database()).begin() as connection:
            done = seeding.seed(connection, accounts, orders, rng_seed, months=months or None)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    took_s = time.monotonic() - started
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(done) | {"took_s": round(took_s, 3)}))
        return
    if done.accounts_added or done.orders_added:
        added = f"{done.accounts_added:,} accounts and {done.orders_added:,} orders"
        click.echo(f"Added {added} in {took_s:.1f} s.")
    else:
        click.echo("Nothing to add.")
    span = f", from {done.months[0]} to {done.months[-1]}" if done.months else ""
    click.echo(f"There are {done.accounts:,} accounts and {done.orders:,} orders{span}.")
