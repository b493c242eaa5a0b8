"""Payload of the periodic job `deadsure.prune`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class PruneJobs(BaseModel):
    """`for_s`: the run ends after so many seconds; what is left is for the next one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    for_s: float = Field(default=600, gt=0, le=1500)
