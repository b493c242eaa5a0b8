"""Free TCP ports on 127.0.0.1, outside the range the kernel gives to outgoing connections.

A port of the ephemeral range is a trap for a server that will be restarted: while it is down, a
client that keeps reconnecting may be given that very port as its own source port and, on Linux,
ends up connected to itself.
"""

import random
import socket
from collections.abc import Collection

LOOPBACK = "127.0.0.1"
LOWEST, HIGHEST = 15_000, 31_999  # below the ephemeral ranges of Linux (32768) and macOS (49152)
ATTEMPTS = 200


def is_free(port: int) -> bool:
    """Return True when a server could listen on 127.0.0.1:`port` right now.

    Connections of an earlier server in TIME_WAIT do not count, as servers bind with SO_REUSEADDR.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    # macOS lets a second socket bind beside a wildcard listener: ask whether anybody answers.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as client:
        client.settimeout(1.0)
        return client.connect_ex((LOOPBACK, port)) != 0


def free_port(taken: Collection[int] = ()) -> int:
    """Return a free port that is not in `taken`. Raises OSError when 200 random picks find none."""
    for _ in range(ATTEMPTS):
        port = random.randint(LOWEST, HIGHEST)  # noqa: S311  a port is no secret
        if port not in taken and is_free(port):
            return port
    raise OSError(f"no free port on {LOOPBACK} between {LOWEST} and {HIGHEST}")
