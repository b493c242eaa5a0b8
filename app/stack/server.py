"""The life of one private server: start, stop, kill9, restart, wipe.

Promise: `start` returns only after a real, authenticated connection; `stop` returns only after every
process of the server is gone; nothing is signalled that this class did not start. A restart keeps
ports and password, so clients find the server again under the same URL; only a port that somebody
else took meanwhile is replaced.
"""

import os
import re
import shutil
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import ClassVar

from app.stack.account import Account, give, reachable_home, server_account
from app.stack.errors import BusyError, PortTakenError, StackError
from app.stack.ports import free_port, is_free
from app.stack.process import POLL_S, Command, ProcessMark, kill_and_wait, wait_until
from app.stack.state import ServerState

PORT_ATTEMPTS = 5
PORT_WAIT_S = 2.0  # for a port of our own that a killed process is just giving back
GONE_TIMEOUT_S = 20.0
TAIL_LINES = 25
USER = "deadsure"


class Server(ABC):
    """A server in `directory` (created if missing), found again there by any later process."""

    name: ClassVar[str]
    port_names: ClassVar[Sequence[str]] = ("main",)
    unprivileged: ClassVar[bool] = True
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    start_timeout_s: ClassVar[float] = 60.0
    stop_timeout_s: ClassVar[float] = 30.0
    port_taken: ClassVar[re.Pattern[str]] = re.compile("address already in use|eaddrinuse", re.IGNORECASE)
    busy: ClassVar[re.Pattern[str]] = re.compile("(?!)")

    def __init__(self, directory: Path) -> None:
        """Take `directory` as this server's own; nothing is written before `start`."""
        self.directory = directory.resolve()
        self.log = self.directory / "server.log"
        self._log_offset = 0

    # what a kind of server says about itself

    @property
    @abstractmethod
    def url(self) -> str:
        """URL with password, as clients of this project take it."""

    @abstractmethod
    def _prepare(self, home: Path) -> None:
        """Write configuration and, on a fresh or wiped home, the empty data directory."""

    @abstractmethod
    def _command(self, home: Path) -> tuple[Sequence[str], dict[str, str]]:
        """Return argv and extra environment of the server, which must stay in the foreground."""

    @abstractmethod
    def _answers(self) -> bool:
        """Return True when an authenticated connection works."""

    @abstractmethod
    def _data(self, home: Path) -> Sequence[Path]:
        """Return what `wipe` deletes."""

    def _before_launch(self, home: Path, state: ServerState) -> None:  # noqa: B027  optional hook
        """Start companion processes and note them in `state.processes`."""

    def _after_start(self) -> None:  # noqa: B027  optional hook
        """Finish a first start, over the working connection."""

    # life

    @property
    def state(self) -> ServerState:
        """The state as any process last wrote it."""
        return ServerState.load(self._state_path)

    @property
    def port(self) -> int:
        """The port clients connect to. Raises StackError before the first start."""
        return self._port("main")

    @property
    def pid(self) -> int | None:
        """Pid of the server's main process, None while it does not run."""
        main = self._main
        return main.pid if main is not None and main.alive else None

    @property
    def running(self) -> bool:
        """True while the main process that we started is alive."""
        return self.pid is not None

    def start(self) -> None:
        """Start unless running, and return when it answers.

        Raises StackError, with the end of the server's log, when it ends early or stays silent.
        """
        if self.running:
            self._wait_ready()
            return
        self._make_directory()
        deadline = time.monotonic() + self.start_timeout_s
        taken = 0
        while True:
            try:
                self._launch()
                self._wait_ready()
                break
            except PortTakenError:
                taken += 1
                self._end_everything()
                if taken >= PORT_ATTEMPTS:
                    raise
            except BusyError:
                if time.monotonic() >= deadline:
                    raise
            except BaseException:  # Ctrl-C while waiting must not leave half a server behind
                self._end_everything()
                raise
        self._after_start()

    def stop(self) -> None:
        """Ask the server to end in good order, wait, and end what does not listen. Idempotent."""
        state = self.state
        main = state.processes.get("main")
        if main is not None and main.alive:
            family = main.descendants()
            main.send(signal.SIGCONT)  # a frozen server would never see the request
            main.send(self.stop_signal)
            wait_until(lambda: not main.alive, self.stop_timeout_s)
            kill_and_wait([main, *family], GONE_TIMEOUT_S)
        self._end_everything()

    def kill9(self) -> None:
        """SIGKILL the server and all its children at once, as a power cut would, and wait."""
        main = self._main
        if main is not None and not kill_and_wait([main, *main.descendants()], GONE_TIMEOUT_S):
            raise StackError(f"{self.name}: pid {main.pid} survived SIGKILL for {GONE_TIMEOUT_S} s")

    def restart(self) -> None:
        """Stop in good order if running, then start with the same data, port and password."""
        self.stop()
        self.start()

    def wipe(self) -> None:
        """Delete all data; ports and password stay. Raises StackError while the server runs."""
        if self.running:
            raise StackError(f"{self.name} is running: stop it before wiping its data")
        home = self.state.home
        if home:
            for path in self._data(Path(home)):
                shutil.rmtree(path, ignore_errors=True)

    def destroy(self) -> None:
        """End the server at once and delete its whole directory, with a home elsewhere if it has one."""
        self.kill9()  # an orderly stop would save data that goes anyway, six seconds long for RabbitMQ
        self._end_everything()
        home = self.state.home
        if home:
            shutil.rmtree(home, ignore_errors=True)
        shutil.rmtree(self.directory, ignore_errors=True)

    def log_tail(self) -> str:
        """Return the last lines the server wrote since its last start."""
        try:
            with self.log.open("rb") as file:
                file.seek(self._log_offset)
                lines = file.read().decode(errors="replace").splitlines()
        except FileNotFoundError:
            return ""
        return "\n".join(lines[-TAIL_LINES:])

    # inside

    @cached_property
    def _account(self) -> Account | None:
        return server_account() if self.unprivileged else None

    @property
    def _state_path(self) -> Path:
        return self.directory / "state.json"

    @property
    def _main(self) -> ProcessMark | None:
        return self.state.processes.get("main")

    def _port(self, name: str) -> int:
        try:
            return self.state.ports[name]
        except KeyError:
            raise StackError(f"{self.name} was never started in {self.directory}") from None

    def _make_directory(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        if self._account is not None:
            self.directory.chmod(0o711)  # the account must pass, not look around
        state = self.state
        if not state.home or not Path(state.home).is_dir():
            home = reachable_home(self.directory, self._account)
            if home != self.directory:  # remains of a stack that was deleted by hand
                for path in self._data(home):
                    shutil.rmtree(path, ignore_errors=True)
            state.home = str(home)
        state.save(self._state_path)

    def _launch(self) -> None:
        state = self.state
        home = Path(state.home)
        kill_and_wait(state.processes.values(), GONE_TIMEOUT_S)
        state.processes.clear()
        chosen: dict[str, int] = {}
        for name in self.port_names:
            wanted = state.ports.get(name)
            keep = wanted is not None and wait_until(partial(is_free, wanted), PORT_WAIT_S)
            chosen[name] = wanted if keep and wanted else free_port(chosen.values())
        state.ports = chosen
        state.save(self._state_path)
        self._prepare(home)
        self._log_offset = self.log.stat().st_size if self.log.exists() else 0
        self._before_launch(home, state)
        argv, extra = self._command(home)
        state.processes["main"] = self._as_account(argv, home, extra).spawn()
        state.save(self._state_path)

    def _as_account(self, argv: Sequence[str], home: Path, extra: dict[str, str] | None = None) -> Command:
        """Return a command with a small environment of its own: no PG* or RABBITMQ_* from outside."""
        path = f"{os.environ.get('PATH', '')}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
        env = {"PATH": path, "HOME": str(home), "LANG": "C.UTF-8", **(extra or {})}
        return Command(argv, Path(env["HOME"]), env, self.log, self._account)

    def _own_directory(self, path: Path) -> Path:
        """Create `path` with mode 700 for the server's account."""
        path.mkdir(mode=0o700, exist_ok=True)
        path.chmod(0o700)
        give(path, self._account)
        return path

    def _own_file(self, path: Path, text: str) -> Path:
        """Write `text` to `path`, readable by the server's account alone."""
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
        give(path, self._account)
        return path

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + self.start_timeout_s
        while not self._answers():
            if not self.running:
                log = self.log_tail()
                kind = StackError
                if self.port_taken.search(log):
                    kind = PortTakenError
                elif self.busy.search(log):
                    kind = BusyError
                raise kind(f"{self.name} ended while starting; {self._explain(log)}")
            if time.monotonic() >= deadline:
                raise StackError(
                    f"{self.name} does not answer after {self.start_timeout_s:.0f} s; {self._explain(self.log_tail())}"
                )
            time.sleep(POLL_S)

    def _explain(self, log: str) -> str:
        return (
            f"the end of {self.log}:\n{log}\n"
            f"Next step: mend what the log names, or delete {self.directory} to begin afresh."
        )

    def _end_everything(self) -> None:
        state = self.state
        if not state.processes:
            return
        marks = list(state.processes.values())
        family = [child for mark in marks for child in mark.descendants()]
        if not kill_and_wait([*marks, *family], GONE_TIMEOUT_S):
            raise StackError(f"{self.name}: processes {[m.pid for m in marks]} cannot be ended")
        state.processes.clear()
        state.save(self._state_path)
