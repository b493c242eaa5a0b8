"""Prepared statements: when they are used, and what happens when the server does not know them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from psycopg2.errors import InvalidSqlStatementName
from psycopg2.extensions import connection as PgConnection

from db.prepared import PLAN_S, PlanningConnection, Plans
from db.session import connect, one, rows
from tests.integration.scene import Scene

PLANS = Plans("test")
ADD = PLANS.statement("add", "SELECT %(a)s + %(b)s, count(*) FROM jobs", a="int", b="int")
ADD_ALONE = PLANS.message("BEGIN; SELECT 1; COMMIT; {add}", add=ADD)
VALUES = {"a": 1, "b": 2}
NAMES = "SELECT count(*) FROM pg_prepared_statements"


@pytest.fixture
def session(scene: Scene) -> Iterator[PlanningConnection]:
    made = connect(scene.url)
    assert isinstance(made, PlanningConnection)
    yield made
    made.close()


def prepared(session: PgConnection) -> int:
    found = one(session, NAMES)
    assert found is not None
    return int(found[0])


def test_a_statement_is_prepared_at_its_first_use_and_once(session: PlanningConnection) -> None:
    assert prepared(session) == 0
    assert [rows(session, ADD, VALUES) for _ in range(3)] == [[(3, 0)]] * 3
    assert rows(session, ADD_ALONE, VALUES) == [(3, 0)]
    assert prepared(session) == 1


def test_behind_a_pooler_nothing_is_prepared(session: PlanningConnection, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pooler answers at connect with a process number of its own."""
    monkeypatch.setattr(session, "_direct", None)
    monkeypatch.setattr(PlanningConnection, "info", property(lambda _self: Info()))
    assert rows(session, ADD, VALUES) == [(3, 0)]
    monkeypatch.undo()
    assert prepared(session) == 0


class Info:
    backend_pid = 1
    transaction_status = 0


@pytest.mark.parametrize("sql", [ADD, ADD_ALONE], ids=["single", "message"])
def test_a_session_whose_statements_were_discarded_goes_on_with_plain_text(
    session: PlanningConnection, sql: str
) -> None:
    rows(session, sql, VALUES)
    rows(session, "DISCARD ALL")
    assert rows(session, sql, VALUES) == [(3, 0)]
    assert rows(session, sql, VALUES) == [(3, 0)]


def test_a_discarded_statement_inside_a_transaction_is_an_error_that_is_not_hidden(session: PlanningConnection) -> None:
    rows(session, ADD, VALUES)
    rows(session, "DEALLOCATE ALL; BEGIN")
    with pytest.raises(InvalidSqlStatementName):
        rows(session, ADD, VALUES)
    rows(session, "ROLLBACK")
    assert rows(session, ADD, VALUES) == [(3, 0)]


def test_an_open_transaction_is_not_disturbed_by_preparing(session: PlanningConnection) -> None:
    rows(session, "BEGIN")
    assert rows(session, ADD, VALUES) == [(3, 0)]
    rows(session, "ROLLBACK")
    assert prepared(session) == 0


def test_plans_are_made_anew_as_tables_grow(session: PlanningConnection, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("db.prepared.time.monotonic", lambda: now[0])
    assert "DISCARD PLANS" in session.text(ADD)
    now[0] += PLAN_S / 2
    assert "DISCARD PLANS" not in session.text(ADD)
    now[0] += PLAN_S / 2
    assert session.text(ADD_ALONE).startswith("DISCARD PLANS; BEGIN;")
    assert rows(session, ADD, VALUES) == [(3, 0)]


@pytest.mark.parametrize("sql", ["SELECT n FROM altered", "BEGIN; SELECT n FROM altered"], ids=["single", "message"])
def test_a_migration_may_change_the_type_of_what_a_statement_returns(
    scene: Scene, session: PlanningConnection, sql: str
) -> None:
    """PostgreSQL refuses the cached plan for good: "must not change result type"."""
    plans = Plans("altered")
    read = plans.statement("altered", "SELECT n FROM altered WHERE n > %(more)s", more="int")
    whole = plans.message("BEGIN; {read}", read=read) if "BEGIN" in sql else read
    rows(scene.eyes, "DROP TABLE IF EXISTS altered; CREATE TABLE altered AS SELECT 1 AS n")
    for change in (None, "bigint", "text USING n::text", "int USING n::int"):
        if change:
            rows(scene.eyes, f"ALTER TABLE altered ALTER n TYPE {change}")
        if change and "text" in change:
            continue
        assert rows(session, whole, {"more": 0}) == [(1,)]
        rows(session, "ROLLBACK")
    assert prepared(session) == 1


def test_statements_that_are_there_already_are_left_to_whoever_prepared_them(session: PlanningConnection) -> None:
    """A pooler that hands on the number of a server's process: its sessions are everybody's."""
    rows(session, PLANS.prepare())
    assert [rows(session, ADD, VALUES) for _ in range(2)] == [[(3, 0)]] * 2
