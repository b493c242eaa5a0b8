"""The unprivileged account under which servers run when we are root, and a place it can reach.

PostgreSQL refuses to run as root, and no development server should. For an ordinary user all of
this is empty: servers run as that user, in the directory they were given.
"""

import hashlib
import os
import pwd
import shutil
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path

from app.stack.errors import StackError

NAME = "deadsure-stack"
FALLBACK_BASE = Path("/var/tmp")  # noqa: S108  directories below it are created and checked as root's own


@dataclass(frozen=True, slots=True)
class Account:
    """A system account to run servers as."""

    name: str
    uid: int
    gid: int

    def can(self, flag: str, path: Path) -> bool:
        """Ask the system itself: `flag` is one of test(1)'s, such as `-x` or `-w`."""
        asked = subprocess.run(  # noqa: S603  fixed program, own paths
            ["/usr/bin/env", "test", flag, str(path)],
            user=self.uid,
            group=self.gid,
            extra_groups=[],
            cwd="/",
            check=False,
        )
        return asked.returncode == 0


def server_account() -> Account | None:
    """Return the account for servers when running as root, created if missing; else None."""
    if os.geteuid() != 0:
        return None
    if (found := _lookup(NAME)) is not None:
        return found
    useradd = shutil.which("useradd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if useradd is not None:
        # A second command may be creating it at the same moment: what counts is that it exists.
        subprocess.run(  # noqa: S603  fixed program and arguments
            [useradd, "--system", "--no-create-home", "--shell", "/bin/false", NAME],
            capture_output=True,
            check=False,
        )
    found = _lookup(NAME) or _lookup("nobody")
    if found is None:
        raise StackError(f"running as root, and no unprivileged account for the servers: create one named {NAME}")
    return found


def _lookup(name: str) -> Account | None:
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return None
    return Account(name, entry.pw_uid, entry.pw_gid)


def reachable_home(directory: Path, account: Account | None) -> Path:
    """Return `directory`, or a stand-in below /var/tmp when `account` may not enter it.

    A directory below /root or another private parent cannot be entered by the servers' account.
    Opening the parents to everybody is not ours to do, so the data lives elsewhere; which place is
    a function of `directory`, and `Server` writes it into its state file.
    """
    if account is None or account.can("-x", directory):
        return directory
    digest = hashlib.sha256(os.fsencode(directory)).hexdigest()[:12]
    home = FALLBACK_BASE / f"deadsure-{directory.name}-{digest}"
    try:
        home.mkdir(mode=0o711)
    except FileExistsError:
        # /var/tmp is everybody's: take over nothing that root did not make.
        found = home.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != 0:
            raise StackError(f"{home} exists and is not root's directory: remove it") from None
    home.chmod(0o711)
    if not account.can("-x", home):
        raise StackError(
            f"account {account.name} can enter neither {directory} nor {home}:"
            f" choose a stack root in a directory that everybody may pass (chmod o+x)"
        )
    return home


def give(path: Path, account: Account | None) -> None:
    """Make `account` the owner of `path`, when there is an account."""
    if account is not None:
        os.chown(path, account.uid, account.gid)
