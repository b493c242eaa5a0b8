"""A private RabbitMQ node of the system's installation, apart from any other node on the machine.

Its own node name, Erlang cookie, epmd, ports, plugin list and data; every socket on 127.0.0.1. The
epmd is started here, in the foreground, rather than left to Erlang, which would leave it behind.
"""

import json
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from app.stack.errors import StackError
from app.stack.ports import LOOPBACK
from app.stack.process import wait_until
from app.stack.server import USER, Server
from app.stack.state import ServerState

PROBE_TIMEOUT_S = 3.0
EPMD_TIMEOUT_S = 10.0
CTL_TIMEOUT_S = 60.0
AMQP_HEADER = b"AMQP\x00\x00\x09\x01"
# Where the scripts are that run the server as it is: Debian's /usr/sbin wrappers insist on an account.
SCRIPT_DIRECTORIES = (
    "/usr/lib/rabbitmq/bin",
    "/opt/homebrew/opt/rabbitmq/sbin",
    "/usr/local/opt/rabbitmq/sbin",
)


def rabbitmq_script(name: str) -> str | None:
    """Return the path of RabbitMQ's `name` (such as rabbitmqctl), None when it is not installed."""
    for directory in SCRIPT_DIRECTORIES:
        script = Path(directory) / name
        if script.exists():
            return str(script)
    return shutil.which(name)


def _required(name: str) -> str:
    script = rabbitmq_script(name)
    if script is None:
        raise StackError(
            f"RabbitMQ's {name} is not installed: run `python -m app.stack install-rabbitmq`"
            " (apt or Homebrew), or set BROKER_URL to a broker you have"
        )
    return script


def _epmd() -> str:
    found = shutil.which("epmd")
    if found is not None:
        return found
    for root in ("/usr/lib/erlang", "/opt/homebrew/lib/erlang", "/usr/local/lib/erlang"):
        for path in sorted(Path(root).glob("erts-*/bin/epmd")):
            return str(path)
    raise StackError("Erlang's epmd was not found: install Erlang completely, or add it to PATH")


