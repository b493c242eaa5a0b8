"""Actors for race tests on one database: sessions, workers with a lease, jobs, and what became of them.

Every function of `app` that a test calls runs on a real session of its own, so "another worker" is another connection.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import UUID

from psycopg2.extensions import connection as PgConnection
from pydantic import BaseModel

from app import claim, lease, submit
from app.claim import Delivery
from app.finish import Holder
from app.job_types import JobType
from db.session import connect, one, rows
from tests.nodes.waiting import wait_for

T = TypeVar("T")
STUCK_S = 15


class Number(BaseModel):
    """A payload that tells jobs apart."""

    n: int = 0


PLAIN = JobType(name="scene.plain", payload=Number)


@dataclass
class Worker:
    """A registered worker: `keeper` holds its advisory lock, `session` is where its attempts run."""

    worker_id: UUID
    lock_key: int
    keeper: PgConnection
    session: PgConnection
    pid: int


class Background:
    """A call in a thread of its own; `result` waits for it and raises what it raised."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._outcome: list[Any] = []
        self._error: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            self._outcome.append(call())
        except BaseException as error:  # noqa: BLE001  handed to whoever asks for the result
            self._error.append(error)

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def result(self, timeout_s: float = 10) -> Any:
        self._thread.join(timeout_s)
        assert self.ended, f"still busy after {timeout_s:g} s"
        if self._error:
            raise self._error[0]
        return self._outcome[0]


