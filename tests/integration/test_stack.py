"""The private servers of app.stack: real ones, each in a root of its own."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import kombu
import psutil
import psycopg2
import pytest
import redis

from app.stack import Postgres, RabbitMQ, Stack, StackError, Valkey, temporary_stack
from app.stack.ports import HIGHEST, LOWEST, free_port, is_free
from app.stack.process import ProcessMark, wait_until
from app.stack.server import Server
from app.stack.stack import destroy_abandoned

KINDS: list[type[Server]] = [Postgres, RabbitMQ, Valkey]
QUEUE = "stack-test"


def write(server: Server) -> None:
    """Leave one durable trace in the server."""
    if isinstance(server, Postgres):
        with psycopg2.connect(plain_dsn(server)) as connection, connection.cursor() as cursor:
            cursor.execute("CREATE TABLE trace (id int)")
        connection.close()
    elif isinstance(server, RabbitMQ):
        with kombu.Connection(server.url, transport_options={"confirm_publish": True}) as connection:
            channel = connection.channel()
            queue = kombu.Queue(QUEUE, durable=True, queue_arguments={"x-queue-type": "quorum"})
            queue(channel).declare()
            kombu.Producer(channel).publish({"n": 1}, routing_key=QUEUE, delivery_mode=2)
        server.wait_quorum_queue_on_disk(QUEUE)
    else:
        with redis.Redis.from_url(server.url) as client:
            client.set("trace", "1")


def has_trace(server: Server) -> bool:
    if isinstance(server, Postgres):
        connection = psycopg2.connect(plain_dsn(server))
        try:
            with connection.cursor() as cursor:
                cursor.execute("SELECT to_regclass('trace') IS NOT NULL")
                row = cursor.fetchone()
                assert row is not None
                return bool(row[0])
        finally:
            connection.close()
    if isinstance(server, RabbitMQ):
        # Fetched rather than counted: a quorum queue's count lags behind its log. Not acknowledged, so
        # it goes back when the connection closes.
        with kombu.Connection(server.url) as connection:
            try:
                return connection.channel().basic_get(QUEUE) is not None
            except connection.channel_errors:
                return False
    with redis.Redis.from_url(server.url) as client:
        return bool(client.get("trace") == b"1")


def plain_dsn(server: Postgres) -> str:
    return server.url.replace("postgresql+psycopg2", "postgresql")


def family(server: Server) -> list[ProcessMark]:
    marks = list(server.state.processes.values())
    return [*marks, *(child for mark in marks for child in mark.descendants())]


def processes_of(root: Path) -> list[str]:
    """Return the command lines of live processes that work below `root` or for its RabbitMQ."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        if str(root) in line and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(line)
    return found


@pytest.fixture(params=KINDS, ids=lambda kind: str(kind.name))
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    kind: type[Server] = request.param
    made = kind(tmp_path / kind.name)
    yield made
    made.destroy()


def runs(server: Server) -> bool:
    """`server.running`, asked anew each time."""
    return server.running


def test_life_of_a_server(server: Server) -> None:
    assert not runs(server)
    server.start()
    assert runs(server)
    assert ":" in server.url
    write(server)
    url, first = server.url, family(server)

    server.kill9()
    assert not runs(server)
    server.start()
    assert server.url == url, "clients must find it again"
    assert has_trace(server), "kill -9 lost what was confirmed"
    assert not set(family(server)) & set(first)

    server.restart()
    assert server.url == url
    assert has_trace(server)

    with pytest.raises(StackError, match="stop it before wiping"):
        server.wipe()
    last = family(server)
    server.stop()
    assert not runs(server)
    assert wait_until(lambda: not any(mark.alive for mark in last), 1.0), "stop left processes behind"
    assert all(is_free(port) for port in server.state.ports.values())
    server.stop()  # harmless

    server.wipe()
    server.start()
    assert server.url == url
    assert not has_trace(server)


def test_listens_on_loopback_only_and_tells_its_password_to_nobody(server: Server) -> None:
    server.start()
    password = server.state.password
    assert len(password) >= 32
    listening = set()
    for mark in family(server):
        with contextlib.suppress(psutil.NoSuchProcess):  # a database's helper may end meanwhile
            process = psutil.Process(mark.pid)
            assert password not in " ".join(process.cmdline())
            sockets = process.net_connections("inet")
            listening |= {each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN}
    assert "127.0.0.1" in listening
    assert listening <= {"127.0.0.1", "::1"}
    state = server.directory / "state.json"
    assert state.stat().st_mode & 0o777 == 0o600
    assert password not in server.log.read_text(errors="replace")


def test_found_reused_and_stopped_by_another_object(server: Server) -> None:
    server.start()
    other = type(server)(server.directory)
    assert (other.pid, other.url) == (server.pid, server.url)
    other.start()
    assert other.pid == server.pid
    other.stop()
    assert not server.running


def test_a_frozen_server_stops_too(server: Server) -> None:
    server.start()
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    server.stop()
    assert not server.running


