"""Query plans on a million jobs: nothing that runs in a loop reads a whole table.

The statements are the programs' own constants, explained with real values, as the driver sends them.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
from psycopg2.extensions import connection as PgConnection

from app import (
    batch_cancel,
    batch_story,
    batches,
    cancel,
    candidate,
    claim,
    completion,
    dead_letters,
    effects,
    finish,
    job,
    lease,
    outbox,
    park,
    progress,
    release,
    repair,
    replay,
    replay_walk,
    settle,
    story,
    submit,
    sweep,
)
from app.ages import Age
from app.metrics import figures
from app.retention import jobs as old_jobs
from app.retention import rest as old_rest
from app.retention.archive import JOBS as EXPORTED
from app.retention.policy import Retention
from app.retention.prune import PAGE_ROWS
from app.stack import Postgres
from app.states import State
from db.prepared import PlanningConnection, Prepared
from db.session import connect, one, rows
from tasks import results
from tests.nodes import database as databases

JOBS = 1_000_000
DEBTS = 200_000
BATCH = 100_000  # children of one batch, all of them waiting
LARGE = ("jobs", "outbox", "job_events")

# Mostly succeeded, as a table is that has run for a while; the newest 200,000 wait.
FILL = f"""
INSERT INTO workers (worker_id, name, hostname, pid, lock_key, lease_until)
SELECT md5('worker' || n)::uuid, 'w' || n, 'host', n, n, clock_timestamp() + interval '1 h'
  FROM generate_series(1, 20) n;
INSERT INTO jobs (job_id, type, payload, payload_digest, state, result_key, worker_id, finished_at, not_before, cause,
                  episode, correlation_id, batch_id, created_at)
SELECT md5(n::text)::uuid, CASE (n / 7) % 50 WHEN 0 THEN 'rare' ELSE 'reports.export' END, '{{}}', '', state::job_state,
       CASE state WHEN 'succeeded' THEN 'job' END,
       CASE state WHEN 'running' THEN md5('worker' || n % 20 + 1)::uuid END,
       CASE WHEN state IN ('succeeded', 'cancelled') THEN clock_timestamp() END,
       CASE state WHEN 'retry_wait' THEN clock_timestamp() END,
       CASE state WHEN 'quarantined' THEN 'permanent' END, CASE state WHEN 'quarantined' THEN 1 ELSE 0 END,
       '', CASE WHEN n > {JOBS - BATCH} THEN md5('1')::uuid END, clock_timestamp() - make_interval(secs => {JOBS} - n)
  FROM generate_series(1, {JOBS}) n, LATERAL (SELECT CASE
       WHEN n > {JOBS - DEBTS} THEN CASE WHEN n % 100 = 0 THEN 'retry_wait' ELSE 'queued' END
       WHEN n % 2000 = 0 THEN 'running' WHEN n % 2000 = 1 THEN 'quarantined' WHEN n % 200 = 2 THEN 'cancelled'
       ELSE 'succeeded' END AS state) AS s;
INSERT INTO outbox (job_id, queue, type, schema_version, priority, correlation_id, sends, sent_at, due_at)
SELECT md5(n::text)::uuid, 'jobs', 'reports.export', 1, n % 3, '', CASE WHEN n % 200 = 0 THEN 1 ELSE 0 END,
       CASE WHEN n % 200 = 0 THEN clock_timestamp() END, clock_timestamp() - make_interval(secs => n % 1000)
  FROM generate_series({JOBS - DEBTS} + 1, {JOBS}) n;
INSERT INTO quarantine_entries (job_id, episode, cause, fingerprint, reason, attempt)
SELECT job_id, episode, cause, 'f', 'r', attempt FROM jobs WHERE state = 'quarantined';
INSERT INTO outbox (job_id, kind, queue, type, schema_version, correlation_id, sends, sent_at, due_at)
SELECT job_id, 'trace', 'jobs', type, 1, '', 8, clock_timestamp(), 'infinity' FROM jobs WHERE state = 'quarantined';
INSERT INTO batches (batch_id, coordinator_id, exhausted, finished_at)
SELECT md5(n::text)::uuid, md5(n::text)::uuid, true, CASE WHEN n > 1 THEN clock_timestamp() END
  FROM generate_series(1, 5000) n;
