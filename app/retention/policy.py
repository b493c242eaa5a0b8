"""How long what is kept; `never` keeps it for good."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from app.ages import Age
from app.settings import Settings

NEVER = Age("never")


@dataclass(frozen=True)
class Retention:
    """Ages counted from a job's end, a dead letter's arrival, a run's begin, a batch's or worker's end, a pruning.

    `quarantined` is for jobs whose entries somebody has closed without an end; open entries are work, and stay.
    """

    succeeded: Age = NEVER
    cancelled: Age = NEVER
    quarantined: Age = NEVER
    journal: Age = NEVER
    dead_letters: Age = NEVER
    replay_runs: Age = NEVER
    batches: Age = NEVER
    workers: Age = NEVER
    tombstones: Age = NEVER
    keyless: Age = NEVER

    @classmethod
    def of(cls, settings: Settings) -> Retention:
        """From DEADSURE_RETENTION_*."""
        named = {f.name: f"retention_{f.name}" for f in fields(cls)}
        return cls(**{name: getattr(settings, name_) for name, name_ in named.items() if hasattr(settings, name_)})

    @property
    def soonest(self) -> Age:
        """The shortest age of a job."""
        return min(self.succeeded, self.cancelled, self.quarantined)

    def parameters(self) -> dict[str, Any]:
        """The ages in seconds for SQL, None for never."""
        return {f"{f.name}_s": getattr(self, f.name).seconds for f in fields(self)}
