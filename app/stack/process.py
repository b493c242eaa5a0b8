"""Processes that outlive the command that started them, and are never mistaken for others.

A pid alone proves nothing: pids are reused. A process is known here by its pid *and* the moment it
started, written down when it is spawned and compared before every signal.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from app.stack.account import Account

POLL_S = 0.02

# Popen objects are kept so that a server we are the parent of is reaped, and never warned about.
_children: dict[int, subprocess.Popen[bytes]] = {}


class ProcessMark(NamedTuple):
    """One process incarnation: its pid and when it started."""

    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> "ProcessMark":
        """Return the mark of the process that has `pid` now. Raises psutil.NoSuchProcess."""
        return cls(pid, _start_of(pid))

    @property
    def alive(self) -> bool:
        """True while this very process runs; a zombie or a later owner of the pid is not it."""
        child = _children.get(self.pid)
        if child is not None and child.poll() is not None:
            return False
        try:
            process = psutil.Process(self.pid)
            if _start_of(self.pid) != self.started:
                return False
            # A zombie with threads left still holds its ports and files: it is not gone yet.
            return process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1
        except psutil.NoSuchProcess:
            return False

    def send(self, signal_number: int) -> None:
        """Signal this process if it still is the one that was marked; otherwise do nothing."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal_number)

    def descendants(self) -> list["ProcessMark"]:
        """Return the marks of all children and their children; empty when the process is gone."""
        if not self.alive:
            return []
        found = []
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    found.append(ProcessMark.of(child.pid))
        return found


def _start_of(pid: int) -> str:
    """Return what tells two owners of one pid apart, unmoved by changes of the wall clock."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        if Path("/proc/self/stat").exists():
            raise psutil.NoSuchProcess(pid) from None
        return f"{psutil.Process(pid).create_time():.2f}"  # macOS keeps the start itself
    # proc(5): start time is field 22; the second field, the name, may hold blanks and brackets.
    return f"{boot}:{stat.rpartition(')')[2].split()[19]}"


@dataclass(frozen=True, slots=True)
class Command:
    """What to run, where, as whom; output is appended to `log`."""

    argv: Sequence[str]
    cwd: Path
    env: Mapping[str, str]
    log: Path
    account: Account | None = None

    def spawn(self) -> ProcessMark:
        """Start it in a session of its own, so that Ctrl-C in our terminal does not reach it."""
        with self.log.open("ab") as log:
            child = subprocess.Popen(  # noqa: S603  argv is built here, never from outside
                list(self.argv),
                cwd=self.cwd,
                env=dict(self.env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                umask=0o077,
                user=self.account.uid if self.account else None,
                group=self.account.gid if self.account else None,
                extra_groups=[] if self.account else None,
            )
        _children[child.pid] = child
        return ProcessMark.of(child.pid)

    def run(self, timeout_s: float) -> str:
        """Run it to its end and return its output. Raises subprocess.SubprocessError."""
        done = subprocess.run(  # noqa: S603  argv is built here, never from outside
            list(self.argv),
            cwd=self.cwd,
            env=dict(self.env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            umask=0o077,
            user=self.account.uid if self.account else None,
            group=self.account.gid if self.account else None,
            extra_groups=[] if self.account else None,
            timeout=timeout_s,
            check=True,
            text=True,
        )
        return done.stdout


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Return True as soon as `condition` holds, False when it still does not after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True


def kill_and_wait(marks: Iterable[ProcessMark], timeout_s: float) -> bool:
    """SIGKILL every marked process that still runs; True when all are gone within `timeout_s`."""
    targets = [mark for mark in marks if mark.alive]
    for mark in targets:
        mark.send(signal.SIGKILL)
    return wait_until(lambda: not any(mark.alive for mark in targets), timeout_s)
