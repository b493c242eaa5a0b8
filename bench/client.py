"""The submitting process: `python -m bench.client SYSTEM submit N | bulk N | steady RATE SECONDS | sleepy N`.

Prints one JSON object as its last line. It runs apart from the harness so that its CPU time is its own.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from typing import Any

from bench.effects import STEADY_FIRST, WARM_UP
from bench.systems import SYSTEMS


def submit(tasks: dict[str, Any], count: int) -> dict[str, Any]:
    """`count` calls of delay, one after the other."""
    task = tasks["effect"]
    task.delay(n=WARM_UP)
    started, cpu = time.perf_counter(), time.process_time()
    for n in range(count):
        task.delay(n=n)
    return {"secs": time.perf_counter() - started, "cpu_s": time.process_time() - cpu}


def bulk(tasks: dict[str, Any], count: int) -> dict[str, Any]:
    """`count` jobs in one transaction (Deadsure)."""
    from sqlalchemy.orm import Session  # noqa: PLC0415  # plain Celery's client must not load it

    from app.settings import settings  # noqa: PLC0415
    from db.session import engine  # noqa: PLC0415

    task, made = tasks["effect"], engine(settings().need_database())
    with Session(made) as session, session.begin():
        task.submit_many(session, [{"n": WARM_UP}])
    started, cpu = time.perf_counter(), time.process_time()
    with Session(made) as session, session.begin():
        task.submit_many(session, [{"n": n} for n in range(count)])
    return {"secs": time.perf_counter() - started, "cpu_s": time.process_time() - cpu}


def steady(tasks: dict[str, Any], rate: float, seconds: float) -> dict[str, Any]:
    """`rate` jobs a second: (task id, time before delay, length of the call) of each."""
    task, count = tasks["effect"], int(rate * seconds)
    task.delay(n=WARM_UP)
    calls, begin = [], time.time() + 0.3
    for i in range(count):
        if (wait := begin + i / rate - time.time()) > 0:
            time.sleep(wait)
        before = time.time()
        answer = task.delay(n=STEADY_FIRST + i)
        calls.append((str(answer.id), before, time.time() - before))
    return {"calls": calls}


def sleepy(tasks: dict[str, Any], n: int) -> dict[str, Any]:
    """One job of two seconds."""
    tasks["sleepy"].delay(n=n)
    return {}


def main(system: str, phase: str, *numbers: str) -> None:
    """Run one phase against one system."""
    tasks = import_module(SYSTEMS[system].module).TASKS[SYSTEMS[system].tasks]
    match phase:
        case "submit":
            answer = submit(tasks, int(numbers[0]))
        case "bulk":
            answer = bulk(tasks, int(numbers[0]))
        case "steady":
            answer = steady(tasks, float(numbers[0]), float(numbers[1]))
        case "sleepy":
            answer = sleepy(tasks, int(numbers[0]))
        case _:
            raise SystemExit(f"no phase {phase!r}")
    print(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
