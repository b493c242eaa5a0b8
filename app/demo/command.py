"""`deadsure demo`: the command line of the demo."""

from __future__ import annotations

from pathlib import Path

import click

from app.cli.output import json_option, print_json, reporting_errors
from app.demo.errors import DemoError

LEAST_JOBS = 20


@click.command("demo")
@click.option("--broker", type=click.Choice(("valkey", "rabbitmq")), default="valkey", show_default=True)
@click.option(
    "--jobs", type=click.IntRange(min=LEAST_JOBS), default=500, show_default=True, help="3 exports to 2 posts."
)
@click.option("--keep", is_flag=True, help="Leave the servers running, to look around.")
@click.option(
    "--root",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("var/demo"),
    show_default=True,
    help="Directory of the demo's servers, reports and logs.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=1),
    help="Seconds for all jobs together.  [default: 120, and 0.1 for each job]",
)
@json_option
@reporting_errors
def demo(*, broker: str, jobs: int, keep: bool, root: Path, timeout_s: float | None, as_json: bool) -> None:
    """Kill a worker in the middle of real jobs, and count what was lost or doubled.

    Starts private servers and a worker, submits report exports and ledger posts, ends the worker with `kill -9`
    when a third of them is done, and starts another. The last line is one JSON object; exit code 1 when a job was
    lost or done twice. DEADSURE_ settings of your shell apply.
    """
    try:
        import app.stack  # noqa: PLC0415  production installs come without the embedded servers
    except ImportError as error:
        raise DemoError(
            f"the demo needs the embedded servers ({error.name} is missing): pip install 'deadsure[embedded]'"
        ) from None
    from app.demo import report  # noqa: PLC0415
    from app.demo.interrupt import interruptible  # noqa: PLC0415
    from app.demo.play import play  # noqa: PLC0415
    from app.demo.screen import Screen  # noqa: PLC0415
    from app.demo.stage import Stage, servers  # noqa: PLC0415

    stage, screen = Stage(root.resolve(), broker), Screen()
    try:
        with interruptible(), servers(stage, screen, keep=keep):
            outcome = play(stage, screen, jobs, timeout_s)
            if not as_json:
                report.show(outcome, keep=keep)
    except app.stack.StackError as error:
        raise DemoError(str(error)) from None
    if not outcome.good:
        click.echo(f"Error: {report.complaint(outcome)}", err=True)
    print_json(outcome.summary())
    if not outcome.good:
        raise SystemExit(1)
