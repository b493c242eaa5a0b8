"""RabbitMQ and promtool from the system's package manager, without a server that starts by itself.

Debian's packages start the system's own broker on port 5672, and a Prometheus, as soon as they are installed. A
policy-rc.d script that answers 101 ("forbidden") keeps every package of this one apt run from starting anything; what
was there before is put back.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from app.stack.errors import StackError
from app.stack.rabbitmq import rabbitmq_script

POLICY = Path("/usr/sbin/policy-rc.d")
POLICY_SAVED = POLICY.with_name("policy-rc.d.before-deadsure")
FORBID = "#!/bin/sh\nexit 101\n"


@dataclass(frozen=True)
class Wanted:
    """A program, its package (and service) for apt and for Homebrew, and what else can be done."""

    name: str
    apt: str
    brew: str
    otherwise: str


RABBITMQ = Wanted(
    "RabbitMQ",
    apt="rabbitmq-server",
    brew="rabbitmq",
    otherwise="install RabbitMQ 3.10 or later, or use the embedded Valkey (BROKER=valkey)",
)
PROMTOOL = Wanted(
    "promtool", apt="prometheus", brew="prometheus", otherwise="put Prometheus' promtool 2.42 or later on PATH"
)


def ensure_rabbitmq() -> None:
    """Install RabbitMQ with apt or Homebrew unless it is there. Raises StackError when neither can.

    Says on standard error what it does. Takes root or `sudo -n` on Debian, and a minute or two.
    """
    if rabbitmq_script("rabbitmq-server") is None:
        _install(RABBITMQ)
        if rabbitmq_script("rabbitmq-server") is None:
            raise StackError("RabbitMQ was installed, but its server script was not found")


def ensure_promtool() -> None:
    """Install promtool, which tests the alert rules, with apt or Homebrew unless it is there. Raises StackError."""
    if shutil.which("promtool") is None:
        _install(PROMTOOL)
        if shutil.which("promtool") is None:
            raise StackError("Prometheus was installed, but promtool was not found on PATH")


def _install(wanted: Wanted) -> None:
    if shutil.which("apt-get"):
        _install_with_apt(wanted)
    elif shutil.which("brew"):
        _run(["brew", "install", wanted.brew], wanted)
    else:
        raise StackError(f"{wanted.name} is not installed, and neither apt-get nor brew is here: {wanted.otherwise}")


def _install_with_apt(wanted: Wanted) -> None:
    become_root: list[str] = []
    if os.geteuid() != 0:
        become_root = ["sudo", "-n"]
        if not shutil.which("sudo") or _fails(["sudo", "-n", "true"]):
            raise StackError(
                f"{wanted.name} is not installed, and we may not install it: run"
                f" `sudo apt-get install {wanted.apt} && sudo systemctl disable --now {wanted.apt}`"
            )
    apt = [*become_root, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-y", "-q"]
    with _no_service_starts(become_root, wanted):
        _run([*apt, "update"], wanted)
        _run([*apt, "install", "--no-install-recommends", wanted.apt], wanted)
    if shutil.which("systemctl"):  # nor at the next boot
        _fails([*become_root, "systemctl", "disable", wanted.apt])


@contextmanager
def _no_service_starts(become_root: list[str], wanted: Wanted) -> Iterator[None]:
    """Forbid service starts by package scripts meanwhile; restore the policy that was there."""
    existed = POLICY.exists() or POLICY.is_symlink()
    if existed:
        _run([*become_root, "mv", str(POLICY), str(POLICY_SAVED)], wanted)
    try:
        _run([*become_root, "sh", "-c", f"printf '{FORBID!s}' > {POLICY} && chmod 755 {POLICY}"], wanted)
        yield
    finally:
        _run([*become_root, "rm", "-f", str(POLICY)], wanted)
        if existed:
            _run([*become_root, "mv", str(POLICY_SAVED), str(POLICY)], wanted)


def _run(argv: list[str], wanted: Wanted) -> None:
    print("+ " + " ".join(argv).replace("\n", "\\n"), file=sys.stderr, flush=True)
    try:
        subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, stdout=sys.stderr)  # noqa: S603  fixed commands
    except subprocess.CalledProcessError as error:
        raise StackError(
            f"installing {wanted.name} failed ({error}): see the output above, or {wanted.otherwise}"
        ) from error


def _fails(argv: list[str]) -> bool:
    done = subprocess.run(argv, check=False, stdin=subprocess.DEVNULL, capture_output=True)  # noqa: S603  fixed commands
    return done.returncode != 0
