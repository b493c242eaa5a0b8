"""The console script `deadsure`: the commands come by entry point, so that this layer needs to know no other."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

import click

from app.errors import ConfigurationError


def main() -> None:
    """Run `deadsure`; a wrong environment ends in one line and exit code 1."""
    (found,) = entry_points(group="deadsure.commands", name="deadsure")
    try:
        command: click.Group = found.load()
    except KeyboardInterrupt:
        sys.exit(130)
    except ConfigurationError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(1)
    command(prog_name="deadsure")
