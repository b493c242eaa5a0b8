"""Medians, spreads and ratios of the repetitions, as JSON and as a table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.systems import BASELINE, SYSTEMS

Repetition = Mapping[str, Any]
# What is reported, from which phase, and whether more is better.
FIGURES: dict[str, tuple[str, str]] = {
    "submit_per_s": ("submit", "rate"),
    "bulk_per_s": ("bulk", "rate"),
    "drain_per_s": ("drain", "rate"),
    "drain_window_per_s": ("drain_window", "rate"),
    "p50_ms": ("light", "p50_ms"),
    "p99_ms": ("light", "p99_ms"),
}
RATIOS = {
    "submit_per_s": "submit_per_s",
    "drain_per_s": "drain_per_s",
    "drain_window_per_s": "drain_per_s",
    "p50_ms": "p50_ms",
    "p99_ms": "p99_ms",
    "recovery_s": "recovery_s",
}


def figures(repetition: Repetition) -> dict[str, float]:
    """The reported figures of one repetition; those of a broken one are not there."""
    found = {name: repetition[phase][key] for name, (phase, key) in FIGURES.items() if phase in repetition}
    if "seconds" in repetition.get("recovery", {}):
        found["recovery_s"] = repetition["recovery"]["seconds"]
    return found


def summary(repetitions: Sequence[Repetition]) -> dict[str, Any]:
    """One system: medians under the names of the table, the spread, and CPU per job with what was busiest."""
    each = [figures(repetition) for repetition in repetitions]
    found: dict[str, Any] = {}
    spread: dict[str, list[float]] = {}
    for name in [*FIGURES, "recovery_s"]:
        values = [one[name] for one in each if name in one]
        if not values:
            continue
        spread[name] = [round(min(values), 3), round(max(values), 3)]
        if name == "recovery_s":
            found["recovery_p50_s"] = round(statistics.median(values), 3)
            found["recovery_p99_s"] = round(max(values), 3)
        else:
            found[name] = round(statistics.median(values), 3)
    found["spread"] = spread
    found["foreign_cores"] = max(
        (phase["foreign_cores"] for one in repetitions for phase in one.values() if "foreign_cores" in phase),
        default=0.0,
    )
    found["cpu_ms_per_job"] = {
        phase: medians([one[phase]["cpu_ms"] for one in repetitions if phase in one])
        for phase in ("submit", "bulk", "drain", "drain_window", "light")
        if any(phase in one for one in repetitions)
    }
    drains = [one["drain"] for one in repetitions if "drain" in one]
    if drains:
        found["busiest_in_drain"] = drains[len(drains) // 2]["busiest"]
        found["drain_per_job"] = medians(
            [{key: one[key] for key in ("wal_bytes_per_job", "commits_per_job")} for one in drains]
        )
    broken = [one["broken"] for one in repetitions if "broken" in one]
    if broken:
        found["broken"] = broken
    return found


def medians(entries: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Key by key."""
    names = {name: None for entry in entries for name in entry}
    return {name: round(statistics.median(entry.get(name, 0.0) for entry in entries), 3) for name in names}


def ratios(runs: Mapping[str, Sequence[Repetition]]) -> dict[str, Any]:
    """`system / baseline`: each figure per repetition and its median."""
    found: dict[str, Any] = {}
    for name, repetitions in runs.items():
        if name == BASELINE:
            continue
        pairs = [
            (figures(ours), figures(theirs)) for ours, theirs in zip(repetitions, runs.get(BASELINE, []), strict=False)
        ]
        rows: dict[str, Any] = {}
        for figure, against in RATIOS.items():
            values = [
                round(ours[figure] / theirs[against], 3)
                for ours, theirs in pairs
                if figure in ours and against in theirs
            ]
            if values:
                rows[figure] = {"median": round(statistics.median(values), 3), "runs": values}
        found[f"{name} / {BASELINE}"] = rows
    return found


def table(results: Mapping[str, Any]) -> str:
    """The results as Markdown."""
    whole: Callable[[float], str] = lambda value: f"{value:,.0f}"  # noqa: E731
    tenth: Callable[[float], str] = lambda value: f"{value:.1f}"  # noqa: E731
    columns: list[tuple[str, str, Callable[[float], str]]] = [
        ("submit/s", "submit_per_s", whole),
        ("bulk/s", "bulk_per_s", whole),
        ("drain/s", "drain_per_s", whole),
        ("drain/s, window full", "drain_window_per_s", whole),
        ("p50 ms", "p50_ms", tenth),
        ("p99 ms", "p99_ms", tenth),
        ("recovery s", "recovery_p50_s", tenth),
    ]
    lines = [
        "| system | " + " | ".join(title for title, _, _ in columns) + " | CPU ms a job in drain |",
        "|---" * (len(columns) + 2) + "|",
    ]
    for name, system in results["systems"].items():
        cells = []
        for _, key, form in columns:
            low, high = system["spread"].get(key.replace("_p50", ""), (0.0, 0.0))
            cells.append(f"{form(system[key])} ({form(low)}-{form(high)})" if key in system else "-")
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {processor(system)} |")
    lines += ["", "| ratio, median (each repetition) | " + " | ".join(RATIOS) + " |", "|---" * (len(RATIOS) + 1) + "|"]
    for name, rows in results["ratios"].items():
        cells = [
            f"{rows[figure]['median']:.2f} ({', '.join(f'{value:.2f}' for value in rows[figure]['runs'])})"
            if figure in rows
            else "-"
            for figure in RATIOS
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    for name, system in results["systems"].items():
        lines += [f"\nBROKEN {name}: {reason}" for reason in system.get("broken", [])]
    return "\n".join(lines)


def processor(system: Mapping[str, Any]) -> str:
    """CPU of a drained job by group, and the busiest process."""
    groups = system["cpu_ms_per_job"].get("drain")
    if not groups:
        return "-"
    parts = {
        "main": groups.get("worker", 0.0),
        "children": groups.get("worker children", 0.0),
        "pg": groups.get("postgres", 0.0) + groups.get("postgres children", 0.0),
        "rabbit": groups.get("rabbitmq", 0.0) + groups.get("rabbitmq children", 0.0),
    }
    label, cores = system["busiest_in_drain"][0]
    listed = ", ".join(f"{name} {value:.2f}" for name, value in parts.items())
    return f"{listed}; foreign {groups.get('foreign', 0.0):.2f}; busiest: {label} {cores:.2f} cores"


assert BASELINE in SYSTEMS
