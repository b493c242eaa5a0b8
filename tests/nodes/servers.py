"""The private servers of `app.stack` as pytest-celery nodes, each test with a corner of its own."""

from __future__ import annotations

import json
import os
import urllib.request
from base64 import b64encode
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

import redis
from kombu.connection import Connection
from pytest_celery import CeleryTestBroker

from app.stack import RabbitMQ, Valkey
from app.stack.server import Server
from tests.nodes.node import Node, NodeContainer
from tests.nodes.process import Signal, signal_number
from tests.nodes.waiting import wait_for

API_TIMEOUT_S = 10
KINDS: tuple[Literal["rabbitmq", "valkey"], ...] = ("rabbitmq", "valkey")


class ServerContainer:
    """A server of `app.stack` behind the interface of docker-py's `Container`."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.name = server.name
        self.id = f"{server.name}-{server.directory.parent.name}"
        self._paused = False

    @property
    def status(self) -> str:
        """One of docker's words: "running", "paused" or "exited"."""
        if not self.server.running:
            return "exited"
        return "paused" if self._paused else "running"

    @property
    def attrs(self) -> dict[str, Any]:
        """The part of `docker inspect` that is read."""
        return {
            "Config": {"Cmd": [], "Env": []},
            "HostConfig": {"PortBindings": {}},
            "NetworkSettings": {"Networks": {}, "Ports": {}},
            "State": {"Status": self.status, "Pid": self.server.pid or 0, "ExitCode": 0},
        }

    def reload(self) -> None:
        """Nothing to fetch."""

    def logs(self) -> bytes:
        return self.server.log.read_bytes()

    def kill(self, signal: Signal | None = None) -> None:
        """SIGKILL ends the server and all its children, as a power cut would; others reach the main one."""
        number = signal_number(signal)
        if number == signal_number(None):
            self.server.kill9()
        elif pid := self.server.pid:
            os.kill(pid, number)

    def pause(self) -> None:
        """Freeze the main process."""
        self.kill("SIGSTOP")
        self._paused = True

    def unpause(self) -> None:
        self.kill("SIGCONT")
        self._paused = False

    def wait(self, timeout: float | None = None) -> dict[str, int]:
        wait_for(lambda: not self.server.running, timeout or API_TIMEOUT_S, f"{self.name} ends")
        return {"StatusCode": 0}

    def stop(self) -> None:
        self.server.stop()

    def start(self) -> None:
        self.server.start()

    def restart(self, timeout: float = 0) -> None:  # noqa: ARG002  the server has its own
        self.server.restart()

    def remove(self, *, force: bool = True) -> None:
        """The stack that owns the server stops it."""


class ServerNode(Node):
    """A database or broker under test."""

    def __init__(self, server: Server) -> None:
        super().__init__(NodeContainer(ServerContainer(server)), None)
        self.server = server

    def start(self) -> None:
        """Start it again, same data, port and password, and wait until it answers."""
        self.server.start()

    def stop(self) -> None:
        """Stop in good order."""
        self.server.stop()

    def lose_disk(self) -> None:
        """SIGKILL, delete all data, start: same URL, nothing in it."""
        self.server.kill9()
        self.server.stop()  # companions of the server, such as Erlang's epmd
        self.server.wipe()
        self.server.start()


class BrokerNode(ServerNode, CeleryTestBroker):
    """A broker and the corner of it (virtual host, database number) that one test uses."""

    def __init__(self, server: RabbitMQ | Valkey, url: str) -> None:
        super().__init__(server)
        self.url = url
        self.kind = server.name

    @property
    def is_rabbitmq(self) -> bool:
        return self.kind == RabbitMQ.name

    def environment(self) -> dict[str, str]:
        """What a process needs to find this broker."""
        found = {"BROKER_URL": self.url}
        if isinstance(self.server, RabbitMQ):
            found["RABBITMQ_MANAGEMENT_URL"] = self.server.management_url
        return found

    def config(self, *_args: Any, **_kwargs: Any) -> dict[str, Any]:
        return {"url": self.url, "host_url": self.url}

    def depth(self, queue: str) -> int:
        """Messages that wait in `queue`, delivered and unacknowledged ones not among them."""
        with Connection(self.url) as connection:
            return int(connection.default_channel.queue_declare(queue, passive=True).message_count)

    def purge(self, queue: str) -> int:
        """Delete what waits in `queue`; returns how many messages that were."""
        with Connection(self.url) as connection:
            return int(connection.default_channel.queue_purge(queue) or 0)


def management(server: RabbitMQ, method: str, path: str, body: Any = None) -> None:
    """One call to RabbitMQ's management API, with a JSON body if there is one. Raises `urllib.error.HTTPError`."""
    parts = urlsplit(server.management_url)
    credentials = b64encode(f"{parts.username}:{parts.password}".encode()).decode()
    request = urllib.request.Request(
        f"http://{parts.hostname}:{parts.port}/api/{path}",
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Authorization": f"Basic {credentials}", "Content-Type": "application/json"},
    )
    urllib.request.urlopen(request, timeout=API_TIMEOUT_S).close()  # noqa: S310  the scheme is fixed


def with_path(url: str, path: str) -> str:
    """`url` with another virtual host, database number or database name."""
    return urlunsplit(urlsplit(url)._replace(path=f"/{path}"))


def new_vhost(server: RabbitMQ, name: str) -> BrokerNode:
    """A fresh virtual host; its maker has every permission there."""
    management(server, "PUT", f"vhosts/{name}")
    return BrokerNode(server, with_path(server.url, name))


def delete_vhost(server: RabbitMQ, name: str) -> None:
    management(server, "DELETE", f"vhosts/{name}")


def fresh_database_number(server: Valkey, number: int) -> BrokerNode:
    """Database `number` (1 to 15), emptied."""
    url = with_path(server.url, str(number))
    with redis.Redis.from_url(url) as client:
        client.flushdb()
    return BrokerNode(server, url)
