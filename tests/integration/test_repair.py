"""Repairs: what no arrow leaves behind is found and mended once, by however many sweepers."""

from __future__ import annotations

from uuid import UUID

import pytest

from app.repair import repair
from tests.integration.scene import Scene

AGE_S = 30.0


def age(scene: Scene, job_id: UUID, seconds: float = AGE_S + 1) -> None:
    """Nothing has happened to the job for so long."""
    scene.ask(
        "UPDATE jobs SET changed_at = clock_timestamp() - make_interval(secs => %s) WHERE job_id = %s RETURNING 1",
        (seconds, str(job_id)),
    )


def forget_debt(scene: Scene, job_id: UUID) -> None:
    scene.ask("DELETE FROM outbox WHERE job_id = %s RETURNING 1", (str(job_id),))


def quarantined(scene: Scene, *, closed: bool = False, traced: bool = False) -> UUID:
    """A quarantined job without a debt for its trace."""
    job_id = scene.job()
    scene.change(job_id, state="quarantined", cause="permanent", reason="r", episode=1)
    scene.ask(
        "INSERT INTO quarantine_entries (job_id, episode, cause, fingerprint, reason, attempt, closed_at,"
        " dead_lettered_at) VALUES (%s, 1, 'permanent', 'f', 'r', 1, CASE WHEN %s THEN clock_timestamp() END,"
        " CASE WHEN %s THEN clock_timestamp() END) RETURNING 1",
        (str(job_id), closed, traced),
    )
    forget_debt(scene, job_id)
    age(scene, job_id)
    return job_id


def test_a_queued_job_without_debt_gets_one(scene: Scene) -> None:
    job_id, healthy = scene.job(), scene.job()
    forget_debt(scene, job_id)
    age(scene, job_id)
    age(scene, healthy)
    assert repair(scene.eyes, AGE_S) == [str(job_id)]
    debt = scene.debt(job_id)
    assert debt is not None
    assert (debt["kind"], debt["sends"], debt["episode"], debt["queue"]) == ("wake", 0, 1, "jobs")
    assert scene.journal(job_id) == ["submit", "repaired"]
    assert repair(scene.eyes, AGE_S) == []


def test_a_retry_without_debt_is_not_brought_back_early(scene: Scene) -> None:
    job_id = scene.job()
    scene.ask("UPDATE jobs SET state = 'retry_wait', not_before = clock_timestamp() + interval '1 h' RETURNING 1")
    forget_debt(scene, job_id)
    age(scene, job_id)
    assert repair(scene.eyes, AGE_S) == [str(job_id)]
    debt = scene.debt(job_id)
    assert debt is not None
    assert debt["due_at"] == scene.row(job_id)["not_before"]


def test_a_quarantined_job_without_trace_gets_the_debt_for_it(scene: Scene) -> None:
    job_id = quarantined(scene)
    assert repair(scene.eyes, AGE_S) == [str(job_id)]
    debt = scene.debt(job_id)
    assert debt is not None
    assert (debt["kind"], debt["episode"]) == ("trace", 1)
    assert scene.journal(job_id) == ["submit", "repaired"]
    assert repair(scene.eyes, AGE_S) == []


@pytest.mark.parametrize("done", [{"closed": True}, {"traced": True}])
def test_a_quarantined_job_that_is_owed_nothing_is_left_alone(scene: Scene, done: dict[str, bool]) -> None:
    quarantined(scene, **done)
    assert repair(scene.eyes, AGE_S) == []


def test_a_trace_that_was_offered_often_enough_is_not_owed_again(scene: Scene) -> None:
    job_id = quarantined(scene)
    repair(scene.eyes, AGE_S)
    scene.ask("UPDATE outbox SET sends = 8, sent_at = clock_timestamp(), due_at = 'infinity' RETURNING 1")
    assert repair(scene.eyes, AGE_S) == []
    assert scene.state(job_id) == "quarantined"


def test_what_has_just_changed_is_left_alone(scene: Scene) -> None:
    job_id = scene.job()
    forget_debt(scene, job_id)
    assert repair(scene.eyes, AGE_S) == []


def test_a_row_that_somebody_works_on_is_passed_over(scene: Scene) -> None:
    job_id = scene.job()
    forget_debt(scene, job_id)
    age(scene, job_id)
    with scene.holding(job_id):
        assert repair(scene.connect(), AGE_S) == []
    assert repair(scene.eyes, AGE_S) == [str(job_id)]


def test_two_sweepers_at_once_mend_each_job_once(scene: Scene) -> None:
    waiting = [scene.job(n=n) for n in range(20)]
    for job_id in waiting:
        forget_debt(scene, job_id)
        age(scene, job_id)
    untraced = [quarantined(scene) for _ in range(20)]
    sessions = [scene.connect(), scene.connect()]
    mended = scene.at_once(*[lambda on=on: repair(on, AGE_S) for on in sessions])
    mended.append(repair(scene.eyes, AGE_S))  # what one passed over because the other held it
    wanted = sorted(map(str, [*waiting, *untraced]))
    assert sorted(job_id for found in mended for job_id in found) == wanted
    assert scene.ask("SELECT count(*) FROM outbox") == len(wanted)
    assert scene.ask("SELECT count(*) FROM job_events WHERE event = 'repaired'") == len(wanted)
