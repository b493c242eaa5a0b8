"""Workers, relays and clients of one system, each in a session of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from bench.servers import Site
from bench.systems import System

OURS = ("DEADSURE_", "DATABASE_URL", "BROKER_URL", "RABBITMQ_", "REDIS_URL", "BENCH_")
STOP_TIMEOUT_S = 15.0
CLIENT_TIMEOUT_S = 300.0


class Programs:
    """The processes of one system at `site`; their output goes to a log in `directory`."""

    def __init__(self, system: System, site: Site, directory: Path) -> None:
        self.system = system
        self.ends = directory / f"{system.name}.ends"
        self.log = directory / f"{system.name}.log"
        self._worker: subprocess.Popen[bytes] | None = None
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(OURS)}
        self._environment: Mapping[str, str] = {
            **inherited,
            "DATABASE_URL": site.database_url,
            "BROKER_URL": site.broker_url,
            "BENCH_ENDS": str(self.ends),
        }

    @property
    def worker_pid(self) -> int | None:
        """Main process of the running worker."""
        return self._worker.pid if self._worker else None

    def client(self, phase: str, *numbers: float) -> dict[str, Any]:
        """Run `bench.client` to its end: its answer."""
        argv = [sys.executable, "-m", "bench.client", self.system.name, phase, *map(str, numbers)]
        done = subprocess.run(
            argv, env=self._environment, capture_output=True, text=True, timeout=CLIENT_TIMEOUT_S, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(argv[2:])}: {done.stderr[-2000:]}")
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer

    def start_worker(self) -> None:
        """`celery worker -c 2`, two jobs at once."""
        options = ["-A", self.system.module, "worker", "-P", "prefork", "-c", "2", "-l", "WARNING"]
        self._worker = self._start([sys.executable, "-m", "celery", *options])

    def start_relay(self) -> subprocess.Popen[bytes]:
        """`deadsure relay`, knowing the benchmark's job types."""
        code = f"import {self.system.module}; from tasks.commands import deadsure; deadsure(['relay'])"
        return self._start([sys.executable, "-c", code])

    def stop_worker(self) -> None:
        """SIGTERM; SIGKILL for all of it when it does not end in time."""
        if self._worker is None:
            return
        self._worker.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._worker.wait(STOP_TIMEOUT_S)
        self.kill_worker()

    def kill_worker(self) -> None:
        """SIGKILL main process and children at once, as a power cut would."""
        if self._worker is None:
            return
        family = []
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(self._worker.pid).children(recursive=True)
        if self._worker.poll() is None:
            self._worker.kill()
        for child in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self._worker.wait()
        self._worker = None

    def _start(self, argv: Sequence[str]) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                argv, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )


def stop(program: subprocess.Popen[bytes]) -> None:
    """SIGTERM and wait."""
    program.send_signal(signal.SIGTERM)
    try:
        program.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        program.kill()
        program.wait()
