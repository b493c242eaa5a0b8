"""The journal's late writer, and the log.

Arrows write their journal rows in their own statement. What happens outside the database (published, acknowledged,
rejected, returned) is noted here and written in batches, with the age of each note, so that `at` is still the
database's time. Such notes may be lost with the process, and with the last moments of a crashed PostgreSQL
(`synchronous_commit` is off for them): they tell what happened, nothing depends on them.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import psycopg2
import structlog

from app.clock import boottime_s, pause_s
from db.session import connect, rows

log: structlog.stdlib.BoundLogger = structlog.get_logger("deadsure")

FLUSH_S = 0.1
FLUSH_ROWS = 1000
KEEP_ROWS = 100_000
INSERT = """
INSERT INTO job_events (job_id, at, event, attempt, copy, delivery_tag, redelivered, worker_id, reason)
SELECT job_id, clock_timestamp() - make_interval(secs => age_s), event, attempt, copy, delivery_tag, redelivered,
       worker_id, reason
  FROM unnest(%s::uuid[], %s::float8[], %s::text[], %s::bigint[], %s::bigint[], %s::text[], %s::bool[], %s::uuid[],
              %s::text[])
       AS note (job_id, age_s, event, attempt, copy, delivery_tag, redelivered, worker_id, reason)
"""


@dataclass(frozen=True, slots=True)
class Note:
    """One event of a delivery, with the local time at which it happened (`boottime_s`)."""

    job_id: UUID
    event: str
    at: float
    attempt: int | None = None
    copy: int | None = None
    delivery_tag: str | None = None
    redelivered: bool | None = None
    worker_id: UUID | None = None
    reason: str | None = None


class JournalWriter(threading.Thread):
    """Writes notes in batches from its own thread and session; `note` never blocks its caller."""

    def __init__(self, database_url: str) -> None:
        super().__init__(name="deadsure-journal", daemon=True)
        self._url = database_url
        self._notes: queue.SimpleQueue[Note | None] = queue.SimpleQueue()
        self._pending: list[Note] = []

    def note(self, job_id: UUID, event: str, **details: Any) -> None:
        """Remember one event that happened just now."""
        self._notes.put(Note(job_id, event, boottime_s(), **details))

    def run(self) -> None:
        """Write until `stop`; when the database is away, keep the newest `KEEP_ROWS` notes and try again."""
        connection, tries, going = None, 0, True
        while going or self._pending:
            going = self._collect(pause_s(tries) if tries else FLUSH_S) and going
            if not self._pending:
                continue
            try:
                if connection is None or connection.closed:
                    connection = connect(self._url, "deadsure journal", statement_timeout_s=10)
                    rows(connection, "SET synchronous_commit = off")
                self._write(connection)
                tries = 0
            except psycopg2.Error:
                tries += 1
                if connection is not None:
                    connection.close()
                del self._pending[:-KEEP_ROWS]
                if not going:
                    break
        if connection is not None:
            connection.close()

    def stop(self) -> None:
        """Write what is left and end the thread."""
        self._notes.put(None)
        if self.is_alive():
            self.join(timeout=10)

    def _collect(self, wait_s: float) -> bool:
        """Gather notes for up to `wait_s` after the first; False once `stop` was called."""
        try:
            note = self._notes.get(timeout=None if not self._pending else wait_s)
        except queue.Empty:
            return True
        if note is not None and self._notes.qsize() < FLUSH_ROWS:
            # One sleep for the whole batch: a wake-up for each note would cost the event loop its interpreter lock.
            time.sleep(wait_s)
        while note is not None:
            self._pending.append(note)
            try:
                note = self._notes.get_nowait()
            except queue.Empty:
                return True
        return False

    def _write(self, connection: Any) -> None:
        while self._pending:
            batch = self._pending[:FLUSH_ROWS]
            rows(connection, INSERT, columns(batch))
            del self._pending[: len(batch)]


def columns(notes: Sequence[Note]) -> list[list[Any]]:
    """The notes as the arrays that INSERT unnests."""
    now = boottime_s()
    return [
        [str(n.job_id) for n in notes],
        [max(0.0, now - n.at) for n in notes],
        [n.event for n in notes],
        [n.attempt for n in notes],
        [n.copy for n in notes],
        [n.delivery_tag for n in notes],
        [n.redelivered for n in notes],
        [str(n.worker_id) if n.worker_id else None for n in notes],
        [n.reason for n in notes],
    ]


def configure_logging(style: str, level: str | int) -> None:
    """Send structlog and the standard library's logging to stderr: JSON, or readable lines on a terminal."""
    readable = style == "console" or (style == "auto" and sys.stderr.isatty())
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: Any = (
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()) if readable else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                renderer,
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
