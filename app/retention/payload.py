"""Payload of the periodic job `deadsure.prune`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class PruneJobs(BaseModel):
    """`run_s`: after so many seconds the job gives its place to others, and goes on from its cursor when it is free."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_s: float = Field(default=60, gt=0, le=600)
