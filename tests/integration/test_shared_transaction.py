"""Handlers that misuse a transaction which they share: nobody else loses his effect, and nothing stands half."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from psycopg2 import Error as DatabaseError
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from app.ending import Outcome
from app.job import Job, _seen
from app.seat import Seat
from db.session import rows
from tests.integration.coalesced_scene import EFFECT, TYPE, Handler, deliveries, effects, run, sent
from tests.integration.scene import Background, Number, Scene

NOTE = "INSERT INTO test_effects (kind, job_id, attempt, pid) SELECT 'effect', %s, 0, 0 WHERE %s IS NOT NULL"
AMONG = "SELECT 1 FROM test_effects WHERE pid IN %s"


def unstorable(job: Job) -> None:
    job.execute(NOTE, (str(job.job_id), "a\0b"))


def unknown_to_the_driver(job: Job) -> None:
    job.execute(NOTE, (str(job.job_id), object()))


def one_parameter_too_few(job: Job) -> None:
    job.execute(NOTE, (str(job.job_id),))


def no_list_at_all(job: Job) -> None:
    job.execute(AMONG, ((),))


def swallowed(job: Job) -> None:
    with suppress(DatabaseError):
        job.execute("SELECT 1 / 0")


def swallowed_by_a_session(job: Job) -> None:
    with suppress(DBAPIError):
        job.session.execute(text("SELECT 1 / 0"))


def rolls_its_session_back_after_an_error(job: Job) -> None:
    with suppress(DatabaseError):
        job.execute(AMONG, ((),))
    job.session.rollback()
    raise ValueError


@pytest.mark.parametrize(
    "slip",
    [
        unstorable,
        unknown_to_the_driver,
        one_parameter_too_few,
        no_list_at_all,
        swallowed,
        swallowed_by_a_session,
        rolls_its_session_back_after_an_error,
    ],
)
def test_a_slip_costs_nobody_else_his_effect(
    slip: Callable[[Job], None],
    scene: Scene,
    seat: Seat,
    use: Callable[[Handler], None],
) -> None:
    """The statement was run before by others, so it travels with its savepoint: was that set, or the one before?"""
    _seen.update((NOTE, AMONG, EFFECT))
    runs: list[int] = []
    wrong = 0, 3  # the first in the chunk, and one behind another

    def handle(job: Job, payload: Number) -> None:
        runs.append(payload.n)
        if payload.n not in wrong or slip is swallowed:
            job.execute(EFFECT, (str(job.job_id), 0))
        if payload.n in wrong:
            slip(job)

    use(handle)
    jobs = sent(scene, 6)
    run(seat, deliveries(scene, jobs), TYPE)
    good = [job_id for n, job_id in enumerate(jobs) if n not in wrong]
    assert sorted(effects(scene)) == sorted(good)
    assert {scene.state(job_id) for job_id in good} == {"succeeded"}
    assert {scene.row(job_id)["failures"] for job_id in good} == {0}
    for n in wrong:
        assert scene.row(jobs[n])["failures"] == 1
        assert "broke" not in str(scene.row(jobs[n])["reason"])
        assert runs.count(n) <= 3


def commits(job: Job) -> None:
    job.execute("COMMIT")


def rolls_back(job: Job) -> None:
    job.execute(f"SELECT ';'; /* to be sure */ rollback work; SELECT {job.attempt}")


def commits_by_its_session(job: Job) -> None:
    job.session.execute(text("INSERT INTO test_effects SELECT FROM test_effects WHERE false; COMMIT"))


@pytest.mark.parametrize("end", [commits, rolls_back, commits_by_its_session])
@pytest.mark.parametrize("count", [1, 4], ids=["alone", "in a chunk"])
def test_a_handler_cannot_end_the_transaction(
    end: Callable[[Job], None], count: int, scene: Scene, seat: Seat, handler: Callable[[Handler], None]
) -> None:
    """The effects before it would stand without their jobs' success, and run again when the process dies."""
    outside: list[Any] = []

    def handle(job: Job, payload: Number) -> None:
        if payload.n == count // 2:
            try:
                end(job)
            finally:
                outside.append(scene.ask("SELECT count(*) FROM test_effects"))

    handler(handle)
    jobs = sent(scene, count)
    run(seat, deliveries(scene, jobs), TYPE)
    wrong = jobs[count // 2]
    assert outside == [0]
    assert effects(scene) == [job_id for job_id in jobs if job_id != wrong]
    assert (scene.state(wrong), scene.row(wrong)["cause"]) == ("quarantined", "permanent")


def test_a_commit_that_nobody_could_refuse_is_told(
    scene: Scene, seat: Seat, handler: Callable[[Handler], None]
) -> None:
    def handle(job: Job, payload: Number) -> None:
        if payload.n == 1:
            rows(job.connection, "ROLLBACK")

    handler(handle)
    jobs = sent(scene, 4)
    run(seat, deliveries(scene, jobs), TYPE)
    assert effects(scene) == [jobs[0], jobs[2], jobs[3]]
    assert scene.state(jobs[1]) == "quarantined"


def test_what_holds_for_a_transaction_holds_for_one_job(
    scene: Scene, seat: Seat, use: Callable[[Handler], None]
) -> None:
    """A tenant that is set for the transaction, and a table that goes with it."""
    seen: dict[int, set[str]] = {}

    def handle(job: Job, payload: Number) -> None:
        seen.setdefault(payload.n, set()).add(job.execute("SELECT current_setting('app.tenant', true)")[0][0] or "")
        if payload.n % 2:
            job.execute("SET LOCAL app.tenant = 'seven'")
        job.execute("CREATE TEMP TABLE work (n int) ON COMMIT DROP")
        job.execute(EFFECT, (str(job.job_id), 0))

    use(handle)
    jobs = sent(scene, 6)
    run(seat, deliveries(scene, jobs), TYPE)
    assert effects(scene) == jobs
    assert set().union(*seen.values()) == {""}
    assert {scene.row(job_id)["failures"] for job_id in jobs} == {0}


def test_a_deadlock_of_two_chunks_is_no_failure_of_a_job(
    scene: Scene, seat: Seat, handler: Callable[[Handler], None]
) -> None:
    """Each job takes one lock, so alone none can be in a deadlock: the commit that they share makes it."""
    first, second = sent(scene, 2), sent(scene, 1)
    other = scene.connect()
    rows(other, "BEGIN; SELECT FROM jobs WHERE job_id = %s FOR UPDATE", (str(second[0]),))

    def handle(job: Job, payload: Number) -> None:
        if payload.n == 0:
            job.execute("SELECT pg_advisory_xact_lock(1)")
        elif not blocked:
            blocked.append(Background(lambda: rows(other, "SELECT pg_advisory_xact_lock(1); COMMIT")))
            scene.wait_until_blocked(other)
            job.execute("SELECT FROM jobs WHERE job_id = %s FOR UPDATE", (str(second[0]),))

    blocked: list[Background] = []
    handler(handle)
    rows(seat.connection(), "SET deadlock_timeout = '20ms'")
    rows(other, "SET LOCAL deadlock_timeout = '10s'")
    run(seat, deliveries(scene, first), TYPE)
    blocked[0].result()
    assert effects(scene) == first
    assert {scene.row(job_id)["failures"] for job_id in first} == {0}


def test_a_savepoint_that_was_left_open_keeps_what_is_in_it(
    scene: Scene, seat: Seat, use: Callable[[Handler], None]
) -> None:
    """The commit of a whole session takes it along; so must a session that is closed before the chunk's commit."""

    def handle(job: Job, _payload: Number) -> None:
        job.session.begin_nested()
        job.session.execute(
            text("INSERT INTO test_effects (kind, job_id, attempt, pid) VALUES ('effect', :id, 0, 0)"),
            {"id": str(job.job_id)},
        )

    use(handle)
    jobs = sent(scene, 3)
    run(seat, deliveries(scene, jobs), TYPE)
    assert effects(scene) == jobs


def test_a_success_that_cannot_be_written_is_one_jobs_own(
    scene: Scene, seat: Seat, handler: Callable[[Handler], None]
) -> None:
    """Not an error of the database's: the driver refuses the text of all results for one key."""

    def handle(job: Job, payload: Number) -> None:
        if payload.n == 1:
            job.result_key = "a\0b"

    handler(handle)
    jobs = sent(scene, 3)
    endings = run(seat, deliveries(scene, jobs), TYPE)
    assert effects(scene) == [jobs[0], jobs[2]]
    assert [ending.outcome for ending in endings] == [Outcome.SUCCEEDED, Outcome.RETRIED, Outcome.SUCCEEDED]


def test_after_a_statement_that_could_not_be_read_nothing_is_written_outside_the_transaction(
    scene: Scene, seat: Seat, use: Callable[[Handler], None]
) -> None:
    """A leased job's BEGIN was in the message that PostgreSQL refused: what follows must have one of its own."""
    _seen.update((AMONG, EFFECT))

    def handle(job: Job, _payload: Number) -> None:
        with suppress(DatabaseError):
            job.execute(AMONG, ((),))
        job.execute(EFFECT, (str(job.job_id), 0))
        raise ValueError

    use(handle)
    jobs = sent(scene, 1)
    run(seat, deliveries(scene, jobs), replace(TYPE, mode="leased"))
    assert effects(scene) == []
    assert scene.row(jobs[0])["failures"] == 1


def test_an_atomic_job_has_no_cursor(scene: Scene, seat: Seat, handler: Callable[[Handler], None]) -> None:
    """Its work would be undone and the cursor stay; on the clean path it would lose the job and the chunk."""
    handler(lambda job, payload: job.checkpoint({"n": 1}) if payload.n == 1 else None)
    jobs = sent(scene, 3)
    run(seat, deliveries(scene, jobs), TYPE)
    assert effects(scene) == [jobs[0], jobs[2]]
    assert (scene.state(jobs[1]), scene.row(jobs[1])["checkpoint"]) == ("quarantined", None)


def test_of_two_messages_with_the_same_jobs_each_job_is_taken_once(
    scene: Scene, seat: Seat, handler: Callable[[Handler], None]
) -> None:
    """The group and a copy of it, at once in two processes, while some of its jobs are sent again by themselves."""
    handler(lambda _job, _payload: None)
    jobs = sent(scene, 30)
    others = [Seat(seat.lease, scene.url) for _ in range(2)]
    again = [scene.delivery(job_id, copy=2) for job_id in jobs[::3]]
    scene.at_once(
        lambda: run(seat, deliveries(scene, jobs), TYPE),
        lambda: run(others[0], deliveries(scene, jobs[::-1]), TYPE),
        lambda: run(others[1], again, TYPE),
    )
    assert sorted(effects(scene)) == sorted(jobs)
    assert {scene.row(job_id)["attempt"] for job_id in jobs} == {1}
    for other in others:
        other.drop()
