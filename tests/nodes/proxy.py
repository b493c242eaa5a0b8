"""A TCP proxy to cut, blackhole and heal the way to a broker or database."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit, urlunsplit

CHUNK_BYTES = 65536
CONNECT_TIMEOUT_S = 5
Link = tuple[socket.socket, socket.socket]


class Proxy:
    """Listens on a port of its own on loopback and passes every byte on to `target`.

    `cut` resets what is open, `refuse` also what comes, `blackhole` keeps connections open and
    passes nothing on (what arrives waits in the buffers, as with a dead route), `heal` undoes both.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.accepted = 0
        self._flowing = threading.Event()
        self._flowing.set()
        self._refusing = False
        self._closed = False
        self._lock = threading.Lock()
        self._open: set[Link] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.host, self.port = self._listener.getsockname()
        self._spawn(self._accept)

    @classmethod
    def before(cls, url: str) -> Self:
        """A proxy in front of the server that `url` names."""
        parts = urlsplit(url)
        assert parts.hostname
        assert parts.port
        return cls((parts.hostname, parts.port))

    def url(self, original: str) -> str:
        """`original` with this proxy's address in place of the server's."""
        parts = urlsplit(original)
        credentials = parts.netloc.rpartition("@")[0]
        netloc = f"{credentials}@{self.host}:{self.port}" if credentials else f"{self.host}:{self.port}"
        return urlunsplit(parts._replace(netloc=netloc))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def connections(self) -> int:
        """Number of client connections that are open."""
        with self._lock:
            return len(self._open)

    def cut(self) -> int:
        """Reset all open connections, both ends; returns how many clients were cut."""
        with self._lock:
            victims, self._open = self._open, set()
        for link in victims:
            for end in link:
                _reset(end)
        return len(victims)

    def refuse(self) -> int:
        """Cut, and reset every new connection at once until `heal`."""
        self._refusing = True
        return self.cut()

    def blackhole(self) -> None:
        """Keep all connections open, accept new ones, and pass nothing on until `heal`."""
        self._flowing.clear()

    def heal(self) -> None:
        """Pass everything on again, what waited in a blackhole first."""
        self._refusing = False
        self._flowing.set()

    def close(self) -> None:
        """Cut everything and free the port."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        self._flowing.set()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            if self._refusing:
                _reset(client)
            else:
                self._spawn(self._connect, client)

    def _connect(self, client: socket.socket) -> None:
        self._flowing.wait()
        try:
            server = socket.create_connection(self.target, CONNECT_TIMEOUT_S)
        except OSError:
            _reset(client)
            return
        server.settimeout(None)
        link = (client, server)
        with self._lock:
            wanted = not (self._closed or self._refusing)
            if wanted:
                self._open.add(link)
        if wanted:
            back = self._spawn(self._pump, link, server, client)
            self._pump(link, client, server)
            back.join()
        with self._lock:
            self._open.discard(link)
        for end in link:
            _reset(end)

    def _pump(self, link: Link, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(CHUNK_BYTES):
                self._flowing.wait()
                sink.sendall(data)
            if link in self._open:  # a cut must not look like an orderly end
                sink.shutdown(socket.SHUT_WR)
        except OSError:
            for end in link:
                _reset(end)

    @staticmethod
    def _spawn(target: Callable[..., None], *args: object) -> threading.Thread:
        thread = threading.Thread(target=target, args=args, daemon=True, name="proxy")
        thread.start()
        return thread


def _reset(sock: socket.socket) -> None:
    """Close with RST, so that the peer sees "connection reset" and not an orderly end."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RD)  # wakes the thread that reads from it
    sock.close()
