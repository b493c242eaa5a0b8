"""The lease of a worker process: one row in `workers` for all its jobs, kept alive by its main process.

Protocol. The keeper holds a session with an advisory lock and renews `lease_until` by the database's clock every
`lease_renew_s`. The worker trusts its lease only until `trusted_until`, counted from *before* the renewal was sent, on
a clock that runs in suspend: so it stops trusting itself before anybody else may. A sweeper takes the lease away by
setting `lost_at`; from then on the renewal finds no row, the worker's old jobs are lost to it, and it starts again
under a new random id. A renewal that comes late but before any sweeper is fine: nobody has acted on the expiry.

The children read id and trust from memory shared over fork, so that a new id reaches them at once.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import struct
import threading
import uuid
import zlib
from collections.abc import Sequence
from contextlib import suppress

import psycopg2
from psycopg2.extensions import connection as PgConnection

from app.clock import boottime_s, pause_s
from app.journal import log
from app.limit_clock import Outages
from app.settings import Settings
from db.session import connect, one, rows

REGISTER = """
INSERT INTO workers (worker_id, name, hostname, pid, lock_key, pooled, knows, accepts, queues, locked_at, lease_until)
VALUES (%(worker_id)s, %(name)s, %(hostname)s, %(pid)s, %(lock_key)s, %(pooled)s, to_jsonb(%(knows)s::text[]),
        to_jsonb(%(accepts)s::text[]), to_jsonb(%(queues)s::text[]), clock_timestamp(),
        clock_timestamp() + make_interval(secs => %(lease_s)s))
"""
# The lock is taken before its key is published: whoever reads the key can find the lock.
RELOCK = """
UPDATE workers SET lock_key = %(lock_key)s, locked_at = clock_timestamp(), pooled = %(pooled)s
 WHERE worker_id = %(worker_id)s AND lost_at IS NULL AND stopped_at IS NULL
"""
RENEW = """
UPDATE workers SET lease_until = clock_timestamp() + make_interval(secs => %(lease_s)s),
                   queues = to_jsonb(%(queues)s::text[])
 WHERE worker_id = %(worker_id)s AND lost_at IS NULL AND stopped_at IS NULL
RETURNING 1
"""
# Only a worker without running jobs may leave; otherwise its lease has to end by itself.
LEAVE = """
UPDATE workers SET stopped_at = clock_timestamp()
 WHERE worker_id = %(worker_id)s AND stopped_at IS NULL
   AND NOT EXISTS (SELECT FROM jobs WHERE jobs.worker_id = workers.worker_id AND state = 'running')
"""
LEASE, CHECK = struct.Struct("<16sd"), struct.Struct("<I")
LEAVING = LEASE.size + CHECK.size  # one byte behind the lease


class SharedLease:
    """Worker id and trust window in memory that forked children share; written by the keeper alone.

    A read that meets a write sees a checksum that does not fit, and reads again.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self._read_raw, self._read_id = bytes(16), uuid.UUID(int=0)  # the id as last read: it hardly ever changes
        self.write(self._read_id, 0.0)

    def write(self, worker_id: uuid.UUID, trusted_until: float) -> None:
        """Publish id and window."""
        lease = LEASE.pack(worker_id.bytes, trusted_until)
        self._memory[: LEASE.size + CHECK.size] = lease + CHECK.pack(zlib.crc32(lease))

    @property
    def leaving(self) -> bool:
        """Whether the worker was asked to stop; True for good once it is."""
        return bool(self._memory[LEAVING])

    def leave(self) -> None:
        """Tell every child that the worker was asked to stop."""
        self._memory[LEAVING] = 1

    def read(self) -> tuple[uuid.UUID, float]:
        """(worker id, trusted until, in `boottime_s`), never torn."""
        while True:
            written = self._memory[: LEASE.size + CHECK.size]
            lease = written[: LEASE.size]
            if CHECK.unpack(written[LEASE.size :])[0] == zlib.crc32(lease):
                raw, trusted_until = LEASE.unpack(lease)
                if raw != self._read_raw:
                    self._read_raw, self._read_id = raw, uuid.UUID(bytes=raw)
                return self._read_id, trusted_until