class RabbitMQ(Server):
    """RabbitMQ with the management plugin and one administrator `deadsure`."""

    name: ClassVar[str] = "rabbitmq"
    port_names: ClassVar[Sequence[str]] = ("main", "management", "distribution", "epmd")
    start_timeout_s: ClassVar[float] = 120.0
    stop_timeout_s: ClassVar[float] = 60.0

    @property
    def url(self) -> str:
        """AMQP URL of the virtual host `/`."""
        return f"amqp://{USER}:{self.state.password}@{LOOPBACK}:{self.port}//"

    @property
    def management_url(self) -> str:
        """Base URL of the management plugin, user and password inside, without `/api`."""
        return f"http://{USER}:{self.state.password}@{LOOPBACK}:{self._port('management')}"

    @property
    def node(self) -> str:
        """Erlang name of the node."""
        return f"deadsure-{self.state.suffix}@localhost"

    def ctl(self, *arguments: str) -> str:
        """Run `rabbitmqctl` against this node and return its output. Raises StackError."""
        home = Path(self.state.home)
        argv = [_required("rabbitmqctl"), "--node", self.node, *arguments]
        try:
            return self._as_account(argv, home, self._environment(home)).run(CTL_TIMEOUT_S)
        except subprocess.CalledProcessError as error:
            raise StackError(f"rabbitmqctl {' '.join(arguments)}: {error.output}") from error

    def api(self, path: str) -> object:
        """Return the management plugin's JSON for `path`, such as `queues`. Raises OSError."""
        credentials = b64encode(f"{USER}:{self.state.password}".encode()).decode()
        request = urllib.request.Request(
            f"http://{LOOPBACK}:{self._port('management')}/api/{path}",
            headers={"Authorization": f"Basic {credentials}"},
        )
        with urllib.request.urlopen(request, timeout=PROBE_TIMEOUT_S) as answer:  # noqa: S310  as above
            return json.load(answer)

    def wait_quorum_queue_on_disk(self, queue: str, timeout_s: float = 15.0) -> None:
        """Wait until the node itself would find `queue` of vhost `/` again after a kill -9.

        RabbitMQ writes a new quorum queue's name to its registry some three seconds after it confirms
        the declaration. Killed before that, it comes back with a queue that has its data but no
        leader, for ever: every use of it times out. Raises StackError after `timeout_s`.
        """
        registry = Path(self.state.home) / "data" / self.node / "quorum" / self.node / "names.dets"
        name = f"%2F_{queue}".encode()
        if not wait_until(lambda: registry.exists() and name in registry.read_bytes(), timeout_s):
            raise StackError(f"quorum queue {queue} is not in {registry} after {timeout_s:.0f} s")

    def _prepare(self, home: Path) -> None:
        for part in ("data", "log", "conf.d"):
            self._own_directory(home / part)
        state = self.state
        lines = [
            f"listeners.tcp.1 = {LOOPBACK}:{state.ports['main']}",
            f"management.tcp.ip = {LOOPBACK}",
            f"management.tcp.port = {state.ports['management']}",
            f"default_user = {USER}",
            f"default_pass = {state.password}",
            "default_user_tags.administrator = true",
            "default_permissions.configure = .*",
            "default_permissions.read = .*",
            "default_permissions.write = .*",
        ]
        self._own_file(home / "rabbitmq.conf", "\n".join(lines) + "\n")
        self._own_file(home / "enabled_plugins", "[rabbitmq_management].\n")
        self._own_file(home / "rabbitmq-env.conf", "")
        self._own_directory(home / "erlang")
        self._own_file(home / "erlang" / ".erlang.cookie", state.suffix + state.password).chmod(0o400)

    def _environment(self, home: Path) -> dict[str, str]:
        ports = self.state.ports
        loopback = LOOPBACK.replace(".", ",")
        return {
            "HOME": str(home / "erlang"),
            "ERL_EPMD_PORT": str(ports["epmd"]),
            "ERL_EPMD_ADDRESS": LOOPBACK,
            "RABBITMQ_NODENAME": self.node,
            "RABBITMQ_NODE_IP_ADDRESS": LOOPBACK,
            "RABBITMQ_NODE_PORT": str(ports["main"]),
            "RABBITMQ_DIST_PORT": str(ports["distribution"]),
            "RABBITMQ_MNESIA_BASE": str(home / "data"),
            "RABBITMQ_LOG_BASE": str(home / "log"),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_PID_FILE": str(home / "data" / "pid"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(home / "enabled_plugins"),
            "RABBITMQ_CONFIG_FILE": str(home / "rabbitmq"),
            "RABBITMQ_CONFIG_FILES": str(home / "conf.d"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(home / "advanced"),
            "RABBITMQ_CONF_ENV_FILE": str(home / "rabbitmq-env.conf"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": (f"-kernel inet_dist_use_interface {{{loopback}}}"),
            # The script then replaces itself by the Erlang VM, so that our child is the node itself.
            "RUNNING_UNDER_SYSTEMD": "true",
        }

    def _command(self, home: Path) -> tuple[Sequence[str], dict[str, str]]:
        return [_required("rabbitmq-server")], self._environment(home)

    def _before_launch(self, home: Path, state: ServerState) -> None:
        port = state.ports["epmd"]
        argv = [_epmd(), "-address", LOOPBACK, "-port", str(port)]
        epmd = self._as_account(argv, home).spawn()
        state.processes["epmd"] = epmd
        state.save(self._state_path)
        if not wait_until(lambda: _accepts(port) or not epmd.alive, EPMD_TIMEOUT_S):
            raise StackError(f"epmd does not answer on port {port}; {self._explain(self.log_tail())}")

    def _data(self, home: Path) -> Sequence[Path]:
        return [home / "data"]

    def _answers(self) -> bool:
        """AMQP greets us, and the management plugin knows our password."""
        try:
            with socket.create_connection((LOOPBACK, self.port), PROBE_TIMEOUT_S) as connection:
                connection.sendall(AMQP_HEADER)
                greeting = connection.recv(16)
            # A method frame on channel 0 with class 10, method 10: Connection.Start.
            if greeting[:3] != b"\x01\x00\x00" or greeting[7:11] != b"\x00\x0a\x00\x0a":
                return False
            self.api("whoami")
        except (OSError, urllib.error.URLError):
            return False
        return True


def _accepts(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as client:
        client.settimeout(PROBE_TIMEOUT_S)
        return client.connect_ex((LOOPBACK, port)) == 0
