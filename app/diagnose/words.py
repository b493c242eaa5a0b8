"""What a rule says, and how it spells times and numbers."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86_400


@dataclass(frozen=True)
class Said:
    """A rule's conclusion: a sentence, one command to go on with, and whether something is wrong."""

    explanation: str
    next: str
    wrong: bool = True


@dataclass(frozen=True)
class Diagnosis:
    """The likely cause (the name of its rule) of the state that a job is in."""

    job_id: str
    state: str
    cause: str
    explanation: str
    next: str
    wrong: bool
    timeline: list[dict[str, Any]]


def span(seconds: float) -> str:
    """A duration for people."""
    seconds = abs(seconds)
    if seconds < MINUTE_S:
        return f"{seconds:.0f} s" if seconds >= 1 else f"{seconds:.1f} s"
    if seconds < HOUR_S:
        return f"{seconds / MINUTE_S:.0f} min"
    return f"{seconds / HOUR_S:.1f} h" if seconds < DAY_S else f"{seconds / DAY_S:.1f} d"


def moment(at: datetime | None) -> str:
    """A time of day in UTC, with its date."""
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC") if at else "never"


def many(count: int, noun: str, plural: str = "") -> str:
    """A number with its noun: 1 job, 2 jobs."""
    return f"{count} {noun}" if count == 1 else f"{count} {plural or noun + 's'}"
