"""A real process behind the interface of docker-py's `Container`.

pytest-celery's containers wrap a docker-py object. Where no engine runs, `ProcessContainer` takes
that object's part, so the nodes above it stay the same. Signals go to the main process, as they do
in a container; what lives below it is its *group* (one session per container).
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from tests.nodes.waiting import WaitTimeoutError, wait_for

ROOT = Path(__file__).resolve().parents[2]
STOP_TIMEOUT_S = 10
Signal = str | int


def signal_number(which: Signal | None) -> signal.Signals:
    """Signal for "SIGTERM", "TERM" or 15; SIGKILL for None, as `docker kill` does."""
    if which is None:
        return signal.SIGKILL
    if isinstance(which, int):
        return signal.Signals(which)
    return signal.Signals["SIG" + which.upper().removeprefix("SIG")]


class ProcessContainer:
    """One command, run as a process of its own session, its output in a log file.

    The process starts at once. It is not reaped before `remove` or `restart`: a zombie keeps its
    number, so no signal of ours can reach a stranger that got the same one.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        name: str,
        environment: Mapping[str, str],
        log: Path,
        cwd: Path = ROOT,
    ) -> None:
        self.id = uuid.uuid4().hex
        self.name = name
        self.command = list(command)
        self.environment = dict(environment)
        self.cwd = cwd
        self.log = log
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._process: subprocess.Popen[bytes]
        self.start()

    def start(self) -> None:
        """Start the command; its log begins where the last run's ended."""
        with self.log.open("ab") as log:
            self.log_start = log.tell()
            self._process = self._spawn(log)
        self._paused = False

    def _spawn(self, log: BinaryIO) -> subprocess.Popen[bytes]:
        # Where Linux offers it, a node dies with the test run that started it, however that ends.
        setpriv = shutil.which("setpriv")
        return subprocess.Popen(
            [setpriv, "--pdeathsig", "KILL", *self.command] if setpriv else self.command,
            cwd=self.cwd,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Number of the main process; also of its group and session."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """How the main process ended, 128 + n after signal n; None while it lives."""
        code = self._process.returncode
        if code is None:
            seen = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if seen is None:
                return None
            killed = seen.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
            return 128 + seen.si_status if killed else seen.si_status
        return code if code >= 0 else 128 - code

    @property
    def status(self) -> str:
        """One of docker's words: "running", "paused" or "exited"."""
        if self.exit_code is not None:
            return "exited"
        return "paused" if self._paused else "running"

    @property
    def attrs(self) -> dict[str, Any]:
        """The part of `docker inspect` that pytest-docker-tools reads: no networks, no ports."""
        return {
            "Config": {
                "Cmd": self.command,
                "Env": [f"{key}={value}" for key, value in self.environment.items()],
            },
            "HostConfig": {"PortBindings": {}},
            "NetworkSettings": {"Networks": {}, "Ports": {}},
            "State": {"Status": self.status, "Pid": self.pid, "ExitCode": self.exit_code or 0},
        }

    def reload(self) -> None:
        """Nothing to fetch: every attribute is read when it is asked for."""

    def logs(self, *, since_start: bool = False) -> bytes:
        """Everything the command wrote, of this run alone with `since_start`."""
        with self.log.open("rb") as log:
            log.seek(self.log_start if since_start else 0)
            return log.read()

    def members(self) -> list[int]:
        """Living processes of the session, the main one first."""
        found = [pid for pid in psutil.pids() if self._is_member(pid)]
        return sorted(found, key=lambda pid: (pid != self.pid, pid))

    def _is_member(self, pid: int) -> bool:
        try:
            if os.getsid(pid) != self.pid:
                return False
            return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
        except (ProcessLookupError, psutil.NoSuchProcess):
            return False

    def top(self) -> dict[str, list[Any]]:
        """`docker top`, with the one column that tests use."""
        return {"Titles": ["PID"], "Processes": [[str(pid)] for pid in self.members()]}

    def kill(self, signal: Signal | None = None) -> None:
        """Send `signal` (SIGKILL when None) to the main process alone."""
        number = signal_number(signal)
        if self.exit_code is None:
            os.kill(self.pid, number)

    def kill_group(self, signal: Signal | None = None) -> None:
        """Send `signal` (SIGKILL when None) to all processes of the session at once."""
        number = signal_number(signal)
        if self._process.returncode is None:
            os.killpg(self.pid, number)

    def pause(self) -> None:
        """Freeze the whole group."""
        self.kill_group("SIGSTOP")
        self._paused = True

    def unpause(self) -> None:
        """Let the whole group go on."""
        self.kill_group("SIGCONT")
        self._paused = False

    def wait(self, timeout: float | None = None) -> dict[str, int]:
        """Wait for the end of the main process. Raises `WaitTimeoutError`."""
        limit_s = STOP_TIMEOUT_S if timeout is None else timeout
        wait_for(lambda: self.exit_code is not None, limit_s, f"{self.name} ends", poll_s=0.01)
        return {"StatusCode": self.exit_code or 0}

    def stop(self, timeout: float = STOP_TIMEOUT_S) -> None:
        """Ask with SIGTERM, then kill the whole group after `timeout` seconds."""
        self.unpause()
        self.kill("SIGTERM")
        try:
            self.wait(timeout)
        except WaitTimeoutError:
            self.kill_group("SIGKILL")
        self.remove()

    def restart(self, timeout: float = STOP_TIMEOUT_S) -> None:
        """Stop as `stop` does and start the same command again, under a new process number."""
        self.stop(timeout)
        self.start()

    def remove(self, *, force: bool = True) -> None:  # noqa: ARG002  always forced
        """Kill what is left of the group and reap the main process; may be called again."""
        if self._process.returncode is not None:
            return
        deadline = time.monotonic() + STOP_TIMEOUT_S
        self.kill_group("SIGKILL")
        self._process.wait(STOP_TIMEOUT_S)
        while left := self.members():
            assert time.monotonic() < deadline, f"{self.name}: processes {left} outlive SIGKILL"
            time.sleep(0.01)

    def exec_run(self, cmd: str | Sequence[str]) -> tuple[int, bytes]:
        """Run another command in the same directory and environment: (exit code, output)."""
        argv = shlex.split(cmd) if isinstance(cmd, str) else list(cmd)
        done = subprocess.run(
            argv,
            cwd=self.cwd,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        return done.returncode, done.stdout
