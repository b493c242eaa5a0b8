"""RabbitMQ from the system's package manager, without a broker that starts by itself.

Debian's package starts the system's own node on port 5672 as soon as it is installed. A policy-rc.d
script that answers 101 ("forbidden") keeps every package of this one apt run from starting anything;
what was there before is put back.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.stack.errors import StackError
from app.stack.rabbitmq import rabbitmq_script

POLICY = Path("/usr/sbin/policy-rc.d")
POLICY_SAVED = POLICY.with_name("policy-rc.d.before-deadsure")
FORBID = "#!/bin/sh\nexit 101\n"


def ensure_rabbitmq() -> None:
    """Install RabbitMQ with apt or Homebrew unless it is there. Raises StackError when neither can.

    Says on standard error what it does. Takes root or `sudo -n` on Debian, and a minute or two.
    """
    if rabbitmq_script("rabbitmq-server") is not None:
        return
    if shutil.which("apt-get"):
        _install_with_apt()
    elif shutil.which("brew"):
        _run(["brew", "install", "rabbitmq"])
    else:
        raise StackError(
            "RabbitMQ is not installed, and neither apt-get nor brew is here:"
            " install RabbitMQ 3.10 or later, or use the embedded Valkey (BROKER=valkey)"
        )
    if rabbitmq_script("rabbitmq-server") is None:
        raise StackError("RabbitMQ was installed, but its server script was not found")


def _install_with_apt() -> None:
    become_root: list[str] = []
    if os.geteuid() != 0:
        become_root = ["sudo", "-n"]
        if not shutil.which("sudo") or _fails(["sudo", "-n", "true"]):
            raise StackError(
                "RabbitMQ is not installed, and we may not install it: run"
                " `sudo apt-get install rabbitmq-server && sudo systemctl disable --now rabbitmq-server`"
            )
    apt = [*become_root, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-y", "-q"]
    with _no_service_starts(become_root):
        _run([*apt, "update"])
        _run([*apt, "install", "--no-install-recommends", "rabbitmq-server"])
    if shutil.which("systemctl"):  # nor at the next boot
        _fails([*become_root, "systemctl", "disable", "rabbitmq-server"])


@contextmanager
def _no_service_starts(become_root: list[str]) -> Iterator[None]:
    """Forbid service starts by package scripts meanwhile; restore the policy that was there."""
    existed = POLICY.exists() or POLICY.is_symlink()
    if existed:
        _run([*become_root, "mv", str(POLICY), str(POLICY_SAVED)])
    try:
        _run([*become_root, "sh", "-c", f"printf '{FORBID!s}' > {POLICY} && chmod 755 {POLICY}"])
        yield
    finally:
        _run([*become_root, "rm", "-f", str(POLICY)])
        if existed:
            _run([*become_root, "mv", str(POLICY_SAVED), str(POLICY)])


def _run(argv: list[str]) -> None:
    print("+ " + " ".join(argv).replace("\n", "\\n"), file=sys.stderr, flush=True)
    try:
        subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, stdout=sys.stderr)  # noqa: S603  fixed commands
    except subprocess.CalledProcessError as error:
        raise StackError(
            f"installing RabbitMQ failed ({error}): see the output above, or install RabbitMQ 3.10 or later yourself"
        ) from error


def _fails(argv: list[str]) -> bool:
    done = subprocess.run(argv, check=False, stdin=subprocess.DEVNULL, capture_output=True)  # noqa: S603  fixed commands
    return done.returncode != 0