INSERT INTO job_events (job_id, event)
SELECT md5(n::text)::uuid, 'submit' FROM generate_series(1, {JOBS} / 2) n;
"""
INDEXES = """
SELECT indexdef, indexname FROM pg_indexes
  JOIN pg_class ON relname = indexname JOIN pg_index ON indexrelid = pg_class.oid
 WHERE schemaname = 'public' AND tablename IN ('jobs', 'outbox', 'job_events') AND NOT indisprimary
"""
KEYS = """
SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint
 WHERE conrelid IN ('outbox'::regclass, 'job_events'::regclass) AND contype = 'p'
"""


@pytest.fixture(scope="module")
def million(shared_postgres: Postgres, template: str) -> Iterator[PgConnection]:
    """The filled tables; indexes are built after the rows, which is what makes this bearable."""
    with databases.database(shared_postgres.url, "million", template) as url:
        connection = connect(url)
        rows(connection, "SET synchronous_commit = off; SET maintenance_work_mem = '256MB'")
        indexes, keys = rows(connection, INDEXES), rows(connection, KEYS)
        for _, name in indexes:
            rows(connection, f"DROP INDEX {name}")
        for table, name, _ in keys:
            rows(connection, f"ALTER TABLE {table} DROP CONSTRAINT {name}")
        for table in (
            "effects",
            "quarantine_entries",
            "quarantine_actions",
            "replay_run_jobs",
        ):  # unlogged tables cannot be referred to by logged ones
            rows(connection, f"ALTER TABLE {table} SET UNLOGGED")
        for table in LARGE:
            rows(connection, f"ALTER TABLE {table} SET UNLOGGED")
        rows(connection, FILL)
        for definition, _ in indexes:
            rows(connection, definition)
        for table, name, definition in keys:
            rows(connection, f"ALTER TABLE {table} ADD CONSTRAINT {name} {definition}")
        rows(connection, "ANALYZE")
        yield connection
        connection.close()


@pytest.fixture(scope="module")
def grown(shared_postgres: Postgres, template: str) -> Iterator[PlanningConnection]:
    """20,000 waiting jobs a second after the tables were analyzed with none of them, only finished ones, in it."""
    with databases.database(shared_postgres.url, "grown", template) as url:
        connection = connect(url)
        assert isinstance(connection, PlanningConnection)
        rows(
            connection,
            "INSERT INTO jobs (job_id, type, payload, payload_digest, correlation_id, state, result_key, finished_at)"
            " SELECT md5('old' || n)::uuid, 't', '{}', '', '', 'succeeded', 'k', clock_timestamp()"
            " FROM generate_series(1, 20000) n",
        )
        rows(connection, "VACUUM ANALYZE")
        for sql in SINGLE.values():
            if isinstance(sql, Prepared):
                explain(connection, connection.text(sql).removeprefix("DISCARD PLANS; "))
        rows(
            connection,
            "INSERT INTO jobs (job_id, type, payload, payload_digest, correlation_id)"
            " SELECT md5(n::text)::uuid, 't', '{}', '', '' FROM generate_series(1, 20000) n;"
            " INSERT INTO outbox (job_id, queue, type, schema_version, correlation_id)"
            " SELECT job_id, queue, type, 1, '' FROM jobs",
        )
        yield connection
        connection.close()


A_JOB = str(uuid.UUID(hex="c4ca4238a0b923820dcc509a6f75849b"))  # md5('1')
VALUES: dict[str, Any] = {
    "job_id": A_JOB,
    "worker_id": str(uuid.uuid4()),
    "pid": 1,
    "copy": 1,
    "episode": 1,
    "delivery_tag": "1",
    "redelivered": False,
    "attempt": 1,
    "words": ["succeed"],
    "journal_reason": None,
    "result_key": "k",
    "result_keys": ["k"],
    "results": [None],
    "result": None,
    "delay_s": 1.0,
    "cause": "killed",
    "reason": "r",
    "fingerprint": "f",
    "offer_s": 30,
    "grace_s": 600,
    "proof": "killed",
    "crash": 1,
    "stall": 0,
    "lease_over": True,
    "lease_s": 30,
    "lock_key": 1,
    "queue": "jobs",
    "batch": 200,
    "window": 1000,
    "first_s": 30,
    "max_s": 900,
    "offers": outbox.TRACE_OFFERS,
    "page": repair.PAGE,
    "cursor": "{}",
    "headers": "{}",
    "properties": "{}",
    "body": b"",
    "truncated": False,
    "digest": None,
    "source": "broker",
    "age_s": 2,
    "job_ids": [A_JOB],
    "reasons": ["r"],
    "waiting": [str(uuid.UUID(int=n)) for n in range(1000)],
    "name": "call",
    "seen": effects.SEEN_DEAD,
    "key": "k",
    "older_s": 0,
    "limit": 50,
    "state": "queued",
    "type": "reports.export",
    "batch_id": A_JOB,
    "after": str(uuid.UUID(int=0)),
    "author": "ann",
    "only_open": False,
    "done": 1,
    "total": 2,
    "frames": ["a.py:1 f"],
    "takes_key": True,
    "ledger": "",
    "max_failures": 5,
    "max_crashes": 3,
    "max_stalls": 3,
    "payload": None,
    "old": None,
    "forget": ["call"],
    "run_id": A_JOB,
    "stage": 0,
    "note": "n",
    "trial": True,
    "most": figures.MOST,
    "queues": ["jobs", "mails"],
    "trace_s": 60.0,
}


@dataclass
class Plan:
    """What EXPLAIN says: the tables that are read from end to end (`through` an index), and the indexes used."""

    whole: set[str] = field(default_factory=set)
    through: set[str] = field(default_factory=set)
    indexes: set[str] = field(default_factory=set)

    def add(self, node: dict[str, Any]) -> None:
        kind, table = node["Node Type"], node.get("Relation Name")
        if kind == "Seq Scan" and table in LARGE:
            self.whole.add(table)
        if kind.startswith("Index") and table in LARGE and "Index Cond" not in node:
            self.through.add(table)
        if "Index Name" in node:
            self.indexes.add(node["Index Name"])
        for child in node.get("Plans", []):
            self.add(child)


def explain(connection: PgConnection, sql: str, values: Any = None) -> Plan:
    """The plan of one statement; nothing is run."""
    found = one(connection, f"EXPLAIN (FORMAT JSON) {sql}", VALUES if values is None else values)
    assert found is not None
    plans = found[0] if isinstance(found[0], list) else json.loads(found[0])
    made = Plan()
    made.add(plans[0]["Plan"])
    return made


SINGLE: dict[str, str] = {
    "claim": claim.CLAIM,
    "look": claim.LOOK,
    "received": claim.RECEIVED,
    "hold": claim.HOLD,
    "succeed all": finish.SUCCEED_ALL,
    **{
        f"{name} {guard}": finish.statement(sql, guard == "committed")
        for name, sql in {"succeed": finish.SUCCEED, "retry": finish.RETRY, "quarantine": finish.QUARANTINE}.items()
        for guard in ("committed", "uncommitted")
    },
    "outcome": finish.OUTCOME,
    "release": release.RELEASE,
    "cancel": cancel.CANCEL,
    "park": park.PARK,
    "quarantine of a parked one": park.QUARANTINE,
    "dead letter": dead_letters.STORE,
    "repair without trace": repair.QUARANTINED_WITHOUT_TRACE,
    "checkpoint": job.CHECKPOINT,
    "cancel requested": job.CANCEL_REQUESTED,
    "take": outbox.TAKE,
    "next_due": outbox.NEXT_DUE,
    "unpaid": outbox.UNPAID,
    "evidence": outbox.EVIDENCE,
    "returned": outbox.RETURNED,
    "batch look": completion.LOOK,
    "batch finish": completion.FINISH,
    "batch shared": batches.SHARE,
    "batch counts": batch_story.COUNTS,
    "batch waiting": batch_story.WAITING,
    "batch quarantined": batch_story.QUARANTINED,
    "batch list": batch_story.LIST,
    "batch cancel children": batch_cancel.CANCEL_CHILDREN,
    "batch ask children": batch_cancel.ASK_CHILDREN,
    "progress": progress.WRITE,
    "sweep workers": sweep.WORKERS,
    "sweep lose": sweep.LOSE,
    "sweep close": sweep.CLOSE,
    "expire of worker": sweep.OF_WORKER,
    "expire of child": sweep.OF_CHILD,
    "expire of job": sweep.OF_JOB,
    "gone owner": sweep.GONE_OWNER,
    "lease leave": lease.LEAVE,
    "effect start": effects.START,
    "effect earlier": effects.EARLIER,
    "effect again": effects.AGAIN,
    "candidate": candidate.CANDIDATE,
    "calls": candidate.CALLS,
    "replay": replay.REPLAY,
    "settle": settle.SETTLE,
    "replay run look": replay_walk.LOOK,
    "submit existing": submit.EXISTING,
    "result": results.READ,
    "jobs by state": figures.JOBS,
    "quarantine by cause": figures.CAUSES,
    "debts": figures.DEBTS,
    "missing traces": figures.MISSING_TRACES,
}


@pytest.mark.parametrize("name", SINGLE)
def test_a_statement_of_a_loop_reads_no_whole_table(million: PgConnection, name: str) -> None:
    plan = explain(million, SINGLE[name])
    assert plan.whole == set()


@pytest.mark.parametrize("name", [name for name, sql in SINGLE.items() if isinstance(sql, Prepared)])
def test_a_plan_that_was_made_on_empty_tables_does_not_outlive_them(grown: PlanningConnection, name: str) -> None:
    """A prepared statement would keep its plan while the table grows from nothing."""
    sql = SINGLE[name]
    assert isinstance(sql, Prepared)
    rows(grown, "DISCARD PLANS")
    plan = explain(grown, sql.executing)
    assert (plan.whole, plan.through) == (set(), set())
    assert "ix_jobs_open" not in plan.indexes, "it has all the waiting jobs in it"


@pytest.mark.parametrize(
    ("name", "indexes"),
    [
        ("claim", {"pk_jobs", "pk_outbox"}),
        ("take", {"ix_outbox_first", "ix_outbox_again"}),
        ("next_due", {"ix_outbox_first", "ix_outbox_again"}),
        ("unpaid", {"ix_outbox_again"}),
        ("evidence", {"ix_outbox_again"}),
        ("expire of worker", {"ix_jobs_running"}),
        ("sweep workers", {"ix_jobs_running"}),
        ("batch look", {"ix_batches_open", "ix_jobs_batch"}),
        ("batch finish", {"ix_jobs_batch"}),
    ],
)
def test_a_statement_uses_the_index_that_was_made_for_it(million: PgConnection, name: str, indexes: set[str]) -> None:
    assert indexes <= explain(million, SINGLE[name]).indexes


@pytest.mark.parametrize("count", [1, submit.BULK_ROWS])
def test_submit_reads_no_whole_table(million: PgConnection, count: int) -> None:
    ids = [str(uuid.uuid4()) for _ in range(count)]
    values = {
        **dict.fromkeys(("eta", "countdown", "expires", "expires_in", "correlation_id", "trace_context", "parent_id")),
        "batch_id": None,
        "type": "t",
        "version": 1,
        "queue": "jobs",
        "priority": 0,
        "expire_early": True,
        "max_failures": 5,
        "max_crashes": 3,
        "max_stalls": 3,
        "job_ids": ids,
        "scopes": [""] * count,
        "keys": [None] * count,
        "payloads": ["{}"] * count,
        "digests": [""] * count,
    }
    assert explain(million, submit.CREATED, values).whole == set()
    assert explain(million, submit.EXISTING, values).whole == set()
    assert explain(million, submit.TAKEN, values).whole == set()


@pytest.fixture(scope="module")
def pruning(million: PgConnection) -> dict[str, Any]:
    """The parameters of `deadsure prune` half way through the million."""
    retention = Retention(**{name: Age("1d") for name in Retention.__dataclass_fields__})
    return {
        **old_jobs.given(retention, old_jobs.clock(million)),
        "after_time": old_jobs.clock(million) - timedelta(seconds=JOBS / 2),
        "after_id": A_JOB,
        "after": A_JOB,
        "page": PAGE_ROWS,
        "ids": [str(uuid.UUID(int=n)) for n in range(PAGE_ROWS)],
    }


PRUNE = {
    "page": old_jobs.PAGE,
    "lock": old_jobs.LOCK,
    "judge again": old_jobs.AGAIN,
    "bury": old_jobs.BURY,
    "export": EXPORTED,
    "orphans": old_rest.ORPHANS,
    "forget": old_rest.FORGET,
    **{kind.name: kind.delete for kind in old_rest.KINDS},
}


@pytest.mark.parametrize("name", PRUNE)
def test_a_page_of_the_retention_reads_no_whole_table(
    million: PgConnection, pruning: dict[str, Any], name: str
) -> None:
    assert explain(million, PRUNE[name], pruning).whole == set()


@pytest.mark.parametrize("begin", ["first", "middle", "end"])
def test_a_page_of_old_jobs_comes_quickly_from_the_index_on_their_submit(
    million: PgConnection, pruning: dict[str, Any], begin: str
) -> None:
    places = {"first": old_jobs.FIRST[0], "middle": pruning["after_time"], "end": pruning["now"]}
    values = {**pruning, "after_time": places[begin]}
    assert "ix_jobs_created" in explain(million, old_jobs.PAGE, values).indexes
    rows(million, "SET statement_timeout = '1s'")
    try:
        found = rows(million, old_jobs.PAGE, values)
    finally:
        rows(million, "RESET statement_timeout")
    assert len(found) == (0 if begin == "end" else PAGE_ROWS)


@pytest.mark.parametrize("sql", [story.JOB, story.DEBT, story.EVENTS], ids=["job", "debt", "events"])
def test_the_story_of_one_job_reads_no_whole_table(million: PgConnection, sql: str) -> None:
    assert explain(million, sql, (A_JOB,)).whole == set()


@pytest.mark.parametrize("state", [None, *State])
@pytest.mark.parametrize("job_type", [None, "reports.export", "rare", "no such type"])
@pytest.mark.parametrize("older_s", [0, 3600, 10**9])
def test_lists_read_no_whole_table(
    million: PgConnection, state: str | None, job_type: str | None, older_s: int
) -> None:
    sql = story.LIST.format(
        state="AND state = %(state)s::job_state" if state else "", type="AND type = %(type)s" if job_type else ""
    )
    plan = explain(million, sql, {"state": state, "type": job_type, "older_s": older_s, "limit": 50})
    assert plan.whole == set()


@pytest.mark.parametrize("state", [None, *State])
@pytest.mark.parametrize("job_type", [None, "reports.export"])
def test_the_newest_jobs_come_quickly(million: PgConnection, state: str | None, job_type: str | None) -> None:
    """A list of fifty must not sort a million."""
    rows(million, "SET statement_timeout = '1s'")
    try:
        found = story.list_jobs(million, state, job_type, 0, 50)
    finally:
        rows(million, "RESET statement_timeout")
    assert len(found) == 50


def test_a_batch_is_taken_from_a_full_outbox_quickly(million: PgConnection) -> None:
    rows(million, "SET statement_timeout = '2s'; BEGIN")
    try:
        taken = rows(million, outbox.TAKE, {**VALUES, "window": 5000})
    finally:
        rows(million, "ROLLBACK; RESET statement_timeout")
    assert len(taken) == VALUES["batch"] * 2  # as many first sends, and as many resends
