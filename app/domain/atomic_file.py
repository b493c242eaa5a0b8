"""A file that is there in full or not at all, however the writer dies.

Bytes go to `.{stem}.{random}.tmp` in the target's own directory, are fsynced, and get their final name by one
rename. The writer holds a flock on its temporary for as long as it lives, so the next attempt can tell the
temporaries of dead attempts (removed) from that of a slow one (left alone) without a clock.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

BUFFER_BYTES = 1 << 20


class HashedFile:
    """Write end of an atomic file; `size` in bytes and `sha256` are those of everything written so far."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self.size = 0

    @property
    def sha256(self) -> str:
        """Hex digest."""
        return self._hash.hexdigest()

    def write(self, data: bytes) -> int:
        """Append `data`; raises OSError when the disk is full."""
        self._hash.update(data)
        self.size += len(data)
        return self._file.write(data)


@contextmanager
def atomic_file(target: Path, before_publish: Callable[[], None] | None = None) -> Iterator[HashedFile]:
    """Yield a file that becomes `target`, in place of what was there, when the block ends without exception.

    `before_publish` runs when all bytes are on disk and nothing is visible yet; what it raises abandons the
    file. No temporary stays behind unless the process is killed; the next attempt removes that one.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(target)
    temporary, descriptor = create_temporary(target)
    try:
        with os.fdopen(descriptor, "wb", buffering=BUFFER_BYTES) as file:
            yield HashedFile(file)
            file.flush()
            os.fsync(descriptor)
            if before_publish is not None:
                before_publish()
            temporary.replace(target)
            sync_directory(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


def create_temporary(target: Path) -> tuple[Path, int]:
    """A new locked temporary for `target`, as path and open descriptor."""
    while True:
        path = target.with_name(f".{target.stem}.{secrets.token_hex(8)}.tmp")
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return path, descriptor
        os.close(descriptor)  # another attempt took it for abandoned between creation and lock


def remove_abandoned(target: Path) -> None:
    """Remove the temporaries of `target` whose writers are dead."""
    with os.scandir(target.parent) as entries:
        paths = [
            Path(entry.path)
            for entry in entries
            if entry.name.startswith(f".{target.stem}.") and entry.name.endswith(".tmp")
        ]
    for path in paths:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except BlockingIOError:
            continue  # its writer lives
        finally:
            os.close(descriptor)


def sync_directory(directory: Path) -> None:
    """Make a rename in `directory` survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
