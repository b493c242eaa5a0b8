"""The export of what is pruned: JSON lines, one job each, durable before the delete commits.

The race: a crash between the write and the commit. The job is still there, so the next run writes it again: every
pruned job stands in the file at least once, and a reader tells repeats by `job_id`. A line that a crash cut off belongs
to a job that was not deleted; it is dropped when the file is opened again.

Payloads, results, cursors and patches are left out: an archive outlives the reasons for which they may be kept.
"""

from __future__ import annotations

import fcntl
import gzip
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from psycopg2.extensions import connection as PgConnection

from app.errors import DeadsureError
from db.session import rows

CHUNK = 1 << 20
EVENTS = """
    (SELECT coalesce(jsonb_agg(to_jsonb(noted) - 'job_id' ORDER BY event_id), '[]') FROM job_events noted
      WHERE noted.job_id = {job}.job_id)
"""
JOBS = f"""
SELECT jsonb_build_object(
    'job_id', job.job_id, 'pruned_at', clock_timestamp(),
    'job', to_jsonb(job) - 'job_id' - 'payload' - 'result' - 'checkpoint',
    'journal', {EVENTS.format(job="job")},
    'effects', (SELECT coalesce(jsonb_agg(to_jsonb(effect) - 'job_id' - 'result' ORDER BY name), '[]')
                  FROM effects effect WHERE effect.job_id = job.job_id),
    'quarantine', (SELECT coalesce(jsonb_agg(to_jsonb(entry) - 'job_id' ORDER BY episode), '[]')
                     FROM quarantine_entries entry WHERE entry.job_id = job.job_id),
    'actions', (SELECT coalesce(jsonb_agg(to_jsonb(act) - 'job_id' - 'old_payload' - 'new_payload'
                                ORDER BY action_id), '[]')
                  FROM quarantine_actions act WHERE act.job_id = job.job_id))::text
  FROM jobs job WHERE job_id = ANY(%(ids)s::uuid[])
"""
ORPHANS = f"""
SELECT jsonb_build_object('job_id', lone.job_id, 'pruned_at', clock_timestamp(), 'job', NULL,
                          'journal', {EVENTS.format(job="lone")})::text
  FROM unnest(%(ids)s::uuid[]) AS lone (job_id)
"""


class ArchiveError(DeadsureError):
    """Raised by `deadsure prune --export` for a file that cannot be written; nothing was deleted without its line."""


class Archive:
    """An export file, appended to by one process at a time; a name that ends in .gz is compressed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._zipped = path.suffix == ".gz"
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        """Open, lock, and drop what a crash cut off. Raises ArchiveError when it is in use or cannot be opened."""
        try:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            self._file = os.fdopen(handle, "r+b", buffering=0)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file.truncate(whole_members(self._file) if self._zipped else whole_lines(self._file))
            sync_directory(self.path)
        except BlockingIOError:
            self._close()
            raise ArchiveError(f"{self.path} is being written by another prune; name another file") from None
        except OSError as error:
            self._close()
            raise ArchiveError(f"{self.path} cannot be written: {error.strerror}") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def write(self, connection: PgConnection, ids: Sequence[str]) -> None:
        """Write the jobs with their journal, and wait until the disk has them. Raises ArchiveError."""
        self._append([row[0] for row in rows(connection, JOBS, {"ids": list(ids)})])

    def write_orphans(self, connection: PgConnection, ids: Sequence[str]) -> None:
        """Write the journal of ids that have no job any more, as `write` does."""
        self._append([row[0] for row in rows(connection, ORPHANS, {"ids": list(ids)})])

    def _append(self, lines: Sequence[str]) -> None:
        assert self._file is not None
        text = "".join(f"{line}\n" for line in lines).encode()
        left = memoryview(gzip.compress(text) if self._zipped else text)
        try:
            while left:
                left = left[self._file.write(left) or 0 :]
            os.fsync(self._file.fileno())
        except OSError as error:
            raise ArchiveError(f"{self.path} cannot be written: {error.strerror}") from None

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()


def whole_lines(file: BinaryIO) -> int:
    """Where the last whole line ends."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - CHUNK)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def whole_members(file: BinaryIO) -> int:
    """Where the last whole gzip member ends: each write is one."""
    file.seek(0)
    whole = place = 0
    member = zlib.decompressobj(wbits=31)
    while chunk := file.read(CHUNK):
        place += len(chunk)
        while chunk:
            try:
                member.decompress(chunk)
            except zlib.error:
                return whole
            chunk = member.unused_data
            if member.eof:
                whole = place - len(chunk)
                member = zlib.decompressobj(wbits=31)
    return whole


def sync_directory(path: Path) -> None:
    """Make a new file's name durable."""
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
