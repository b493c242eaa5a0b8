"""Atomic jobs of one delivery share commits: per job nothing changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

import psycopg2
import pytest
from psycopg2.extensions import connection as PgConnection

from app import attempt, finish, submit
from app.coalesced import CHUNK_S, Pace
from app.ending import Outcome
from app.errors import TransientError, UnrecoverableError
from app.job import Job
from app.seat import Seat
from app.watch import SLOW_S, Watch, Watched
from db.session import rows
from tests.integration.coalesced_scene import EFFECT, TYPE, Handler, deliveries, effects, run, sent
from tests.integration.scene import Number, Scene
from tests.nodes.waiting import wait_for


@pytest.mark.usefixtures("handler")
def test_all_succeed_each_with_its_own_row_journal_and_proof(scene: Scene, seat: Seat) -> None:
    jobs = sent(scene, 12)
    endings = run(seat, deliveries(scene, jobs), TYPE)
    assert [ending.outcome for ending in endings] == [Outcome.SUCCEEDED] * 12
    assert effects(scene) == jobs
    for job_id in jobs:
        row = scene.row(job_id)
        assert (row["state"], row["attempt"], row["result_key"]) == ("succeeded", 1, f"job:{job_id}")
        assert scene.debt(job_id) is None
        assert scene.journal(job_id) == ["submit", "received", "claim", "result_saved", "succeed"]


def test_what_fails_leaves_the_others_untouched(scene: Scene, seat: Seat, handler: Callable[[Handler], None]) -> None:
    def some_fail(_job: Job, payload: Number) -> None:
        if payload.n == 3:
            raise TransientError("later")
        if payload.n == 5:
            raise UnrecoverableError("never")
        if payload.n == 7:
            raise ValueError

    handler(some_fail)
    jobs = sent(scene, 10)
    outcomes = [ending.outcome for ending in run(seat, deliveries(scene, jobs), TYPE)]
    assert outcomes == [
        Outcome.RETRIED if n in (3, 7) else Outcome.QUARANTINED if n == 5 else Outcome.SUCCEEDED for n in range(10)
    ]
    assert effects(scene) == [job_id for n, job_id in enumerate(jobs) if n not in (3, 5, 7)]
    assert (scene.row(jobs[3])["failures"], scene.owed(jobs[3])) == (1, "wake 1")
    assert (scene.state(jobs[5]), scene.owed(jobs[5])) == ("quarantined", "trace 1")
    assert scene.journal(jobs[3]) == ["submit", "received", "claim", "retry", "retry_scheduled"]


def test_an_error_of_the_database_in_one_job_leaves_the_others_untouched(
    scene: Scene, seat: Seat, handler: Callable[[Handler], None]
) -> None:
    def twice(job: Job, payload: Number) -> None:
        if payload.n == 1:
            job.execute("SELECT 1 / 0")

    handler(twice)
    jobs = sent(scene, 3)
    endings = run(seat, deliveries(scene, jobs), TYPE)
    assert effects(scene) == [jobs[0], jobs[2]]
    assert endings[1].outcome is not Outcome.SUCCEEDED
    assert scene.row(jobs[1])["failures"] == 1


def test_a_slip_in_a_statement_is_a_failure_of_its_job_alone(
    scene: Scene, seat: Seat, handler: Callable[[Handler], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL reads the whole message first: the savepoint must not have been part of it."""

    def slip(job: Job, payload: Number) -> None:
        job.execute("SELEKT 1" if payload.n == 1 else EFFECT, None if payload.n == 1 else (str(job.job_id), 0))

    jobs = sent(scene, 3)
    handler(slip)
    monkeypatch.setitem(attempt.HANDLERS, (TYPE.name, TYPE.version), slip)
    run(seat, deliveries(scene, jobs), TYPE)
    assert effects(scene) == [jobs[0], jobs[2]]
    assert (scene.state(jobs[1]), scene.row(jobs[1])["failures"]) != ("queued", 0)


def test_a_constraint_at_the_commit_finds_its_job(scene: Scene, seat: Seat, handler: Callable[[Handler], None]) -> None:
    """The commit is everybody's; so each job is attempted alone, and only one of them breaks the constraint."""
    rows(
        scene.eyes,
        "DROP TABLE IF EXISTS deferred;"
        " CREATE TABLE deferred (n int, CONSTRAINT deferred_n UNIQUE (n) DEFERRABLE INITIALLY DEFERRED)",
    )

    def write(job: Job, payload: Number) -> None:
        job.execute("INSERT INTO deferred VALUES (%s)", (payload.n,))
        if payload.n == 2:
            job.execute("INSERT INTO deferred VALUES (%s)", (payload.n,))

    handler(write)
    jobs = sent(scene, 5)
    run(seat, deliveries(scene, jobs), TYPE)
    assert effects(scene) == [job_id for n, job_id in enumerate(jobs) if n != 2]
    assert scene.state(jobs[2]) in ("retry_wait", "quarantined")
    assert rows(scene.eyes, "SELECT n FROM deferred ORDER BY n") == [(0,), (1,), (3,), (4,)]


@pytest.mark.usefixtures("handler")
def test_what_somebody_else_holds_or_has_finished_is_left_to_him(scene: Scene, seat: Seat) -> None:
    jobs = sent(scene, 4)
    scene.change(jobs[0], state="cancelled", finished_at="now")
    with scene.holding(jobs[1]):
        endings = run(seat, deliveries(scene, jobs), TYPE)
    assert [ending.outcome for ending in endings] == [Outcome.SKIPPED, Outcome.SKIPPED, *[Outcome.SUCCEEDED] * 2]
    assert effects(scene) == jobs[2:]


