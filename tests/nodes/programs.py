"""Starts the programs of a test and ends every one of them with it."""

from __future__ import annotations

import itertools
import os
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from tests.faults.inject import VARIABLE, Fault, dump
from tests.nodes.backing import Backing, launch
from tests.nodes.node import Node, NodeContainer, WorkerCluster, WorkerContainer, WorkerNode

OURS = (
    "DEADSURE_",
    "DATABASE_URL",
    "BROKER_URL",
    "RABBITMQ_",
    "REDIS_URL",
    "REPORTS_DIR",
    "SMTP_URL",
    "PAYMENTS_URL",
    "PG",
    "FAULTS",
)
WORKER_APP = "tests.faults.worker_app"
ALONE = ("--without-mingle", "--without-gossip")
TAIL_LINES = 60
LINE_CHARS = 1000  # a JSON line holds a whole traceback; the log file has the rest

AnyNode = TypeVar("AnyNode", bound=Node)


class Programs:
    """The processes of one test: `environment` is what they all share, a call may add to it."""

    def __init__(self, directory: Path, environment: Mapping[str, str], backing: Backing = "process") -> None:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(OURS)}
        self.environment = {**inherited, "PYTHONUNBUFFERED": "1", **environment}
        self.nodes: list[Node] = []
        self._directory = directory
        self._backing: Backing = backing
        self._numbers = itertools.count(1)

    def worker(
        self,
        app: str = WORKER_APP,
        *,
        name: str | None = None,
        concurrency: int = 2,
        environment: Mapping[str, str] | None = None,
        faults: Iterable[Fault] = (),
        options: Sequence[str] = (),
        ready: bool = True,
        alone: bool = True,
    ) -> WorkerNode:
        """Start `celery -A app worker -c concurrency -n name@%h options…`; waits until it is ready.

        `alone`: it does not ask for other workers first, and listens to none: a second less.
        """
        name = name or self._unused("worker")
        command = [
            "-m",
            "celery",
            "-A",
            app,
            "worker",
            "-c",
            str(concurrency),
            "-n",
            f"{name}@%h",
            "-l",
            "INFO",
        ]
        quick = ALONE if alone else ()
        raw = self._launch([*command, *quick, *options], name, environment, faults)
        node = WorkerNode(WorkerContainer(raw, f"{name}@{socket.gethostname()} ready."), None)
        return self._keep(node, ready=ready)

    def workers(self, count: int, **settings: object) -> WorkerCluster:
        """Start `count` workers at once, each with the keywords of `worker`; waits for all."""
        cluster = WorkerCluster([self.worker(**{**settings, "ready": False}) for _ in range(count)])  # type: ignore[arg-type]
        cluster.ready()
        return cluster

    def relay(
        self,
        *,
        name: str | None = None,
        environment: Mapping[str, str] | None = None,
        faults: Iterable[Fault] = (),
        options: Sequence[str] = (),
        ready_prompt: str | None = None,
    ) -> Node:
        """Start `deadsure relay` alone."""
        return self.module(
            ["tasks.cli", "relay", *options],
            name=name or self._unused("relay"),
            environment=environment,
            faults=faults,
            ready_prompt=ready_prompt,
        )

    def beat(
        self,
        app: str,
        *,
        environment: Mapping[str, str] | None = None,
        faults: Iterable[Fault] = (),
        ready: bool = True,
    ) -> Node:
        """Start `celery -A app beat`; waits until it has read its schedule."""
        name = self._unused("beat")
        raw = self._launch(["-m", "celery", "-A", app, "beat", "-l", "INFO"], name, environment, faults)
        return self._keep(Node(NodeContainer(raw, "periodic.ready")), ready=ready)

    def producer(
        self,
        code: str,
        *arguments: str,
        name: str | None = None,
        environment: Mapping[str, str] | None = None,
        faults: Iterable[Fault] = (),
    ) -> Node:
        """Start a Python snippet, `arguments` in its `sys.argv`."""
        return self.module(
            ["-c", code, *arguments],
            name=name or self._unused("producer"),
            environment=environment,
            faults=faults,
        )

    def module(
        self,
        command: Sequence[str],
        *,
        name: str | None = None,
        environment: Mapping[str, str] | None = None,
        faults: Iterable[Fault] = (),
        ready_prompt: str | None = None,
    ) -> Node:
        """Start `python -m command…` (or `-c code …`) under the fault runner."""
        name = name or self._unused("program")
        raw = self._launch(["-m", "tests.faults.run_with_faults", *command], name, environment, faults)
        return self._keep(Node(NodeContainer(raw, ready_prompt)), ready=ready_prompt is not None)

    def tails(self) -> list[tuple[str, str]]:
        """Title and last lines of every log, for the report of a failed test."""
        return [
            (
                f"log of {node.name()} ({node.container.status}, exit code {node.exit_code()})",
                "\n".join(line[:LINE_CHARS] for line in node.logs().splitlines()[-TAIL_LINES:]),
            )
            for node in self.nodes
        ]

    def close(self) -> None:
        """Kill whatever still runs."""
        for node in self.nodes:
            node.teardown()

    def _unused(self, kind: str) -> str:
        return f"{kind}{next(self._numbers)}"

    def _launch(
        self,
        arguments: Sequence[str],
        name: str,
        environment: Mapping[str, str] | None,
        faults: Iterable[Fault],
    ) -> object:
        return launch(
            [sys.executable, *arguments],
            name=name,
            environment={**self.environment, VARIABLE: dump(faults), **(environment or {})},
            log=self._directory / f"{len(self.nodes):02d}-{name}.log",
            backing=self._backing,
        )

    def _keep(self, node: AnyNode, *, ready: bool) -> AnyNode:
        self.nodes.append(node)
        if ready:
            node.ready()
        return node
