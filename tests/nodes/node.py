"""pytest-celery nodes with the faults that tests inject from outside.

A node does not care what its container stands on: a `ProcessContainer`, or docker-py's own where an
engine runs. Differences: in a container the end of the main process ends the rest at once, and a
group cannot be signalled apart from it.
"""

from __future__ import annotations

import os
import signal
import socket
from typing import Any

import celery
from pytest_celery import CeleryTestContainer, CeleryTestNode, CeleryTestWorker, CeleryWorkerCluster
from pytest_celery.vendors.worker.container import CeleryWorkerContainer
from pytest_docker_tools.exceptions import ContainerFailed

from tests.nodes.process import STOP_TIMEOUT_S, ProcessContainer, Signal
from tests.nodes.waiting import wait_for

READY_TIMEOUT_S = 60


class NodeContainer(CeleryTestContainer):
    """A container of ours: ready when `ready_prompt` is in the log of its current run."""

    def __init__(self, container: Any, ready_prompt: str | None = None) -> None:
        super().__init__(container)
        self._prompt = ready_prompt

    @property
    def ready_prompt(self) -> str | None:
        return self._prompt

    @property
    def celeryconfig(self) -> dict[str, Any]:
        return {}

    @property
    def raw(self) -> Any:
        """The object that pytest-docker-tools wraps: `ProcessContainer` or docker-py's."""
        return self._container

    def teardown(self) -> None:
        """Kill what is left and free it."""
        self.raw.remove(force=True)

    def current_logs(self) -> str:
        """Log of the run that goes on; of all runs when the container cannot tell them apart."""
        if isinstance(self.raw, ProcessContainer):
            return self.raw.logs(since_start=True).decode("utf-8", "replace")
        return str(self.logs())

    def _wait_ready(self, timeout: int = READY_TIMEOUT_S) -> bool:
        """Wait for the prompt; a container that ends first fails at once, with its log."""

        def prompted() -> bool:
            ended = self.status == "exited"
            if self.ready_prompt is None or self.ready_prompt in self.current_logs():
                return True
            if ended:
                raise ContainerFailed(self, f"{self.name} ended:\n{self.current_logs()[-4000:]}")
            self.reload()
            return False

        return wait_for(prompted, timeout, f"{self.name} logs {self.ready_prompt!r}")


class WorkerContainer(NodeContainer, CeleryWorkerContainer):
    """A Celery worker; pytest-celery's own, with our waiting."""


class Node(CeleryTestNode):
    """One program under test: its signals, its log and its end."""

    container: Any

    @property
    def raw(self) -> Any:
        """`ProcessContainer` or docker-py's object."""
        return self.container.raw

    @property
    def pid(self) -> int:
        """Number of the main process."""
        self.container.reload()
        return int(self.container.attrs["State"]["Pid"])

    def children(self) -> list[int]:
        """Numbers of the living processes below the main one, those whose parent died too."""
        table = self.raw.top()
        column = table["Titles"].index("PID")
        return [pid for row in table["Processes"] if (pid := int(row[column])) != self.pid]

    def is_running(self) -> bool:
        """Whether the main process lives; a frozen one does."""
        self.container.reload()
        return self.container.status in ("running", "paused")

    def exit_code(self) -> int | None:
        """How the main process ended, 128 + n after signal n; None while it lives."""
        if self.is_running():
            return None
        return int(self.container.attrs["State"]["ExitCode"])

    def kill(self, signal: Signal = "SIGKILL", reload_container: bool = True) -> None:
        """Send `signal` to the main process alone, frozen or not."""
        if self.is_running():
            self.container.kill(signal=signal)
        if reload_container:
            self.container.reload()

    def sigkill(self) -> None:
        """SIGKILL the main process; its children must die by themselves. Returns once it is dead."""
        self.kill("SIGKILL")
        self.wait()

    def sigkill_group(self) -> None:
        """SIGKILL every process of the node at once, as a machine that loses power would."""
        if isinstance(self.raw, ProcessContainer):
            self.raw.kill_group("SIGKILL")
        else:
            self.kill("SIGKILL")
        self.wait()

    def sigkill_child(self, pid: int) -> None:
        """SIGKILL one child. Raises `ValueError` for a process that is not of this node."""
        if pid not in self.children():
            raise ValueError(f"{pid} is no child of {self.name()}")
        os.kill(pid, signal.SIGKILL)

    def sigstop(self) -> None:
        """Freeze the whole node."""
        self.raw.pause()

    def sigcont(self) -> None:
        """Let a frozen node go on."""
        self.raw.unpause()

    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Wait for the end of the main process: its exit code. Raises on time-out."""
        return int(self.raw.wait(timeout=timeout_s)["StatusCode"])

    def terminate(self, timeout_s: float = 30) -> int:
        """SIGTERM (Celery: warm shutdown), then `wait`."""
        self.kill("SIGTERM")
        return self.wait(timeout_s)

    def wait_for_log(self, log: str, message: str = "", timeout: float = READY_TIMEOUT_S) -> None:
        """Wait until `log` appears; a node that ended without it fails at once."""

        def logged() -> bool:
            ended = not self.is_running()
            found = log in self.logs()
            assert found or not ended, f"{self.name()} ended ({self.exit_code()}) without {log!r}"
            return found

        wait_for(logged, timeout, message or f"{self.name()} logs {log!r}")


class WorkerNode(Node, CeleryTestWorker):
    """A Celery worker under test; `worker_name` is the part of its node name before the `@`."""

    @property
    def version(self) -> str:
        return str(celery.__version__)

    @property
    def worker_name(self) -> str:
        command: list[str] = self.raw.attrs["Config"]["Cmd"]
        return command[command.index("-n") + 1].partition("@")[0]

    def hostname(self) -> str:
        """Celery's node name, as `inspect` and the journal show it."""
        return f"{self.worker_name}@{socket.gethostname()}"


class WorkerCluster(CeleryWorkerCluster):
    """Several workers that share the work."""

    def __iter__(self) -> Any:
        return iter(self.nodes)

    def sigkill(self) -> None:
        """SIGKILL the main process of every worker."""
        for node in self:
            node.kill("SIGKILL")
        for node in self:
            node.wait()
