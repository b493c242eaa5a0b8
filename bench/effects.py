"""What a benchmark job does, and where: one row in an append-only table.

The table has no unique key, so that a job that ran twice shows as two rows. `note_ends` writes down when each job's
work was committed, as the process that committed it saw it: the row's own time lies before its commit.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from celery import signals

CREATE_TABLES = """
CREATE TABLE bench_effects (n bigint NOT NULL, at timestamptz NOT NULL DEFAULT clock_timestamp());
CREATE TABLE bench_starts (n bigint NOT NULL, at timestamptz NOT NULL DEFAULT clock_timestamp());
"""
EFFECT = "INSERT INTO bench_effects (n) VALUES (%s)"
START = "INSERT INTO bench_starts (n) VALUES (%s) RETURNING (SELECT count(*) FROM bench_starts WHERE n = %s)"
SLEEP_S = 2.0
STEADY_FIRST = 10_000_000  # the first job of light load
WARM_UP = -1  # the job that connects a client or a worker before the clock starts

_notes: dict[int, int] = {}


def first_start(connection: Any, n: int) -> bool:
    """Record on `connection` (autocommit) that job `n` started; whether it is the first time."""
    with connection.cursor() as cursor:
        cursor.execute(START, (n, n))
        return bool(cursor.fetchone()[0] == 0)


def note_ends(path: Path) -> None:
    """In a worker: append `task id, time` to `path` after each task, in one write per line."""

    @signals.task_postrun.connect(weak=False)
    def note(task_id: str = "", **_: Any) -> None:
        now, pid = time.time(), os.getpid()
        if pid not in _notes:
            _notes[pid] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(_notes[pid], f"{task_id} {now:.6f}\n".encode())


def read_ends(path: Path) -> dict[str, float]:
    """When each task id first ended, in seconds since the epoch."""
    found: dict[str, float] = {}
    for line in path.read_text().splitlines():
        task_id, at = line.split()
        found.setdefault(task_id, float(at))
    return found
