"""`python -m bench`: Deadsure beside plain Celery on private servers; a table, and `bench/results.json`.

Systems take turns phase by phase, so that noise of the machine meets all alike; nothing is asserted by time.
"""

from __future__ import annotations

import json
import platform
import shutil
import signal
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import psutil

from app.stack import temporary_stack
from bench import report
from bench.phases import PHASES, Figures, Run, Sizes
from bench.programs import Programs
from bench.servers import Servers
from bench.systems import SYSTEMS

ROOT = Path("var/bench")
PACKAGES = ("celery", "kombu", "amqp", "psycopg2-binary", "sqlalchemy", "pydantic")


@click.command()
@click.option("--quick", is_flag=True, help="Fewer jobs, one repetition, no recovery: within three minutes.")
@click.option("--reps", type=click.IntRange(1), help="Repetitions of every phase.  [default: 3, quick: 1]")
@click.option("--jobs", type=click.IntRange(100), help="Jobs of a drain.  [default: 5000, quick: 3000]")
@click.option("--only", multiple=True, type=click.Choice(list(SYSTEMS)), help="This system alone; may be repeated.")
@click.option("--no-recovery", is_flag=True, help="Leave out the kills.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), default=Path("bench/results.json"))
def main(
    *, quick: bool, reps: int | None, jobs: int | None, only: tuple[str, ...], no_recovery: bool, output: Path
) -> None:
    """Measure on private servers; ends with 1 when a run did not have exactly one effect per job."""
    for number in (signal.SIGINT, signal.SIGTERM):  # either way the servers are stopped
        signal.signal(number, signal.default_int_handler)
    sizes = Sizes(jobs or (3000 if quick else 5000), 8 if quick else 20)
    reps = reps or (1 if quick else 3)
    names = only or tuple(SYSTEMS)
    logs = ROOT / "logs"
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    phases = [name for name in PHASES if name != "recovery" or not (quick or no_recovery)]
    runs: dict[str, list[Figures]] = {name: [] for name in names}
    with temporary_stack(ROOT, valkey=False) as stack:
        servers = Servers(stack)
        sites = {name: servers.site(name) for name in names}
        about = {"machine": machine(), "versions": {**servers.versions(), **packages()}}
        for repetition in range(1, reps + 1):
            systems = {
                name: Run(Programs(SYSTEMS[name], sites[name], logs.resolve()), sites[name], sizes) for name in names
            }
            for phase in phases:
                for run in systems.values():
                    run.phase(phase)
            for name, run in systems.items():
                runs[name].append(run.figures)
                click.echo(f"{time.strftime('%H:%M:%S')} {repetition}/{reps} {name}: {line(run.figures)}", err=True)
            results = combine(about, runs, sizes)
            output.write_text(json.dumps(results, indent=1) + "\n")
    print(report.table(results))
    print(f"\n{machine()}\n{about['versions']}\nwritten to {output}")
    sys.exit(any("broken" in system for system in results["systems"].values()))


def combine(about: dict[str, Any], runs: dict[str, list[Figures]], sizes: Sizes) -> dict[str, Any]:
    """The content of results.json."""
    return {
        **about,
        "jobs": sizes.jobs,
        "settings": {name: SYSTEMS[name].settings for name in runs},
        "systems": {name: report.summary(found) for name, found in runs.items() if found},
        "ratios": report.ratios(runs),
        "runs": runs,
    }


def line(found: Figures) -> str:
    """One repetition in one line."""
    values = " ".join(f"{name}={value:.4g}" for name, value in report.figures(found).items())
    foreign = max((phase["foreign_cores"] for phase in found.values() if "foreign_cores" in phase), default=0.0)
    noise = f" (others used up to {foreign:.1f} cores)" if foreign > 0.2 else ""
    return f"{values}{noise} BROKEN {found['broken']}" if "broken" in found else values + noise


def machine() -> str:
    """Processors, memory, system and date."""
    memory = psutil.virtual_memory().total / 2**30
    return (
        f"{psutil.cpu_count()} cores, {memory:.0f} GiB, {platform.system()} {platform.machine()}, "
        f"Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}"
    )


def packages() -> dict[str, str]:
    """Versions of what is compared and of what carries it."""
    return {name: version(name) for name in PACKAGES}


if __name__ == "__main__":
    main()
