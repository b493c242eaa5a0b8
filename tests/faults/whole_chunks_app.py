"""`tests.faults.jobs_coalesced` where the jobs of one delivery share one commit, however slow the machine is."""

from __future__ import annotations

from app import coalesced
from app.coalesced import CHUNK_JOBS, Pace
from tests.faults.jobs_coalesced import app

__all__ = ["app"]

coalesced.CHUNK_S = 60.0
coalesced._paces["tests.packed"] = Pace(CHUNK_JOBS)