def test_a_session_that_breaks_in_the_middle_repeats_the_unfinished(
    scene: Scene, seat: Seat, handler: Callable[[Handler], None]
) -> None:
    broken: list[int] = []

    def cut(job: Job, payload: Number) -> None:
        if payload.n == 3 and not broken:
            broken.append(1)
            rows(scene.eyes, "SELECT pg_terminate_backend(%s)", (job.connection.info.backend_pid,))
            job.execute("SELECT 1")

    handler(cut)
    jobs = sent(scene, 6)
    endings = run(seat, deliveries(scene, jobs), TYPE)
    assert {ending.outcome for ending in endings} == {Outcome.SUCCEEDED}
    assert effects(scene) == jobs
    assert {scene.row(job_id)["failures"] for job_id in jobs} == {0}


def test_a_process_that_ends_in_the_middle_blames_nobody(
    scene: Scene, seat: Seat, handler: Callable[[Handler], None]
) -> None:
    """H8: none was committed, so none has a crash or an attempt."""

    def leave(_job: Job, payload: Number) -> None:
        if payload.n == 3:
            raise SystemExit

    handler(leave)
    jobs = sent(scene, 6)
    with pytest.raises(SystemExit):
        run(seat, deliveries(scene, jobs), TYPE)
    assert effects(scene) == []
    assert {(scene.row(job_id)["state"], scene.row(job_id)["attempt"]) for job_id in jobs} == {("queued", 0)}


def test_a_redelivered_group_runs_one_by_one(scene: Scene, seat: Seat, handler: Callable[[Handler], None]) -> None:
    """Each claim is committed before its handler starts: a crash is counted where it happens."""
    seen: list[str] = []
    handler(lambda job, _payload: seen.append(scene.state(job.job_id)))
    jobs = sent(scene, 4)
    run(seat, deliveries(scene, jobs, redelivered=True), TYPE)
    assert seen == ["running"] * 4
    assert effects(scene) == jobs


def test_children_are_there_when_their_parents_are(
    scene: Scene, seat: Seat, handler: Callable[[Handler], None]
) -> None:
    def parent(job: Job, payload: Number) -> None:
        job.outgoing.append(submit.prepare(TYPE, Number(n=payload.n + 100), parent_id=job.job_id))
        if payload.n == 1:
            raise TransientError("later")

    handler(parent)
    jobs = sent(scene, 3)
    run(seat, deliveries(scene, jobs), TYPE)
    parents = {UUID(str(row[0])) for row in rows(scene.eyes, "SELECT parent_id FROM jobs WHERE parent_id IS NOT NULL")}
    assert parents == {jobs[0], jobs[2]}


def test_a_chunk_grows_while_jobs_are_quick_and_shrinks_when_they_are_not() -> None:
    pace = Pace()
    sizes = []
    for _ in range(8):
        pace.note(pace.jobs, CHUNK_S / 2)
        sizes.append(pace.jobs)
    assert sizes == [2, 4, 8, 16, 32, 50, 50, 50]
    pace.note(50, CHUNK_S * 10)
    assert pace.jobs == 5
    pace.note(5, CHUNK_S * 100)
    assert pace.jobs == 1
    pace.note(1, 30.0)
    assert pace.jobs == 1


@pytest.mark.usefixtures("handler")
def test_a_chunk_is_one_commit(scene: Scene, seat: Seat) -> None:
    jobs = sent(scene, 20)
    before = scene.ask("SELECT txid_current()")
    run(seat, deliveries(scene, jobs), TYPE)
    assert scene.ask("SELECT count(DISTINCT xmin::text) FROM jobs WHERE state = 'succeeded'") == 1
    assert before is not None


@pytest.mark.usefixtures("handler")
def test_a_lost_answer_to_the_commit_is_settled_by_reading_again(
    scene: Scene, seat: Seat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands or it does not, for all of them: nobody runs again, and each is told as it ended."""
    write, answers = finish.succeed_all, ["lost", "never sent"]

    def succeed_all(connection: PgConnection, *rest: Any) -> None:
        answer = answers.pop() if answers else ""
        if answer == "lost":
            write(connection, *rest)
        if answer:
            connection.close()
            raise psycopg2.OperationalError(answer)
        write(connection, *rest)

    monkeypatch.setattr(finish, "succeed_all", succeed_all)
    for _ in range(2):
        jobs = sent(scene, 4)
        endings = run(seat, deliveries(scene, jobs), TYPE)
        assert [ending.outcome for ending in endings] == [Outcome.SUCCEEDED] * 4
        assert effects(scene)[-4:] == jobs
    assert len(effects(scene)) == 8


def test_a_watch_outlives_what_cannot_be_given_back_and_sees_every_thread() -> None:
    """In a pool of threads several deliveries are at work at once."""
    given: list[int] = []

    def fails() -> None:
        given.append(0)
        raise RuntimeError

    watched = [Watched(None, fails), Watched(None, lambda: given.append(1))]
    watch = Watch(may_tell=False)
    for one_of in watched:
        watch.start(one_of)
        one_of.begin()
        assert one_of.since is not None
        one_of.since -= SLOW_S
    wait_for(lambda: given == [0, 1], 10, "both are given back")
    watch.stop(watched[0])
    watch.stop(watched[1])
