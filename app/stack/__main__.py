"""Command line of the private servers: `python -m app.stack up|down|status|env|...`."""

import json
import shlex
from pathlib import Path

import click

from app.stack.errors import StackError
from app.stack.install import ensure_promtool, ensure_rabbitmq
from app.stack.stack import Stack, destroy_abandoned

SERVERS = ("postgres", "rabbitmq", "valkey")

root_option = click.option(
    "--root",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("var/stack"),
    show_default=True,
    help="Directory of the stack.",
)
only_option = click.option(
    "--only",
    type=click.Choice(SERVERS),
    multiple=True,
    help="This server alone; may be repeated. Default: all.",
)


def _stack(root: Path, only: tuple[str, ...]) -> Stack:
    chosen = only or SERVERS
    return Stack(
        root,
        rabbitmq="rabbitmq" in chosen,
        postgres="postgres" in chosen,
        valkey="valkey" in chosen,
    )


@click.group()
def main() -> None:
    """Private PostgreSQL, RabbitMQ and Valkey on 127.0.0.1, for development and tests."""


@main.command()
@root_option
@only_option
def up(root: Path, only: tuple[str, ...]) -> None:
    """Start what does not run yet, and wait until it answers."""
    stack = _stack(root, only)
    stack.up()
    for server in stack.servers:
        click.echo(f"{server.name}: running on 127.0.0.1:{server.port}, pid {server.pid}")


@main.command()
@root_option
@only_option
def down(root: Path, only: tuple[str, ...]) -> None:
    """Stop what this stack started; data stays."""
    _stack(root, only).down()
    click.echo("stopped: " + ", ".join(only or SERVERS))


@main.command()
@root_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of lines.")
def status(root: Path, *, as_json: bool) -> None:
    """Say which servers of the stack run."""
    servers = _stack(root, ()).servers
    if as_json:
        click.echo(json.dumps({server.name: {"pid": server.pid} for server in servers}))
        return
    for server in servers:
        where = f"running on 127.0.0.1:{server.port}, pid {server.pid}" if server.running else "stopped"
        click.echo(f"{server.name}: {where}")


@main.command()
@root_option
@only_option
def env(root: Path, only: tuple[str, ...]) -> None:
    """Print the environment variables of the stack as lines a shell can source."""
    for name, value in _stack(root, only).env().items():
        click.echo(f"export {name}={shlex.quote(value)}")


@main.command()
@root_option
def destroy(root: Path) -> None:
    """Stop the stack and delete all its data, and temporary stacks beside it that a kill left."""
    _stack(root, ()).destroy()
    for abandoned in destroy_abandoned(root.resolve().parent):
        click.echo(f"deleted {abandoned}, left behind by a killed test run")


@main.command("install-rabbitmq")
def install_rabbitmq() -> None:
    """Install RabbitMQ with apt or Homebrew unless it is there."""
    ensure_rabbitmq()


@main.command("install-promtool")
def install_promtool() -> None:
    """Install promtool, which tests the alert rules, with apt or Homebrew unless it is there."""
    ensure_promtool()


if __name__ == "__main__":
    try:
        main(prog_name="python -m app.stack")
    except StackError as error:
        raise SystemExit(f"error: {error}") from error
