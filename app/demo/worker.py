"""The demo's workers: ordinary `celery -A tasks worker` processes, one of which dies by `kill -9`."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from app.demo.errors import DemoError
from app.demo.interrupt import uninterrupted
from app.stack.process import Command, ProcessMark, kill_and_wait, wait_until

COMMAND = ("celery", "-A", "tasks", "worker", "-c", "2")
STOP_TIMEOUT_S = 15.0
GONE_TIMEOUT_S = 20.0
TAIL_LINES = 15


class Workers:
    """Starts one worker after another; `root` gets a log for each, and a note of the one that runs."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._number = 0
        self._mark: ProcessMark | None = None

    @property
    def log(self) -> Path:
        """The present worker's log."""
        return self._root / f"worker-{self._number}.log"

    @property
    def pid(self) -> int:
        """The main process of the present worker."""
        assert self._mark is not None
        return self._mark.pid

    def start(self) -> None:
        """Start the next worker in a session of its own."""
        self._number += 1
        self.log.unlink(missing_ok=True)
        command = Command([sys.executable, "-m", *COMMAND, "--loglevel", "INFO"], Path.cwd(), os.environ, self.log)
        with uninterrupted():
            self._mark = command.spawn()
            self._note.write_text(json.dumps(self._mark))

    def check(self) -> None:
        """Raise DemoError, with the end of its log, when the present worker has ended by itself."""
        if self._mark is None or not self._mark.alive:
            lines = self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
            raise DemoError(f"the worker ended by itself; the end of {self.log}:\n" + "\n".join(lines))

    def kill9(self) -> int:
        """SIGKILL main process and children in one stroke, as a power cut would; returns how many children died."""
        assert self._mark is not None
        return end(self._mark)

    def stop(self) -> None:
        """Let the present worker finish what it does and end."""
        if self._mark is not None and self._mark.alive:
            self._mark.send(signal.SIGTERM)
            wait_until(lambda: self._mark is None or not self._mark.alive, STOP_TIMEOUT_S)

    def close(self) -> None:
        """End what still runs; also the worker of a demo that was killed here before."""
        with suppress(FileNotFoundError, ValueError):
            end(ProcessMark(*json.loads(self._note.read_text())))
            self._note.unlink()

    @property
    def _note(self) -> Path:
        return self._root / "worker.json"


def end(mark: ProcessMark) -> int:
    """SIGKILL a worker's whole process group and wait; returns the number of its descendants."""
    family = mark.descendants()
    if mark.alive:
        with suppress(ProcessLookupError):
            os.killpg(mark.pid, signal.SIGKILL)  # it leads its group: `spawn` gave it a session
    if not kill_and_wait([mark, *family], GONE_TIMEOUT_S):
        raise DemoError(f"worker {mark.pid} survived SIGKILL for {GONE_TIMEOUT_S:g} s")
    return len(family)


@contextmanager
def workers(root: Path) -> Iterator[Workers]:
    """Workers that never outlive the block."""
    made = Workers(root)
    made.close()
    try:
        yield made
    finally:
        with uninterrupted():
            made.close()
