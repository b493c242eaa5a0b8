"""CPU time by group of processes, to see what bounds a figure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Usage:
    """CPU seconds so far: by group, by process (with its group), and of the whole machine."""

    groups: Mapping[str, float]
    processes: Mapping[int, tuple[str, float]]
    machine: float


def usage(roots: Mapping[str, int | None]) -> Usage:
    """Usage of the process trees below `roots`; `NAME children` holds the children of root `NAME`."""
    groups: dict[str, float] = {}
    processes: dict[int, tuple[str, float]] = {}
    for name, pid in roots.items():
        if pid is None:
            continue
        try:
            main = psutil.Process(pid)
            times = main.cpu_times()
            family = main.children(recursive=True)
        except psutil.NoSuchProcess:
            continue
        groups[name] = times.user + times.system
        groups[f"{name} children"] = times.children_user + times.children_system
        processes[pid] = (name, groups[name])
        for child in family:
            try:
                own = child.cpu_times()
            except psutil.NoSuchProcess:
                continue
            groups[f"{name} children"] += own.user + own.system
            processes[child.pid] = (f"{name} child", own.user + own.system)
    whole = psutil.cpu_times()
    return Usage(groups, processes, sum(whole[:8]) - whole.idle - getattr(whole, "iowait", 0.0))


def spent(before: Usage, after: Usage) -> dict[str, float]:
    """CPU seconds by group between two looks; `foreign` is what none of the groups used."""
    found = {name: round(value - before.groups.get(name, 0.0), 3) for name, value in after.groups.items()}
    found["foreign"] = round(after.machine - before.machine - sum(found.values()), 3)
    return found


def busiest(before: Usage, after: Usage, seconds: float) -> list[tuple[str, float]]:
    """The three busiest processes as (group, cores)."""
    cores = [
        (label, round((value - before.processes.get(pid, ("", 0.0))[1]) / seconds, 2))
        for pid, (label, value) in after.processes.items()
    ]
    return sorted(cores, key=lambda entry: -entry[1])[:3]