class Keeper(threading.Thread):
    """Keeps the lease of this process. `start_lease` registers in the caller's thread, `start` goes on renewing."""

    def __init__(self, settings: Settings, name: str, knows: list[str], accepts: Sequence[str] = ()) -> None:
        super().__init__(name="deadsure-keeper", daemon=True)
        self.shared = SharedLease()
        self.worker_id = uuid.uuid4()
        self.queues: list[str] | None = None  # what the worker consumes; written with the next renewal
        self.accepts = list(accepts)
        self._settings, self._node, self._knows = settings, name, knows
        self.outages = Outages(2 * settings.lease_renew_s)
        self._connection: PgConnection | None = None
        self._stop_reader, self._stop_writer = socket.socketpair()

    def start_lease(self) -> uuid.UUID:
        """Register once; raises psycopg2.Error when the database is away."""
        self._register()
        return self.worker_id

    def run(self) -> None:
        """Renew until stopped; a lost session is replaced at once, a lost lease by a new incarnation."""
        tries = 0
        wait_s = self._settings.lease_renew_s
        while not self._wait(wait_s):
            try:
                self._renew()
                self.outages.good()
                tries, wait_s = 0, self._settings.lease_renew_s
            except psycopg2.Error as error:
                if tries == 0:
                    log.warning("lease.session_lost", worker_id=str(self.worker_id), error=type(error).__name__)
                self.outages.broken()
                self._drop()
                wait_s = pause_s(tries, 0.05, min(1.0, self._settings.lease_renew_s)) if tries else 0.0
                tries += 1

    def stop(self) -> None:
        """End the lease in order: other workers need not wait for it. Best effort when the database is away."""
        self._stop_writer.send(b"x")
        if self.is_alive():
            self.join(timeout=self._settings.lease_renew_s + 5)
        if self._connection is not None and not self._connection.closed:
            with suppress(psycopg2.Error):
                rows(self._connection, LEAVE, {"worker_id": str(self.worker_id)})
        self._drop()
        if not self.is_alive():
            self._stop_reader.close()
            self._stop_writer.close()

    def _wait(self, seconds: float) -> bool:
        """Sleep until time is over or the session breaks (False), or `stop` was called (True)."""
        watched: list[socket.socket | PgConnection] = [self._stop_reader]
        if self._connection is not None and not self._connection.closed:
            watched.append(self._connection)
        ready, _, _ = select.select(watched, [], [], seconds)
        return self._stop_reader in ready

    def _renew(self) -> None:
        if self._connection is None:
            self._connect(RELOCK)
        assert self._connection is not None
        before = boottime_s()
        values = {"worker_id": str(self.worker_id), "lease_s": self._settings.lease_s, "queues": self.queues}
        if one(self._connection, RENEW, values):
            self.shared.write(self.worker_id, before + self._settings.lease_s)
            return
        log.error(
            "lease.lost",
            worker_id=str(self.worker_id),
            consequence="its running jobs belong to other workers now; their late results will not be written",
        )
        self._drop()
        self.worker_id = uuid.uuid4()
        self._register()

    def _register(self) -> None:
        before = boottime_s()
        self._connect(REGISTER)
        self.shared.write(self.worker_id, before + self._settings.lease_s)
        log.info("lease.registered", worker_id=str(self.worker_id), lease_s=self._settings.lease_s)

    def _connect(self, statement: str) -> None:
        """A new session with a new lock key: the old session may still be alive at the server."""
        connection = connect(
            self._settings.need_database(),
            f"deadsure keeper {self._node}",
            statement_timeout_s=self._settings.lease_s / 2,
        )
        lock_key = uuid.uuid4().int >> 65
        rows(connection, "SELECT pg_advisory_lock(%s)", (lock_key,))
        backend = one(connection, "SELECT pg_backend_pid()")
        # Behind a pooler the protocol's backend pid is the pooler's own, and the lock belongs to nobody in particular.
        pooled = self._settings.pooled or backend is None or backend[0] != connection.info.backend_pid
        rows(
            connection,
            statement,
            {
                "worker_id": str(self.worker_id),
                "name": self._node,
                "hostname": socket.gethostname(),
                "pid": os.getpid(),
                "lock_key": lock_key,
                "pooled": pooled,
                "knows": self._knows,
                "accepts": self.accepts,
                "queues": self.queues,
                "lease_s": self._settings.lease_s,
            },
        )
        self._connection = connection

    def _drop(self) -> None:
        if self._connection is not None:
            with suppress(psycopg2.Error):
                self._connection.close()
            self._connection = None
