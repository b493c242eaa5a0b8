"""Several private servers under one root directory, started and stopped together."""

import fcntl
import json
import secrets
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from os import getpid
from pathlib import Path
from types import TracebackType
from typing import Self

from app.stack.install import ensure_rabbitmq
from app.stack.postgres import Postgres
from app.stack.process import ProcessMark
from app.stack.rabbitmq import RabbitMQ
from app.stack.server import Server
from app.stack.valkey import Valkey

OWNER_FILE = "owner.json"
TEMPORARY_PREFIX = "test-"


class Stack:
    """The servers of one root; two stacks with different roots never meet.

    As a context manager it starts them and stops them again, keeping their data. `rabbitmq`,
    `postgres` and `valkey` are there even when not chosen; they are then left alone.
    """

    def __init__(self, root: Path, *, rabbitmq: bool = True, postgres: bool = True, valkey: bool = True) -> None:
        """Choose what `up` starts; nothing is written before it."""
        self.root = root.resolve()
        self.postgres = Postgres(self.root / Postgres.name)
        self.rabbitmq = RabbitMQ(self.root / RabbitMQ.name)
        self.valkey = Valkey(self.root / Valkey.name)
        chosen = {self.postgres: postgres, self.rabbitmq: rabbitmq, self.valkey: valkey}
        self.servers: list[Server] = [server for server, wanted in chosen.items() if wanted]

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.down()

    def up(self) -> None:
        """Start what does not run yet, all at once; installs RabbitMQ when it is missing.

        Raises StackError; the servers that this call started are stopped again in that case.
        """
        if self.rabbitmq in self.servers:
            ensure_rabbitmq()
        with self._locked():
            idle = [server for server in self.servers if not server.running]
            try:
                _all_at_once([server.start for server in self.servers])
            except BaseException:
                _all_at_once([server.stop for server in idle])
                raise

    def down(self) -> None:
        """Stop the chosen servers in good order; their data stays. Harmless when none runs."""
        if self.root.exists():
            with self._locked():
                _all_at_once([server.stop for server in self.servers])

    def destroy(self) -> None:
        """Stop every server of the root, chosen or not, and delete the root."""
        if self.root.exists():
            with self._locked():
                servers: list[Server] = [self.postgres, self.rabbitmq, self.valkey]
                _all_at_once([server.destroy for server in servers])
            shutil.rmtree(self.root, ignore_errors=True)

    def env(self) -> dict[str, str]:
        """Return the project's environment variables for the chosen servers.

        BROKER_URL is RabbitMQ's where both brokers are chosen. Raises StackError before `up`.
        """
        found: dict[str, str] = {}
        if self.postgres in self.servers:
            found["DATABASE_URL"] = self.postgres.url
        if self.valkey in self.servers:
            found["BROKER_URL"] = found["REDIS_URL"] = self.valkey.url
        if self.rabbitmq in self.servers:
            found["BROKER_URL"] = self.rabbitmq.url
            found["RABBITMQ_MANAGEMENT_URL"] = self.rabbitmq.management_url
        return found

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Let one command at a time start or stop servers of this root."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


@contextmanager
def temporary_stack(
    parent: Path, *, rabbitmq: bool = True, postgres: bool = True, valkey: bool = True
) -> Iterator[Stack]:
    """Run a stack in a new directory `parent`/test-XXXXXX and delete it at the end.

    Stacks that a killed process left below `parent` are found by their owner and deleted first.
    """
    parent.mkdir(parents=True, exist_ok=True)
    destroy_abandoned(parent)
    root = parent / f"{TEMPORARY_PREFIX}{secrets.token_hex(3)}"
    root.mkdir()
    (root / OWNER_FILE).write_text(json.dumps(ProcessMark.of(getpid())))
    stack = Stack(root, rabbitmq=rabbitmq, postgres=postgres, valkey=valkey)
    try:
        stack.up()
        yield stack
    finally:
        stack.destroy()


def destroy_abandoned(parent: Path) -> list[Path]:
    """Delete temporary stacks below `parent` whose owner is gone, and return their roots."""
    abandoned = []
    for owner in parent.glob(f"{TEMPORARY_PREFIX}*/{OWNER_FILE}"):
        try:
            mark = ProcessMark(*json.loads(owner.read_text()))
        except (FileNotFoundError, ValueError):
            continue  # its owner is just writing or deleting it
        if not mark.alive:
            Stack(owner.parent).destroy()
            abandoned.append(owner.parent)
    return abandoned


def _all_at_once(actions: list[Callable[[], None]]) -> None:
    """Run all actions in threads, wait for every one, then raise the first error."""
    if not actions:
        return
    with ThreadPoolExecutor(len(actions)) as pool:
        futures = [pool.submit(action) for action in actions]
    for future in futures:
        future.result()
