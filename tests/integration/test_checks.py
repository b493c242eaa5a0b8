"""The checks of the database: each broken thing is made for real and recognised by its code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from psycopg2.errors import UniqueViolation
from psycopg2.extensions import connection as PgConnection
from sqlalchemy import text
from sqlalchemy.orm import Session

from app import settings as app_settings
from app.checks import everything, expected, jobs, postgres, quarantine, workers
from app.checks.finding import Finding, Look, Severity, run
from app.job_types import JobType
from app.repair import forget_orphans
from db.session import connect, rows
from tests.integration.scene import PLAIN, Number, Scene
from tests.nodes.database import execute
from tests.nodes.marks import on_own_postgres
from tests.nodes.servers import ServerNode
from tests.nodes.waiting import wait_for

NOTHING = frozenset({Severity.OK, Severity.INFO})
HOUR = "clock_timestamp() - interval '1 hour'"


def look(connection: PgConnection, types: Sequence[JobType] = (PLAIN,)) -> Look:
    return Look(connection, app_settings.settings(), {(known.name, known.version): known for known in types})


def found(scene: Scene, checks: Sequence[Any], types: Sequence[JobType] = (PLAIN,)) -> dict[str, Finding]:
    """The findings of some checks by their code, those that are no news left out."""
    return {one.code: one for one in run(checks, look(scene.eyes, types)) if one.severity is not Severity.OK}


def quarantine_job(scene: Scene, *, entry: bool = True, debt: str = "keep") -> None:
    job_id = scene.job()
    scene.change(job_id, state="quarantined", cause="permanent", reason="r", episode=1)
    if entry:
        rows(
            scene.eyes,
            "INSERT INTO quarantine_entries (job_id, episode, cause, fingerprint, reason, attempt, quarantined_at)"
            f" VALUES (%s, 1, 'permanent', 'f', 'r', 1, {HOUR})",
            (str(job_id),),
        )
    rows(scene.eyes, "UPDATE outbox SET kind = 'trace'")
    if debt == "spent":
        rows(scene.eyes, "UPDATE outbox SET sends = 8, sent_at = clock_timestamp(), due_at = 'infinity'")
    if debt == "none":
        rows(scene.eyes, "DELETE FROM outbox")


def sql(statement: str) -> Callable[[Scene], None]:
    """A job, and a hand in the tables."""

    def change(scene: Scene) -> None:
        scene.job()
        rows(scene.eyes, statement)

    return change


def run_for_long(scene: Scene) -> None:
    scene.claimed(scene.worker(lease_s=300))
    rows(scene.eyes, "UPDATE jobs SET changed_at = clock_timestamp() - interval '1000 s'")


def left_running(scene: Scene) -> None:
    worker = scene.worker()
    scene.claimed(worker)
    scene.do("UPDATE workers SET lease_until = clock_timestamp() - interval '5 min' WHERE worker_id = %s", worker)


BROKEN: dict[str, tuple[str, Severity, Callable[[Scene], object]]] = {
    "a job without its debt": ("jobs.stuck", Severity.ERROR, sql("DELETE FROM outbox")),
    "a retry without its debt": (
        "jobs.stuck",
        Severity.ERROR,
        sql("DELETE FROM outbox; UPDATE jobs SET state = 'retry_wait', not_before = clock_timestamp()"),
    ),
    "a debt without its job": ("outbox.without_job", Severity.ERROR, sql("DELETE FROM jobs")),
    "a debt of a finished job": (
        "outbox.misplaced",
        Severity.ERROR,
        sql("UPDATE jobs SET state = 'cancelled', finished_at = clock_timestamp()"),
    ),
    "a job that nobody sends": ("jobs.unsent", Severity.WARNING, sql(f"UPDATE outbox SET due_at = {HOUR}")),
    "an unroutable message": (
        "jobs.unroutable",
        Severity.ERROR,
        sql(
            f"UPDATE outbox SET sends = 1, sent_at = {HOUR}, returned_at = {HOUR},"
            " returned_reason = 'NO_ROUTE: exchange ''jobs'''"
        ),
    ),
    "a type that this code does not know": (
        "jobs.unknown_type",
        Severity.ERROR,
        sql("UPDATE jobs SET type = 'vanished'"),
    ),
    "a handler beyond its limit": ("jobs.overlong", Severity.WARNING, run_for_long),
    "a dead letter that is offered in vain": (
        "quarantine.trace_missing",
        Severity.ERROR,
        lambda scene: quarantine_job(scene, debt="spent"),
    ),
    "a dead letter that nobody owes": (
        "quarantine.trace_unowed",
        Severity.ERROR,
        lambda scene: quarantine_job(scene, debt="none"),
    ),
    "a quarantined job without an entry": (
        "quarantine.without_entry",
        Severity.ERROR,
        lambda scene: quarantine_job(scene, entry=False),
    ),
    "a job that waits for a decision": ("quarantine.waiting", Severity.INFO, quarantine_job),
    "a dead letter of an unknown job": (
        "dead_letters.without_job",
        Severity.WARNING,
        sql("INSERT INTO dead_letters (job_id, episode, copy, body, reason) VALUES (gen_random_uuid(), 1, 1, '', 'r')"),
    ),
    "an unreadable message": (
        "dead_letters.unreadable",
        Severity.INFO,
        sql("INSERT INTO dead_letters (body, reason) VALUES ('x', 'broken JSON')"),
    ),
    "no worker lives": (
        "workers.none",
        Severity.WARNING,
        lambda scene: (scene.worker(), rows(scene.eyes, f"UPDATE workers SET stopped_at = {HOUR}")),
    ),
    "nobody sweeps": ("workers.lease_over", Severity.WARNING, lambda scene: scene.worker(lease_s=-600)),
    "a lease in the far future": ("workers.lease_ahead", Severity.WARNING, lambda scene: scene.worker(lease_s=86_400)),
    "a running job of a lost worker": ("workers.left_running", Severity.ERROR, left_running),
    "a type that no live worker knows": (
        "workers.type_unknown",
        Severity.ERROR,
        lambda scene: (scene.worker(), scene.job()),
    ),
    "a queue that no live worker consumes": (
        "workers.queue_forgotten",
        Severity.ERROR,
        lambda scene: (scene.worker(), scene.job(), rows(scene.eyes, """UPDATE workers SET queues = '["other"]'""")),
    ),
    "the database's clock went back": (
        "clock.went_back",
        Severity.WARNING,
        sql("UPDATE outbox SET sends = 1, sent_at = clock_timestamp() + interval '1 hour'"),
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_broken_is_named_by_its_code(scene: Scene, case: str) -> None:
    code, severity, break_it = BROKEN[case]
    break_it(scene)
    finding = found(scene, (*jobs.CHECKS, *quarantine.CHECKS, *workers.CHECKS))[code]
    assert (finding.severity, finding.checked) == (severity, True)
    assert finding.next_step


def test_an_empty_database_and_one_at_work_give_no_warning(scene: Scene) -> None:
    checks = everything.DATABASE
    assert {one.code for one in found(scene, checks).values()} == {"workers.never"}
    worker = scene.worker()
    rows(scene.eyes, """UPDATE workers SET knows = '["scene.plain@1"]'""")
    scene.claimed(worker)
    scene.begun(worker)
    scene.job()
    scene.sent(scene.job())
    assert found(scene, checks) == {}


def test_a_backlog_that_is_sent_again_is_no_warning_but_idle_workers_are(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "LOOK_AGAIN_S", 0.01)
    worker = scene.worker()
    scene.sent(scene.job(), sends=3)
    assert found(scene, [jobs.unclaimed_jobs])["workers.not_consuming"].severity is Severity.WARNING
    scene.claimed(worker)
    assert found(scene, [jobs.unclaimed_jobs])["jobs.unclaimed"].severity is Severity.INFO


def test_a_backlog_behind_a_full_window_is_no_warning(scene: Scene) -> None:
    for n in range(5):
        scene.job(n=n)
    rows(scene.eyes, f"UPDATE outbox SET due_at = {HOUR}")
    assert found(scene, [jobs.unsent_debts])["jobs.unsent"].severity is Severity.WARNING
    rows(
        scene.eyes,
        "UPDATE outbox SET sends = 1, sent_at = clock_timestamp(), due_at = clock_timestamp() + interval '30 s'"
        " WHERE ctid IN (SELECT ctid FROM outbox LIMIT 4)",
    )
    small = replace(look(scene.eyes), settings=replace(app_settings.settings(), window=5))
    assert [one.code for one in run([jobs.unsent_debts], small)] == ["jobs.backlog"]


def test_a_parked_job_does_not_accuse_its_workers(scene: Scene) -> None:
    scene.worker()
    job_id = scene.job()
    scene.sent(job_id, sends=5)
    rows(scene.eyes, "UPDATE jobs SET parked_at = clock_timestamp()")
    assert found(scene, [jobs.unclaimed_jobs]) == {}


def test_an_orphaned_debt_keeps_its_key_taken_until_it_is_deleted(scene: Scene) -> None:
    submit_one(scene, PLAIN, "", "k")
    job_id = scene.ask("SELECT job_id FROM outbox")
    rows(scene.eyes, "DELETE FROM jobs")
    with pytest.raises(UniqueViolation):
        submit_one(scene, PLAIN, "", "k")
    assert forget_orphans(scene.eyes) == [str(job_id)]
    assert scene.journal(job_id) == ["submit", "repaired"]
    assert forget_orphans(scene.eyes) == []
    submit_one(scene, PLAIN, "", "k")
    assert scene.owed(job_id) == "wake 1"


def test_only_debts_that_nobody_needs_are_deleted(scene: Scene) -> None:
    kept = [scene.job(), scene.claimed(scene.worker()).claimed.job_id, scene.job()]
    scene.change(kept[2], state="quarantined", cause="permanent", episode=1)
    ended = scene.job()
    scene.change(ended, state="cancelled", finished_at="2026-01-01")
    assert forget_orphans(scene.eyes) == [str(ended)]
    assert [scene.owed(job_id) for job_id in kept] == ["wake 1", None, "wake 1"]


def test_a_check_that_raises_is_a_finding_and_the_next_one_runs(scene: Scene) -> None:
    def broken(_look: Look) -> Iterator[Finding]:
        rows(scene.eyes, "SELECT 'secret'::int")
        yield from ()

    answers = run([broken, jobs.stuck_jobs], look(scene.eyes))
    assert [(one.code, one.checked) for one in answers] == [("unchecked.broken", False), ("jobs.stuck", True)]
    assert "secret" not in repr(answers)


# what should exist


@contextmanager
def accounts(scene: Scene, ages: Sequence[str]) -> Iterator[None]:
    for number, age in enumerate(ages):
        rows(
            scene.eyes,
            "INSERT INTO accounts (name, email, currency, created_at)"
            " VALUES ('n', %s, 'EUR', clock_timestamp() - %s::interval)",
            (f"{number}@example.com", age),
        )
    yield


BY_NUMBER = "SELECT '' AS scope, 'k' || n AS key FROM generate_series(1, 2500) AS n"


def scoped(session: Session) -> Iterator[tuple[str, str]]:
    for (number,) in session.execute(text("SELECT n FROM generate_series(1, 3) AS n")):
        yield "acct", str(number)


def forgetful(_session: Session) -> list[tuple[int, int]]:
    return [(1, 2)]


def test_missing_jobs_are_counted_with_the_command_that_submits_one(scene: Scene) -> None:
    some = JobType("scene.expected", Number, expected=BY_NUMBER)
    others = JobType("scene.scoped", Number, expected=scoped)
    for job_type, present in ((some, [("", "k1"), ("", "k2500")]), (others, [("acct", "2")])):
        for scope, key in present:
            submit_one(scene, job_type, scope, key)
    rows(scene.eyes, "UPDATE jobs SET state = 'cancelled', finished_at = clock_timestamp() WHERE scope = 'acct'")
    findings = run(expected.CHECKS, look(scene.eyes, [some, others, PLAIN]))
    assert [(one.code, one.severity) for one in findings] == [("expected.missing", Severity.WARNING)] * 2
    assert findings[0].what.startswith("2498 of 2500 expected scene.expected do not exist, for instance 'k2', 'k3'")
    assert findings[0].next_step == "deadsure submit scene.expected --key k2 --payload …"
    assert findings[1].what.startswith("2 of 3 expected scene.scoped do not exist, for instance '1' in 'acct'")
    assert "--scope acct" in findings[1].next_step


def submit_one(scene: Scene, job_type: JobType, scope: str, key: str) -> None:
    from app import submit  # noqa: PLC0415  reads the settings of the scene

    job = submit.prepare(job_type, Number(n=1), scope=scope, idempotency_key=key)
    submit.within(lambda statement, values: rows(scene.eyes, statement, values), [job])


def test_a_pruned_job_did_exist(scene: Scene) -> None:
    job_type = JobType("scene.scoped", Number, expected=scoped)
    for key in ("1", "2", "3"):
        submit_one(scene, job_type, "acct", key)
    rows(
        scene.eyes,
        "INSERT INTO job_tombstones (job_id, type, state, payload_digest) SELECT job_id, type, 'succeeded', ''"
        " FROM jobs; DELETE FROM outbox; DELETE FROM jobs",
    )
    assert [one.severity for one in run(expected.CHECKS, look(scene.eyes, [job_type]))] == [Severity.OK]


@pytest.mark.parametrize("wrong", [forgetful, "SELECT 1", "DELETE FROM jobs RETURNING '', 'k'", "SELECT nothing"])
def test_a_query_that_cannot_be_used_is_reported_and_changes_nothing(scene: Scene, wrong: Any) -> None:
    scene.job()
    (finding,) = run(expected.CHECKS, look(scene.eyes, [JobType("scene.expected", Number, expected=wrong)]))
    assert (finding.code, finding.checked) == ("unchecked.expected", False)
    assert scene.ask("SELECT count(*) FROM jobs") == 1


def test_a_query_of_more_keys_than_are_looked_at_says_so(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.expected.KEYS_LIMIT", 1500)
    (finding,) = run(expected.CHECKS, look(scene.eyes, [JobType("scene.expected", Number, expected=BY_NUMBER)]))
    assert finding.what.startswith("1500 of 1500")
    assert "there are more" in finding.what


def test_welcome_mails_that_nobody_ordered_are_found_and_submitted_once(scene: Scene) -> None:
    from app.expected import submit_missing  # noqa: PLC0415  reads the settings of the scene
    from tasks.emails import welcome  # noqa: PLC0415

    with accounts(scene, ["1 minute", "1 hour", "2 days", "3 years"]):
        job_type = welcome.job_type
        (finding,) = run(expected.CHECKS, look(scene.eyes, [job_type]))
        assert finding.what.startswith("2 of 2 expected emails.welcome do not exist")
        assert finding.next_step == "deadsure submit emails.welcome --missing"
        assert submit_missing(scene.eyes, scene.url, job_type) == (2, 0)
        assert submit_missing(scene.eyes, scene.url, job_type) == (0, 0)
        late = scene.ask("SELECT account_id FROM accounts WHERE email = '1@example.com'")
        welcome.delay(account_id=late)
        assert scene.ask("SELECT count(*) FROM jobs") == 2
        assert [one.severity for one in run(expected.CHECKS, look(scene.eyes, [job_type]))] == [Severity.OK]


# the server


@contextmanager
def session_of(url: str, name: str, begin: str) -> Iterator[PgConnection]:
    made = connect(url, name)
    rows(made, begin)
    try:
        yield made
    finally:
        made.close()


def test_open_transactions_are_named(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres, "LONG_S", 0.05)
    monkeypatch.setattr(postgres, "IDLE_S", 0.05)
    begin = "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM jobs"
    checks = (postgres.long_transactions, postgres.own_idle_transactions)
    assert found(scene, checks) == {}
    with session_of(scene.url, "reporting tool", begin), session_of(scene.url, "deadsure relay", begin):
        both = {"postgres.long_transaction", "postgres.idle_in_transaction"}
        wait_for(lambda: set(found(scene, checks)) == both, 10, "both are found")
        named = [one.what for one in run(checks, look(scene.eyes)) if "reporting tool" in one.what]
    assert "idle in transaction" in named[0]
    with session_of(scene.url, "deadsure job 1", begin):  # a handler's
        wait_for(lambda: set(found(scene, checks)) == {"postgres.long_transaction"}, 10, "the handler's is found")


def test_a_hot_table_without_autovacuum(scene: Scene) -> None:
    rows(scene.eyes, "ALTER TABLE outbox SET (autovacuum_enabled = false)")
    try:
        finding = found(scene, postgres.CHECKS)["postgres.autovacuum_table"]
    finally:
        rows(scene.eyes, "ALTER TABLE outbox RESET (autovacuum_enabled)")
    assert "outbox" in finding.what
    assert found(scene, postgres.CHECKS) == {}


def test_too_few_sessions_for_a_rolling_deploy(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    few = postgres.SESSIONS.replace("current_setting('max_connections')::int", "4")
    monkeypatch.setattr(postgres, "SESSIONS", few)
    assert "postgres.sessions" in found(scene, [postgres.sessions])


def test_a_pooled_worker_is_told(scene: Scene) -> None:
    scene.worker(pooled=True)
    assert found(scene, [postgres.pooler])["postgres.pooled"].severity is Severity.INFO


def test_a_clock_that_is_off(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    shifted = "SELECT extract(epoch FROM clock_timestamp() + interval '90 s')::float8"
    monkeypatch.setattr(workers, "NOW", shifted)
    finding = found(scene, [workers.clocks])["clock.difference"]
    assert "90 s behind" in finding.what


@on_own_postgres
def test_a_server_that_forgets_is_an_error_and_a_standby_too(
    postgres: ServerNode, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from app.checks import postgres as checks  # noqa: PLC0415  the fixture has the name

    monkeypatch.setenv("DATABASE_URL", database_url)
    app_settings.settings.cache_clear()
    off = ("fsync", "full_page_writes", "synchronous_commit", "autovacuum")
    for name in off:
        execute(database_url, f"ALTER SYSTEM SET {name} = off")
    execute(database_url, "SELECT pg_reload_conf()")

    def codes() -> set[str]:
        with closing(connect(database_url)) as connection:
            answers = run(checks.CHECKS, look(connection))
        return {one.code for one in answers if one.severity not in NOTHING}

    wait_for(lambda: codes() == {f"postgres.{name}" for name in off}, 10, "the server has read its configuration")
    execute(database_url, "ALTER SYSTEM RESET ALL")
    postgres.stop()
    signal = Path(postgres.server.state.home) / "data" / "standby.signal"
    signal.touch()
    postgres.start()
    assert codes() == {"postgres.standby"}
    execute(database_url, "SELECT pg_promote()")  # the database is dropped at the end
    assert codes() == set()
    app_settings.settings.cache_clear()
