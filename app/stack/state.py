"""What a later command needs to find, reuse and stop a server: one JSON file of mode 600."""

import json
import os
import secrets
from dataclasses import asdict, dataclass, field
from pathlib import Path

from app.stack.process import ProcessMark


@dataclass(slots=True)
class ServerState:
    """Processes (the server itself under `main`), ports, password and data home of one server."""

    home: str = ""
    password: str = field(default_factory=lambda: secrets.token_hex(16))
    suffix: str = field(default_factory=lambda: secrets.token_hex(4))
    ports: dict[str, int] = field(default_factory=dict)
    processes: dict[str, ProcessMark] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> "ServerState":
        """Return the saved state, or a fresh one with a new password when there is none."""
        try:
            saved = json.loads(path.read_text())
        except FileNotFoundError:
            return cls()
        saved["processes"] = {name: ProcessMark(*mark) for name, mark in saved["processes"].items()}
        return cls(**saved)

    def save(self, path: Path) -> None:
        """Replace the file in one step: a reader sees the old state or the new one, never half."""
        fresh = path.with_suffix(".new")
        fresh.unlink(missing_ok=True)
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(asdict(self), file, indent=1)
        fresh.replace(path)
