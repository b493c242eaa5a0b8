"""Where the demo plays: private servers below one directory, and this process pointed at them."""

from __future__ import annotations

import fcntl
import os
import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from app.demo.errors import DemoError
from app.demo.interrupt import uninterrupted
from app.demo.screen import Screen
from app.settings import settings
from app.stack import Stack, ensure_rabbitmq

# What a shell may have set for other servers; libpq's PG* would change how ours are reached.
FOREIGN = ("DATABASE_URL", "BROKER_URL", "RABBITMQ_MANAGEMENT_URL", "REDIS_URL", "REPORTS_DIR", "PG")
NAMES = {"valkey": "Valkey", "rabbitmq": "RabbitMQ"}


@dataclass(frozen=True)
class Stage:
    """The demo's directory and what is in it."""

    root: Path
    broker: str

    @property
    def reports(self) -> Path:
        """Where the CSV files are."""
        return self.root / "reports"

    @property
    def env_file(self) -> Path:
        """Shell lines that point `deadsure` at the demo's servers; readable by the owner alone."""
        return self.root / "demo.env"

    def stack(self) -> Stack:
        """The servers of this demo."""
        rabbitmq = self.broker == "rabbitmq"
        return Stack(self.root / "stack", rabbitmq=rabbitmq, valkey=not rabbitmq)


@contextmanager
def servers(stage: Stage, screen: Screen, *, keep: bool) -> Iterator[None]:
    """Run the servers meanwhile; afterwards nothing of this directory runs any more, unless `keep`.

    Raises DemoError when another demo plays in the directory, StackError when a server does not start.
    """
    stage.root.mkdir(parents=True, exist_ok=True)
    with (stage.root / "demo.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DemoError(f"another demo runs in {stage.root}: wait for it, or choose another --root") from None
        try:
            start(stage, screen)
            yield
        finally:
            if keep and any(server.running for server in stage.stack().servers):
                screen.say("The servers go on running, as --keep asked.")
            elif not keep:
                screen.say("Stopping the servers ...")
                with uninterrupted():
                    Stack(stage.root / "stack").down()  # all of them, also what an earlier --keep left


def start(stage: Stage, screen: Screen) -> None:
    """Start the servers and point this process, and all that it starts, at them."""
    screen.say(f"Starting a private PostgreSQL and {NAMES[stage.broker]} in {shown(stage.root)} ...")
    if stage.broker == "rabbitmq":
        ensure_rabbitmq()
    began = time.monotonic()
    for name in [name for name in os.environ if name.startswith(FOREIGN)]:
        del os.environ[name]
    stack = stage.stack()
    with uninterrupted():
        empty_broker(stack)
        stack.up()
    point(stack.env() | {"REPORTS_DIR": str(stage.reports)}, stage.env_file)
    screen.say(f"  They answer after {time.monotonic() - began:.1f} s.")


def empty_broker(stack: Stack) -> None:
    """Forget what an earlier run left in the broker; its unfinished jobs are in the database and come back."""
    for server in stack.servers:
        if server is not stack.postgres and not server.running:
            server.wipe()


def point(environment: Mapping[str, str], env_file: Path) -> None:
    """Make `environment` that of this process and of its children, and write it to `env_file`."""
    os.environ.update(environment)
    settings.cache_clear()
    env_file.unlink(missing_ok=True)
    with os.fdopen(os.open(env_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.writelines(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items())


def shown(path: Path) -> str:
    """`path` as people read it: relative to the present directory where it lies below it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
