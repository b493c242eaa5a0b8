"""What a node stands on: a process by default, a container with `--nodes=docker`.

A container runs the project's image on the host's network, with the checkout and the temporary
directory mounted at their own paths, so that URLs, files and commands mean the same in both.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import docker

from tests.nodes.process import ROOT, ProcessContainer

IMAGE = "deadsure:test"  # docker build -t deadsure:test .
Backing = Literal["process", "docker"]


def launch(command: Sequence[str], *, name: str, environment: Mapping[str, str], log: Path, backing: Backing) -> Any:
    """Start `command`; returns a `ProcessContainer` or docker-py's `Container`."""
    if backing == "process":
        return ProcessContainer(command, name=name, environment=environment, log=log)
    mounted = {str(path): {"bind": str(path), "mode": "rw"} for path in (ROOT, Path(tempfile.gettempdir()))}
    return docker.from_env().containers.run(
        IMAGE,
        ["python", *command[1:]],
        name=f"deadsure-{name}-{log.parent.name}",
        environment={key: value for key, value in environment.items() if key != "PATH"},
        network_mode="host",
        pid_mode="host",
        volumes=mounted,
        working_dir=str(ROOT),
        detach=True,
    )
