"""An HTTP payment service whose `applied` charges are what really took effect."""

from __future__ import annotations

import json
import socket
import struct
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote

from tests.faults.far_side.behaviour import Behaviour


@dataclass(frozen=True)
class Applied:
    """One charge that was made."""

    key: str
    charge_id: str
    amount_cents: int
    currency: str


@dataclass(frozen=True)
class Asked:
    """One request: `what` is POST or GET, `told` the status that the client got, None for none."""

    what: str
    charge_id: str
    key: str
    told: int | None


class PaymentService:
    """Behaviours by charge_id, for POST; `GET <charge_id>` for the status question.

    `500`, `429 <s>`, `422`, `409`, `503`: so many nothing was applied. `500 after applying`, `time out after applying`,
    `drop after applying`, `nonsense after applying`. `drop before applying`.
    """

    def __init__(self) -> None:
        self.behaviour = Behaviour()
        self.applied: list[Applied] = []
        self.asked: list[Asked] = []
        self.lock = threading.Lock()
        self.go_on = threading.Event()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._server: ThreadingHTTPServer | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"http://merchant:t0ken@127.0.0.1:{self.port}/v1"

    def start(self) -> None:
        """Listen (again) on the same port."""
        self.go_on.clear()
        handler = type("Handler", (PaymentHandler,), {"service": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), handler)
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def stop(self) -> None:
        """Be down: connections are refused."""
        self.go_on.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def charges(self, charge_id: str) -> list[Applied]:
        """The charges that were made for this id."""
        return [charge for charge in self.applied if charge.charge_id == charge_id]

    def requests(self, charge_id: str) -> list[tuple[str, int | None]]:
        """What was asked about this id, and what was told."""
        return [(asked.what, asked.told) for asked in self.asked if asked.charge_id == charge_id]

    def find(self, key: str) -> tuple[int, Applied] | None:
        """Number and charge of a key; call it with the lock."""
        return next(((n, charge) for n, charge in enumerate(self.applied) if charge.key == key), None)


class PaymentHandler(BaseHTTPRequestHandler):
    """One request; a key that was applied is never applied again."""

    service: PaymentService
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        key = self.headers["Idempotency-Key"]
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        charge = Applied(key, body["charge_id"], body["amount_cents"], body["currency"])
        assert (self.path, self.headers["Authorization"] is not None) == ("/v1/charges", True)
        now, after, _ = self.service.behaviour.take(charge.charge_id).partition(" after applying")
        if now == "well" or after:
            self.apply(charge)
        match now.split():
            case ["time", "out"]:
                self.note(charge, None)
                self.service.go_on.wait(60)
            case ["drop", *_]:
                self.note(charge, None)
                self.reset()
            case ["nonsense"]:
                self.answer(charge, 200, {"what": "ever"})
            case ["well"]:
                self.answer(charge, 201, {"id": self.reference(charge)})
            case [status, *seconds]:
                self.answer(charge, int(status), {}, retry_after=seconds)
        self.close_connection = True

    def do_GET(self) -> None:
        prefix, _, key = unquote(self.path).rpartition("/")
        assert prefix == "/v1/charges"
        with self.service.lock:
            found = self.service.find(key)
            asked = next((a.charge_id for a in self.service.asked if a.key == key), "")
        charge = found[1] if found else Applied(key, asked, 0, "")
        now = self.service.behaviour.take(f"GET {charge.charge_id}")
        if now != "well":
            self.answer(charge, int(now), {})
        elif found:
            self.answer(charge, 200, {"id": self.reference(charge)})
        else:
            self.answer(charge, 404, {})

    def apply(self, charge: Applied) -> None:
        with self.service.lock:
            if self.service.find(charge.key) is None:
                self.service.applied.append(charge)

    def reference(self, charge: Applied) -> str:
        with self.service.lock:
            found = self.service.find(charge.key)
        assert found is not None
        return f"ch_{found[0]}"

    def note(self, charge: Applied, told: int | None) -> None:
        with self.service.lock:
            self.service.asked.append(Asked(self.command, charge.charge_id, charge.key, told))

    def answer(self, charge: Applied, status: int, body: dict[str, Any], retry_after: list[str] | None = None) -> None:
        self.note(charge, status)
        raw = json.dumps(body).encode()
        self.send_response(status)
        for seconds in retry_after or []:
            self.send_header("Retry-After", seconds)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def reset(self) -> None:
        """Reset the connection."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def log_message(self, *_args: Any) -> None:
        """Nothing."""
