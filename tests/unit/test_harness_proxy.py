"""The proxy against a plain echo server."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from tests.nodes.proxy import Proxy
from tests.nodes.waiting import wait_for


def echo(listener: socket.socket) -> None:
    while True:
        try:
            client, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=answer, args=(client,), daemon=True).start()


def answer(client: socket.socket) -> None:
    with client:
        try:
            while data := client.recv(1024):
                client.sendall(data)
        except OSError:
            return


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=echo, args=(listener,), daemon=True).start()
        with Proxy(listener.getsockname()) as made:
            yield made


@pytest.fixture
def client(proxy: Proxy) -> Iterator[socket.socket]:
    with connect(proxy) as made:
        yield made


def connect(proxy: Proxy) -> socket.socket:
    made = socket.create_connection((proxy.host, proxy.port), 5)
    made.settimeout(5)
    return made


def asks(client: socket.socket, text: bytes) -> bytes:
    client.sendall(text)
    return client.recv(1024)


def test_passes_bytes_both_ways(proxy: Proxy, client: socket.socket) -> None:
    assert asks(client, b"one") == b"one"
    assert proxy.connections == 1


def test_cut_resets_what_is_open_and_lets_new_ones_in(proxy: Proxy, client: socket.socket) -> None:
    assert asks(client, b"one") == b"one"
    assert proxy.cut() == 1
    with pytest.raises(ConnectionError):
        client.recv(1024)
    with connect(proxy) as second:
        assert asks(second, b"two") == b"two"
    assert proxy.accepted == 2


def test_refuse_resets_new_ones_until_healed(proxy: Proxy) -> None:
    proxy.refuse()
    with pytest.raises(ConnectionError), connect(proxy) as refused:
        asks(refused, b"one")
    proxy.heal()
    with connect(proxy) as healed:
        assert asks(healed, b"two") == b"two"


def test_blackhole_keeps_bytes_until_healed(proxy: Proxy, client: socket.socket) -> None:
    assert asks(client, b"one") == b"one"
    proxy.blackhole()
    client.sendall(b"two")
    client.settimeout(0.2)
    with pytest.raises(TimeoutError):
        client.recv(1024)
    proxy.heal()
    client.settimeout(5)
    assert client.recv(1024) == b"two"


def test_an_orderly_end_passes_through(proxy: Proxy, client: socket.socket) -> None:
    assert asks(client, b"one") == b"one"
    client.shutdown(socket.SHUT_WR)
    assert client.recv(1024) == b""
    wait_for(lambda: proxy.connections == 0, 5, "connection is forgotten")
