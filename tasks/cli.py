"""The console script: the domain's commands, and those that need the broker."""

from __future__ import annotations

import sys

import click

from app.errors import ConfigurationError


def main() -> None:
    """Run `deadsure`; a wrong environment ends in one line."""
    try:
        from tasks.commands import deadsure  # noqa: PLC0415  # importing reads the settings
    except ConfigurationError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(1)
    deadsure(prog_name="deadsure")


if __name__ == "__main__":
    main()
