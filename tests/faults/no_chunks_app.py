"""`tests.faults.jobs_coalesced` where no two jobs share a commit, however quick they are."""

from __future__ import annotations

from app import coalesced
from tests.faults.jobs_coalesced import app

__all__ = ["app"]

coalesced.CHUNK_S = 0.0
