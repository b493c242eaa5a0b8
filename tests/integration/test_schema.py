"""The schema: what migrations make, what it refuses, and which releases may work on it."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg2
import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from psycopg2.extensions import connection as PgConnection
from sqlalchemy import create_engine, pool

from app.states import State
from db import business, migrate, models
from db.migrate import SchemaError
from db.session import connect, one, rows
from tests.integration.scene import Scene

ROOT = Path(__file__).parents[2]
HEAD = f"{migrate.NEWEST:04d}"


@pytest.fixture
def empty(empty_database_url: str) -> Iterator[PgConnection]:
    """A session on a database that was never migrated."""
    made = connect(empty_database_url)
    yield made
    made.close()


def tables(connection: PgConnection) -> set[str]:
    return {row[0] for row in rows(connection, "SELECT tablename FROM pg_tables WHERE schemaname = 'public'")}


# models, migrations, enums


def test_the_migrated_schema_is_what_the_models_say(scene: Scene) -> None:
    engine = create_engine(scene.url, poolclass=pool.NullPool)
    with engine.connect() as connection:
        ours = lambda name, kind, *_: not (kind == "table" and name in ("test_effects", "deferred"))  # noqa: E731
        context = MigrationContext.configure(
            connection,
            opts={"compare_type": True, "compare_server_default": True, "include_name": ours},
        )
        assert compare_metadata(context, business.Account.metadata) == []


def test_checks_and_partial_indexes_are_what_the_models_say(scene: Scene, empty_database_url: str) -> None:
    """Alembic compares neither CHECK constraints nor the predicates of indexes nor storage options."""
    engine = create_engine(empty_database_url, poolclass=pool.NullPool)
    business.Account.metadata.create_all(engine)
    fresh = connect(empty_database_url)
    queries = {
        "constraints": "SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint"
        " WHERE connamespace = 'public'::regnamespace",
        "indexes": "SELECT tablename, indexname, indexdef FROM pg_indexes WHERE schemaname = 'public'",
        "options": "SELECT relname, array_to_string(reloptions, ','), '' FROM pg_class"
        " WHERE relnamespace = 'public'::regnamespace AND relkind = 'r'",
    }
    alien = ("test_effects", "deferred", "alembic_version")
    for what, sql in queries.items():
        migrated = {row for row in rows(scene.eyes, sql) if row[0] not in alien}
        modelled = set(rows(fresh, sql))
        assert migrated ^ modelled == set(), what
    fresh.close()


def test_states_have_the_same_words_in_the_same_order_everywhere(scene: Scene) -> None:
    in_database = [row[0] for row in rows(scene.eyes, "SELECT unnest(enum_range(NULL::job_state))::text")]
    assert in_database == [state.value for state in State] == list(models.JOB_STATES)


def test_downgrade_leaves_nothing_and_upgrade_comes_back(empty_database_url: str, empty: PgConnection) -> None:
    assert migrate.upgrade(empty_database_url) == (0, migrate.NEWEST)
    before = tables(empty)
    engine = create_engine(empty_database_url, poolclass=pool.NullPool)
    with engine.connect() as connection:
        configuration = migrate.config()
        configuration.attributes["connection"] = connection
        command.downgrade(configuration, "base")
        connection.commit()
    assert tables(empty) == {"alembic_version"}
    assert rows(empty, "SELECT typname FROM pg_type WHERE typname = 'job_state'") == []
    assert migrate.upgrade(empty_database_url) == (0, migrate.NEWEST)
    assert tables(empty) == before


def test_upgrade_twice_changes_nothing(empty_database_url: str, empty: PgConnection) -> None:
    migrate.upgrade(empty_database_url)
    assert migrate.upgrade(empty_database_url) == (migrate.NEWEST, migrate.NEWEST)
    migrate.check(empty)


def test_two_upgrades_at_once_are_one(empty_database_url: str, empty: PgConnection) -> None:
    with ThreadPoolExecutor(2) as threads:
        upgrades = [threads.submit(run_upgrade, empty_database_url) for _ in range(2)]
        done = [upgrade.result() for upgrade in upgrades]
    assert [code for code, _ in done] == [0, 0], done
    migrate.check(empty)
    assert one(empty, "SELECT count(*) FROM schema_compatibility") == (1,)
    assert one(empty, "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == (0,)


def run_upgrade(url: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "tasks.cli", "db", "upgrade"],
        cwd=ROOT,
        env={**os.environ, "DATABASE_URL": url, "BROKER_URL": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_an_upgrade_passes_by_the_open_transaction_of_a_worker(scene: Scene) -> None:
    worker = scene.worker()
    holder = scene.begun(worker)
    assert migrate.upgrade(scene.url) == (migrate.NEWEST, migrate.NEWEST)
    rows(worker.session, "COMMIT")
    assert scene.state(holder.claimed.job_id) == "queued"


# compatibility


def test_an_empty_database(empty: PgConnection) -> None:
    assert (migrate.current(empty), migrate.compatible_from(empty)) == (0, 0)
    with pytest.raises(SchemaError, match=r"has no Deadsure schema.*needs at least 0002: run `deadsure db upgrade`"):
        migrate.check(empty)


Set = Callable[[int, int], PgConnection]


@pytest.fixture
def schema_at(empty_database_url: str, empty: PgConnection) -> Set:
    """Pretend that the schema is at a revision which serves releases from another one on."""

    def pretend(revision: int, compatible_from: int) -> PgConnection:
        migrate.upgrade(empty_database_url)
        rows(
            empty,
            "UPDATE alembic_version SET version_num = %s; UPDATE schema_compatibility SET compatible_from = %s",
            (f"{revision:04d}", compatible_from),
        )
        return empty

    return pretend


def test_an_older_schema_names_the_command(schema_at: Set, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrate, "OLDEST", 3)
    monkeypatch.setattr(migrate, "NEWEST", 4)
    with pytest.raises(SchemaError, match=r"at schema 0002.*at least 0003: run `deadsure db upgrade`"):
        migrate.check(schema_at(2, 1))


def test_an_older_schema_inside_the_range_is_fine(schema_at: Set, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrate, "NEWEST", 4)
    migrate.check(schema_at(2, 1))


def test_a_newer_schema_that_still_serves_this_release(schema_at: Set) -> None:
    migrate.check(schema_at(migrate.NEWEST + 5, migrate.NEWEST))


def test_a_newer_schema_that_does_not(schema_at: Set) -> None:
    newer = migrate.NEWEST + 5
    with pytest.raises(SchemaError, match=rf"at schema {newer:04d}.*works up to {HEAD}.*install the newer release"):
        migrate.check(schema_at(newer, migrate.NEWEST + 1))


@pytest.mark.parametrize(
    "program", [["celery", "-A", "tasks", "worker"], ["tasks.cli", "relay"]], ids=["worker", "relay"]
)
def test_a_program_on_an_empty_database_exits_and_says_what_to_run(empty_database_url: str, program: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *program],
        cwd=ROOT,
        env={**os.environ, "DATABASE_URL": empty_database_url, "BROKER_URL": "amqp://x:y@127.0.0.1:9//"},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert "deadsure db upgrade" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == (78 if program[0] == "celery" else 1)


# what the constraints refuse

JOB: dict[str, Any] = {
    "type": "t",
    "payload": "{}",
    "payload_digest": b"",
    "correlation_id": "c",
}


def insert(scene: Scene, table: str, **columns: Any) -> None:
    names = ", ".join(columns)
    marks = ", ".join(f"%({name})s" for name in columns)
    rows(scene.eyes, f"INSERT INTO {table} ({names}) VALUES ({marks})", columns)


WORKER = str(uuid.uuid4())
JOBS_REFUSED = [
    ("running_has_owner", {"state": "running"}),
    ("running_has_owner", {"state": "queued", "worker_id": WORKER}),
    ("running_has_owner", {"state": "quarantined", "worker_id": WORKER, "cause": "c", "episode": 1}),
    ("succeeded_has_result_key", {"state": "succeeded", "finished_at": "now"}),
    ("succeeded_has_result_key", {"state": "queued", "result_key": "k"}),
    ("retry_has_time", {"state": "retry_wait"}),
    ("quarantined_has_cause", {"state": "quarantined", "episode": 1}),
    ("quarantined_has_cause", {"state": "quarantined", "cause": "c"}),
    ("terminal_has_finish_time", {"state": "succeeded", "result_key": "k"}),
    ("terminal_has_finish_time", {"state": "cancelled"}),
    ("terminal_has_finish_time", {"state": "queued", "finished_at": "now"}),
    ("counters_not_negative", {"attempt": -1}),
    ("counters_not_negative", {"failures": -1}),
    ("counters_not_negative", {"crashes": -1}),
    ("counters_not_negative", {"stalls": -1}),
    ("counters_not_negative", {"releases": -1}),
    ("priority_range", {"priority": -1}),
    ("priority_range", {"priority": 10}),
]


@pytest.mark.parametrize(("name", "columns"), JOBS_REFUSED)
def test_jobs_refuses_what_cannot_be(scene: Scene, name: str, columns: dict[str, Any]) -> None:
    with pytest.raises(psycopg2.errors.CheckViolation, match=f'"ck_jobs_{name}"'):
        insert(scene, "jobs", job_id=str(uuid.uuid4()), **{**JOB, **columns})


@pytest.mark.parametrize(
    "columns",
    [
        {},
        {"state": "running", "worker_id": WORKER},
        {"state": "succeeded", "result_key": "k", "finished_at": "now"},
        {"state": "retry_wait", "not_before": "now"},
        {"state": "quarantined", "cause": "c", "episode": 1},
        {"state": "cancelled", "finished_at": "now"},
        {"priority": 9},
    ],
)
def test_jobs_takes_what_can_be(scene: Scene, columns: dict[str, Any]) -> None:
    insert(scene, "jobs", job_id=str(uuid.uuid4()), **{**JOB, **columns})


def test_a_state_that_is_none_is_refused(scene: Scene) -> None:
    with pytest.raises(psycopg2.errors.InvalidTextRepresentation):
        insert(scene, "jobs", job_id=str(uuid.uuid4()), **JOB, state="done")


OUTBOX = {"job_id": WORKER, "queue": "q", "type": "t", "schema_version": 1, "correlation_id": "c"}
LEASE = {"worker_id": WORKER, "name": "n", "hostname": "h", "pid": 1, "lock_key": 1, "lease_until": "now"}


@pytest.mark.parametrize(
    ("table", "name", "columns"),
    [
        ("outbox", "sent_has_time", {**OUTBOX, "sends": 1}),
        ("outbox", "sent_has_time", {**OUTBOX, "sent_at": "now"}),
        ("outbox", "sends_not_negative", {**OUTBOX, "sends": -1, "sent_at": "now"}),
        ("workers", "lost_has_cause", {**LEASE, "lost_at": "now"}),
        ("workers", "lost_has_cause", {**LEASE, "lost_cause": "killed"}),
    ],
)
def test_other_tables_refuse_what_cannot_be(scene: Scene, table: str, name: str, columns: dict[str, Any]) -> None:
    with pytest.raises(psycopg2.errors.CheckViolation, match=f'"ck_{table}_{name}"'):
        insert(scene, table, **columns)


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("status_known", {"status": "maybe"}),
        ("finished_has_time", {"status": "finished"}),
        ("finished_has_time", {"status": "started", "finished_at": "now"}),
    ],
)
def test_the_ledger_of_effects_refuses_what_cannot_be(scene: Scene, name: str, columns: dict[str, Any]) -> None:
    row = {"job_id": str(scene.job()), "name": "n", "attempt": 1, "idempotency_key": "k"}
    with pytest.raises(psycopg2.errors.CheckViolation, match=f'"ck_effects_{name}"'):
        insert(scene, "effects", **{**row, **columns})


def test_two_workers_never_share_a_lock_key(scene: Scene) -> None:
    insert(scene, "workers", **LEASE)
    with pytest.raises(psycopg2.errors.UniqueViolation):
        insert(scene, "workers", **{**LEASE, "worker_id": str(uuid.uuid4())})


def test_the_journal_has_no_foreign_key(scene: Scene) -> None:
    """A duplicate delivery is recorded while the job's row is locked by its owner."""
    job_id = scene.job()
    with scene.holding(job_id):
        rows(scene.eyes, "SET lock_timeout = '200ms'")
        insert(scene, "job_events", job_id=str(job_id), event="received")
    assert (
        scene.ask("SELECT count(*) FROM pg_constraint WHERE conrelid = 'job_events'::regclass AND contype = 'f'") == 0
    )