def test_a_stranger_on_the_wanted_port_is_left_alone(tmp_path: Path) -> None:
    valkey = Valkey(tmp_path / "valkey")
    valkey.start()
    port = valkey.port
    valkey.stop()
    with socket.create_server(("127.0.0.1", port)) as stranger:
        valkey.start()
        try:
            assert valkey.port != port
            with socket.create_connection(("127.0.0.1", port), 5):
                stranger.accept()[0].close()
        finally:
            valkey.destroy()


def test_a_pid_that_now_belongs_to_a_stranger_is_not_signalled(tmp_path: Path) -> None:
    valkey = Valkey(tmp_path / "valkey")
    valkey.start()
    valkey.stop()
    with subprocess.Popen(["sleep", "60"]) as stranger:
        state = valkey.state
        state.processes["main"] = ProcessMark(stranger.pid, "another boot:1")
        state.save(valkey.directory / "state.json")
        assert not valkey.running
        valkey.kill9()
        valkey.stop()
        valkey.destroy()
        assert stranger.poll() is None
        stranger.kill()


def test_a_server_that_cannot_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    valkey = Valkey(tmp_path / "valkey")
    valkey.start()
    valkey.stop()
    manifest = next((tmp_path / "valkey" / "data").rglob("*.manifest"))
    manifest.write_text("rubbish\n")
    with pytest.raises(StackError, match=r"(?s)manifest.*Next step"):
        valkey.start()
    assert not valkey.running
    assert not valkey.state.processes


def test_two_stacks_do_not_meet(tmp_path: Path) -> None:
    with temporary_stack(tmp_path) as first, temporary_stack(tmp_path) as second:
        assert first.root != second.root
        assert not set(first.env().values()) & set(second.env().values())
        for server in first.servers:
            write(server)
        pids = [server.pid for server in second.servers]
        second.down()
        for server in first.servers:
            assert has_trace(server)
        second.up()
        assert pids != [server.pid for server in second.servers]
        for server in second.servers:
            assert not has_trace(server)
        first.rabbitmq.kill9()
        assert second.rabbitmq.running
        assert "deadsure" in second.rabbitmq.ctl("list_users", "--quiet")
        roots = [first.root, second.root]
        assert all(processes_of(root) for root in roots) or os.geteuid() == 0
    for root in roots:
        assert not root.exists()
        assert processes_of(root) == []


def test_environment_names_every_server(tmp_path: Path) -> None:
    with temporary_stack(tmp_path, rabbitmq=False) as stack:
        assert set(stack.env()) == {"DATABASE_URL", "BROKER_URL", "REDIS_URL"}
        assert stack.env()["BROKER_URL"].startswith("redis://:")
        assert stack.env()["DATABASE_URL"].startswith("postgresql+psycopg2://")
        assert not stack.rabbitmq.directory.exists()


def test_command_line_up_is_repeatable_and_down_keeps_data(tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        argv = [sys.executable, "-m", "app.stack", *arguments, "--root", str(tmp_path / "stack")]
        done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=120)
        return done.stdout

    only = ("--only", "valkey", "--only", "postgres")
    try:
        run("up", *only)
        before = json.loads(run("status", "--json"))
        run("up", *only)
        assert json.loads(run("status", "--json")) == before
        assert before["rabbitmq"] == {"pid": None}
        write(Stack(tmp_path / "stack").postgres)
        exported = run("env", *only)
        assert "export DATABASE_URL=" in exported
        run("down")
        after = json.loads(run("status", "--json"))
        assert {name: entry["pid"] for name, entry in after.items()} == dict.fromkeys(after)
        run("up", *only)
        assert run("env", *only) == exported
        assert has_trace(Stack(tmp_path / "stack").postgres)
    finally:
        run("destroy")
    assert not (tmp_path / "stack").exists()


def test_survives_ctrl_c_in_the_terminal_that_started_it(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "app.stack", "up", "--only", "valkey", "--root", str(tmp_path / "s")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, process_group=0) as command:
        assert command.stdout is not None
        command.stdout.read()
    valkey = Stack(tmp_path / "s").valkey
    try:
        assert valkey.pid is not None
        assert os.getsid(valkey.pid) == valkey.pid != os.getsid(0)
    finally:
        valkey.destroy()


def test_a_stack_whose_owner_was_killed_is_swept(tmp_path: Path) -> None:
    program = (
        "import os, pathlib, signal, sys\n"
        "from app.stack import temporary_stack\n"
        "with temporary_stack(pathlib.Path(sys.argv[1]), rabbitmq=False, postgres=False):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    (root,) = tmp_path.glob("test-*")
    valkey = Stack(root).valkey
    assert valkey.running
    mark = valkey.state.processes["main"]
    assert destroy_abandoned(tmp_path) == [root]
    assert not mark.alive
    assert not root.exists()


def test_ports_lie_outside_the_ephemeral_range() -> None:
    port = free_port()
    assert LOWEST <= port <= HIGHEST
    assert is_free(port)
    with socket.create_server(("127.0.0.1", port)):
        assert not is_free(port)
    with socket.create_server(("0.0.0.0", port)):  # noqa: S104  a stranger that listens everywhere
        assert not is_free(port)