class Scene:
    """One database and who acts in it."""

    # Whoever a failed test left behind goes first: an open transaction would hold the rows.
    EMPTY = """
    DO $$ DECLARE it text; BEGIN
        PERFORM pg_terminate_backend(pid, 5000) FROM pg_stat_activity
          WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend';
        FOR it IN SELECT tablename FROM pg_tables WHERE schemaname = 'public'
                     AND tablename NOT IN ('alembic_version', 'schema_compatibility', 'jobs', 'accounts')
        LOOP EXECUTE format('DELETE FROM %I', it); END LOOP;
        DELETE FROM jobs; DELETE FROM accounts;
    END $$
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._open: list[PgConnection] = []
        self._workers: list[Worker] = []
        self.eyes = self.connect()

    def empty(self) -> None:
        """Delete all rows but those of the migrations."""
        rows(self.eyes, self.EMPTY)

    def empty_jobs(self) -> None:
        """Delete the jobs and what belongs to them; workers stay."""
        rows(
            self.eyes,
            "DELETE FROM quarantine_entries; DELETE FROM dead_letters; DELETE FROM job_events;"
            " DELETE FROM outbox; DELETE FROM jobs",
        )

    def worker_again(self, number: int) -> Worker:
        """Worker `number` of this scene, with a fresh lease: registered once, used by many examples."""
        while len(self._workers) <= number:
            self._workers.append(self.worker())
        found = self._workers[number]
        self.do("UPDATE workers SET lease_until = clock_timestamp() + interval '30 s' WHERE worker_id = %s", found)
        return found

    def connect(self, name: str = "deadsure scene") -> PgConnection:
        """A session in autocommit, closed with the scene; what waits for ever in it fails instead."""
        made = connect(self.url, name, statement_timeout_s=STUCK_S)
        self._open.append(made)
        return made

    def close(self) -> None:
        for connection in self._open:
            connection.close()

    # workers

    def worker(self, *, lease_s: float = 30, pooled: bool = False, pid: int = 4711) -> Worker:
        """A worker as its keeper registers it; `lease_s` may be negative: then the lease is over."""
        worker_id, lock_key = uuid.uuid4(), uuid.uuid4().int >> 65
        keeper = self.connect()
        rows(keeper, "SELECT pg_advisory_lock(%s)", (lock_key,))
        rows(
            keeper,
            lease.REGISTER,
            {
                "worker_id": str(worker_id),
                "name": "scene@host",
                "hostname": "host",
                "pid": pid,
                "lock_key": lock_key,
                "pooled": pooled,
                "knows": [],
                "accepts": [],
                "queues": None,
                "lease_s": lease_s,
            },
        )
        return Worker(worker_id, lock_key, keeper, self.connect(f"deadsure job {worker_id}"), pid)

    def end_lease(self, worker: Worker) -> None:
        """The worker has not renewed for longer than its lease."""
        self.do("UPDATE workers SET lease_until = clock_timestamp() - interval '1 s' WHERE worker_id = %s", worker)

    def lose(self, worker: Worker) -> None:
        """A sweeper has declared the worker lost."""
        self.lose_id(worker.worker_id)

    def lose_id(self, worker_id: UUID) -> None:
        rows(
            self.eyes,
            "UPDATE workers SET lost_at = clock_timestamp(), lost_cause = 'stalled' WHERE worker_id = %s",
            (str(worker_id),),
        )

    def end_session(self, worker: Worker) -> None:
        """The keeper's session ends, and with it the advisory lock."""
        worker.keeper.close()
        wait_for(lambda: not self.locked(worker.lock_key), 10, "the server frees the lock", poll_s=0.005)

    def locked(self, lock_key: int) -> bool:
        """Whether a session holds the advisory lock."""
        return bool(
            self.ask(
                "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted"
                " AND (classid::bigint << 32) | objid::bigint = %s",
                (lock_key,),
            )
        )

    def worker_row(self, worker: Worker | UUID) -> dict[str, Any]:
        """The row of `workers`."""
        wanted = worker.worker_id if isinstance(worker, Worker) else worker
        return self.record("SELECT * FROM workers WHERE worker_id = %s", (str(wanted),))

    # jobs

    def job(self, *, n: int = 0, **columns: Any) -> UUID:
        """A submitted job; `columns` are then set on its row, as if it had lived already."""
        new = submit.prepare(PLAIN, Number(n=n), job_id=uuid.uuid4())
        submit.within(lambda sql, values: rows(self.eyes, sql, values), [new])
        self.change(new.job_id, **columns)
        return new.job_id

    def change(self, job_id: UUID, **columns: Any) -> None:
        """Set columns of a job's row."""
        if columns:
            assignments = ", ".join(f"{name} = %({name})s" for name in columns)
            rows(
                self.eyes,
                f"UPDATE jobs SET {assignments} WHERE job_id = %(_id)s",
                {**columns, "_id": str(job_id)},
            )

    def claimed(self, worker: Worker, job_id: UUID | None = None) -> Holder:
        """A job (a new one unless given) that `worker` has claimed with a commit."""
        found = job_id or self.job()
        delivery = self.delivery(found)
        won = claim.claim(worker.session, delivery, worker.worker_id, worker.pid)
        assert won is not None
        return Holder(won, delivery, worker.worker_id)

    def begun(self, worker: Worker, job_id: UUID | None = None) -> Holder:
        """A job on the clean path: `worker` holds its row in an open transaction."""
        found = job_id or self.job()
        self.sent(found)
        delivery = self.delivery(found)
        won = claim.begin_atomic(worker.session, delivery, worker.worker_id)
        assert won is not None
        return Holder(won, delivery, worker.worker_id)

    def sent(self, job_id: UUID, sends: int = 1) -> None:
        """The relay has published the debt `sends` times."""
        rows(
            self.eyes,
            "UPDATE outbox SET sends = %s, sent_at = clock_timestamp() WHERE job_id = %s",
            (sends, str(job_id)),
        )

    @staticmethod
    def delivery(job_id: UUID, **changed: Any) -> Delivery:
        """The first delivery of the first copy, as RabbitMQ tells it."""
        given: dict[str, Any] = {
            "copy": 1,
            "episode": 1,
            "delivery_tag": "1",
            "redelivered": False,
            "redelivered_known": True,
        }
        return Delivery(job_id, **{**given, **changed})

    # what became of them

    def row(self, job_id: UUID) -> dict[str, Any]:
        """The job's row."""
        return self.record("SELECT * FROM jobs WHERE job_id = %s", (str(job_id),))

    def state(self, job_id: UUID) -> str:
        return str(self.row(job_id)["state"])

    def debt(self, job_id: UUID) -> dict[str, Any] | None:
        """The job's outbox row, None when it is paid."""
        found = self.records("SELECT * FROM outbox WHERE job_id = %s", (str(job_id),))
        return found[0] if found else None

    def owed(self, job_id: UUID) -> str | None:
        """What is owed for the job: kind and episode of its debt, as "wake 1"."""
        debt = self.debt(job_id)
        return f"{debt['kind']} {debt['episode']}" if debt else None

    def journal(self, job_id: UUID) -> list[str]:
        """The events of a job, in the order in which they were written."""
        found = rows(self.eyes, "SELECT event FROM job_events WHERE job_id = %s ORDER BY event_id", (str(job_id),))
        return [row[0] for row in found]

    def entries(self, job_id: UUID) -> list[dict[str, Any]]:
        """The quarantine entries of a job, oldest first."""
        return self.records("SELECT * FROM quarantine_entries WHERE job_id = %s ORDER BY episode", (str(job_id),))

    def picture(self, *, but: str | None = None) -> list[list[tuple[Any, ...]]]:
        """All rows of all tables that arrows write (but one), to show that nothing was written."""
        tables = (
            "jobs",
            "outbox",
            "job_events",
            "quarantine_entries",
            "quarantine_actions",
            "effects",
            "dead_letters",
            "test_effects",
        )
        return [rows(self.eyes, f"SELECT t::text FROM {table} t ORDER BY 1") for table in tables if table != but]

    # plumbing

    def ask(self, sql: str, parameters: Any = None) -> Any:
        """The first column of the first row."""
        found = one(self.eyes, sql, parameters)
        return found[0] if found else None

    def do(self, sql: str, worker: Worker) -> None:
        """One statement about a worker."""
        rows(self.eyes, sql, (str(worker.worker_id),))

    def records(self, sql: str, parameters: Any = None) -> list[dict[str, Any]]:
        """Rows with the names of their columns."""
        with self.eyes.cursor() as cursor:
            cursor.execute(sql, parameters)
            names = [column.name for column in cursor.description or ()]
            return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def record(self, sql: str, parameters: Any = None) -> dict[str, Any]:
        """The one row that there is."""
        (found,) = self.records(sql, parameters)
        return found

    @contextmanager
    def holding(self, job_id: UUID) -> Iterator[PgConnection]:
        """Another connection holds the job's row; rolled back at the end."""
        other = self.connect()
        rows(other, "BEGIN; SELECT FROM jobs WHERE job_id = %s FOR NO KEY UPDATE", (str(job_id),))
        try:
            yield other
        finally:
            if not other.closed:
                rows(other, "ROLLBACK")

    def at_once(self, *calls: Callable[[], T]) -> list[T]:
        """Run the calls in threads that start together; their results in order."""
        gate = threading.Barrier(len(calls))

        def through(call: Callable[[], T]) -> T:
            gate.wait(10)
            return call()

        running = [Background(lambda call=call: through(call)) for call in calls]  # type: ignore[misc]
        return [one_of.result() for one_of in running]

    def wait_until_blocked(self, connection: PgConnection | None = None) -> None:
        """Wait until a session (any but ours, or the one given) waits for a lock."""
        pid = connection.info.backend_pid if connection else None
        wait_for(
            lambda: self.ask(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
                " AND wait_event_type = 'Lock' AND (%(pid)s::int IS NULL OR pid = %(pid)s)",
                {"pid": pid},
            ),
            10,
            "the other session waits for the lock",
            poll_s=0.005,
        )


def kill_sessions(eyes: PgConnection, application_name: str) -> int:
    """End the sessions of that name at the server; how many there were."""
    found = one(
        eyes,
        "SELECT count(pg_terminate_backend(pid, 5000)) FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name = %s",
        (application_name,),
    )
    return int(found[0]) if found else 0


__all__ = ["PLAIN", "Background", "Number", "Scene", "Worker", "kill_sessions"]
