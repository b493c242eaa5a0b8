"""Both traces of a quarantine: the entry beside the row, and the message that came back as a dead letter."""

from __future__ import annotations

from collections.abc import Iterable
from uuid import UUID

from sqlalchemy import Engine, text

from tests.faults.conftest import Court
from tests.faults.judge import Case
from tests.nodes.waiting import wait_for

TRACED = """
SELECT entry.cause, entry.episode
  FROM quarantine_entries entry
 WHERE entry.job_id = :job_id AND dead_lettered_at IS NOT NULL
   AND EXISTS (SELECT FROM dead_letters letter
                WHERE letter.job_id = entry.job_id AND letter.episode = entry.episode)
 ORDER BY episode
"""
ENTRIES = "SELECT cause, episode FROM quarantine_entries WHERE job_id = :job_id ORDER BY episode"


def entries(engine: Engine, job_id: UUID | str, *, traced: bool = False) -> list[tuple[str, int]]:
    """(cause, episode) of each quarantine of a job; only those with both traces if `traced`."""
    with engine.connect() as connection:
        found = connection.execute(text(TRACED if traced else ENTRIES), {"job_id": UUID(str(job_id))})
        return [(row[0], row[1]) for row in found]


def wait_quarantined(court: Court, job_ids: Iterable[UUID | str], cause: str, *, episode: int = 1) -> dict[UUID, Case]:
    """Wait until each job is quarantined for `cause` with both traces, and no other entry; the cases."""
    found = {}
    for job_id in job_ids:
        case = court.wait_case(job_id, lambda case: case.state == "quarantined", "is quarantined")
        wait_for(
            lambda job_id=job_id: (cause, episode) in entries(court.engine, job_id, traced=True),  # type: ignore[misc]
            60,
            f"{job_id}: both traces of {cause}; entries: {entries(court.engine, job_id)}",
        )
        assert len(entries(court.engine, job_id)) == episode
        found[case.job_id] = case
    return found
