"""The two traces of a quarantined job: its row, and the message that came through the dead-letter exchange."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import Engine, text

from tests.faults.conftest import Court
from tests.faults.judge import Case
from tests.nodes.waiting import wait_for

ENTRY = """
SELECT entry.cause, entry.reason, entry.attempt, dead_lettered_at IS NOT NULL AND dead_lettered_at >= quarantined_at,
       (SELECT count(*) FROM dead_letters letter WHERE letter.job_id = entry.job_id AND letter.episode = entry.episode),
       (SELECT array_agg(DISTINCT source) FROM dead_letters letter WHERE letter.job_id = entry.job_id)
  FROM quarantine_entries entry JOIN jobs USING (job_id, episode) WHERE job_id = :job_id
"""
CALLS = "SELECT name, status, attempt FROM effects WHERE job_id = :job_id ORDER BY name"


@dataclass(frozen=True)
class Traces:
    """The entry of the present episode, and what came through the broker for it."""

    cause: str
    reason: str
    attempt: int
    stamped: bool
    letters: int
    sources: list[str] | None


def wait_both_traces(court: Court, job_id: UUID) -> Traces:
    """Wait until the job is quarantined and its dead letter stored; asserts that nothing of it is owed any more."""
    case = court.wait_case(job_id, lambda case: case.state == "quarantined" and not case.has_debt, "has both traces")
    with court.engine.connect() as connection:
        traces = Traces(*connection.execute(text(ENTRY), {"job_id": job_id}).one())
    assert (traces.stamped, traces.letters, traces.sources) == (True, 1, ["broker"])
    words = [event.event for event in case.journal]
    assert words.index("quarantined") < words.index("dead_lettered")
    return traces


def calls(engine: Engine, job_id: UUID) -> list[tuple[str, str, int]]:
    """(name, status, attempt) of the job's external calls."""
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(text(CALLS), {"job_id": job_id})]


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
