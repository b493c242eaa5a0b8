"""What `deadsure doctor` finds in the database: waiting work that nobody can do, traces that are missing."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from psycopg2.extensions import connection as PgConnection

from db.session import one, rows

UNKNOWN_TYPES = """
SELECT type, schema_version, count(*) FROM jobs
 WHERE state IN ('queued', 'retry_wait', 'running')
 GROUP BY type, schema_version ORDER BY type, schema_version
"""
MISSING_TRACES = """
SELECT count(*) FROM quarantine_entries entry JOIN jobs USING (job_id, episode)
 WHERE state = 'quarantined' AND dead_lettered_at IS NULL AND closed_at IS NULL
   AND quarantined_at < clock_timestamp() - make_interval(secs => %(age_s)s)
"""
LIVE_WORKERS = """
SELECT count(*) FROM workers WHERE stopped_at IS NULL AND lost_at IS NULL AND lease_until > clock_timestamp()
"""
OVERDUE = """
SELECT count(*) FROM outbox
 WHERE sends = 0 AND kind = 'wake' AND due_at < clock_timestamp() - make_interval(secs => %(age_s)s)
"""


class Severity(StrEnum):
    """How bad it is; an error makes `deadsure doctor` exit with 1."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """One thing looked at, what was found, and what to do about it."""

    severity: Severity
    what: str
    next_step: str = ""


def unknown_types(connection: PgConnection, known: Collection[tuple[str, int]]) -> list[Finding]:
    """Jobs that wait or run and that the installed code cannot handle: look before a deploy."""
    found = [
        Finding(
            Severity.ERROR,
            f"{count} jobs of {name} version {version} wait, and this code does not know it",
            "deploy code that knows it beside this one, or let them finish first",
        )
        for name, version, count in rows(connection, UNKNOWN_TYPES)
        if (name, version) not in known
    ]
    return found or [Finding(Severity.OK, "every waiting job is known to this code")]


def traces(connection: PgConnection, age_s: float) -> Finding:
    """Quarantined jobs whose dead letter did not arrive within `age_s`."""
    row = one(connection, MISSING_TRACES, {"age_s": age_s})
    count = row[0] if row else 0
    if count:
        return Finding(
            Severity.ERROR,
            f"{count} quarantined jobs lack their dead letter",
            "is a worker or `deadsure relay` running, and the dead-letter exchange bound to the queue quarantine?",
        )
    return Finding(Severity.OK, "every quarantined job has its dead letter")


def progress(connection: PgConnection, age_s: float) -> list[Finding]:
    """Whether anybody works: live leases, and debts that nobody sends."""
    live, late = one(connection, LIVE_WORKERS), one(connection, OVERDUE, {"age_s": age_s})
    workers, overdue = (live[0] if live else 0), (late[0] if late else 0)
    findings = [Finding(Severity.OK if workers else Severity.WARNING, f"{workers} workers hold a lease")]
    if overdue:
        findings.append(
            Finding(
                Severity.WARNING,
                f"{overdue} jobs are due for more than {age_s:g} s and were not sent",
                "the window is full, or no relay runs: start a worker or `deadsure relay`",
            )
        )
    return findings
