"""Batches: a coordinator that dies anywhere, children that end in every way, and one completion job."""

from __future__ import annotations

import threading
import uuid
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from click.testing import CliRunner

from app import batches as mechanism
from app import completion, finish, release, submit
from app import settings as app_settings
from app.cancel import cancel
from app.ending import Settlement
from app.job import Job
from db.session import rows
from tests.integration.batch_scene import Batches, nth_time
from tests.integration.scene import Background, Scene

N, SIZE = 5, 3  # pages of 3 and 2 children, and the empty one that ends the source
PAGES = 3
KEYS = [f"n{n}" for n in range(1, N + 1)]


def keys(scene: Scene, batch_id: UUID) -> list[str]:
    """The keys of the children, in the order of their numbers."""
    found = rows(
        scene.eyes,
        "SELECT idempotency_key FROM jobs WHERE batch_id = %s ORDER BY (payload ->> 'n')::int",
        (str(batch_id),),
    )
    return [row[0] for row in found]


def counts(scene: Scene, batch_id: UUID) -> dict[str, int]:
    from app import batch_story  # noqa: PLC0415

    story = batch_story.show(scene.eyes, batch_id)
    assert story is not None
    children: dict[str, int] = story["children"]
    return children


def die() -> None:
    """What ends a process at once: nothing of ours catches it, and its sessions end with their transactions."""
    raise KeyboardInterrupt


# the coordinator

PLACES: dict[str, tuple[Any, str]] = {
    "begin": (mechanism, "begin"),
    "submit_children": (mechanism, "submit_children"),  # inside the page's transaction
    "submit_page": (mechanism, "submit_page"),  # after it: the page is committed
    "complete": (mechanism, "complete"),
}
BOUNDARIES = [
    *[("begin", 1, before) for before in (True, False)],
    *[("submit_children", page, before) for page in range(1, PAGES + 1) for before in (True, False)],
    *[("submit_page", page, False) for page in range(1, PAGES + 1)],
    *[("complete", 1, before) for before in (True, False)],
]


@pytest.mark.parametrize(("place", "page", "before"), BOUNDARIES)
def test_coordinator_that_dies_at_a_page_boundary_goes_on(
    scene: Scene, batches: Batches, monkeypatch: pytest.MonkeyPatch, place: str, page: int, before: bool
) -> None:
    owner, name = PLACES[place]
    batch_id, worker = batches.submit(children=N, size=SIZE), scene.worker()
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, nth_time(getattr(owner, name), page, die, before=before))
        with pytest.raises(KeyboardInterrupt):
            batches.attempt(batch_id, worker)
    committed = {"begin": 0, "submit_children": page - 1, "submit_page": page, "complete": PAGES}[place]
    assert keys(scene, batch_id) == KEYS[: SIZE * committed]
    batches.lose(worker)
    assert batches.attempt(batch_id).settlement is Settlement.SUCCEEDED
    assert keys(scene, batch_id) == KEYS
    assert (scene.row(batch_id)["stalls"], scene.row(batch_id)["result"]) == (1, {"children": N})
    batches.end_by_hand(batch_id)
    assert batches.look() == [batch_id]
    assert (batches.look(), batches.completions()) == ([], 1)


FROZEN = [("submit_children", 2, True), ("submit_children", 2, False), ("submit_page", 2, False), ("complete", 1, True)]


@pytest.mark.parametrize(("place", "page", "before"), FROZEN)
def test_frozen_coordinator_that_wakes_up_writes_nothing(
    scene: Scene, batches: Batches, monkeypatch: pytest.MonkeyPatch, place: str, page: int, before: bool
) -> None:
    """Another attempt has done all by then; in the middle of a page the sweeper ends the frozen one's transaction."""
    frozen, thaw = threading.Event(), threading.Event()

    def freeze() -> None:
        if not frozen.is_set():
            frozen.set()
            assert thaw.wait(20)

    owner, name = PLACES[place]
    batch_id, worker = batches.submit(children=N, size=SIZE), scene.worker()
    monkeypatch.setattr(owner, name, nth_time(getattr(owner, name), page, freeze, before=before))
    old = Background(lambda: batches.attempt(batch_id, worker))
    assert frozen.wait(10)
    batches.lose(worker)
    batches.attempt(batch_id)
    batches.end_by_hand(batch_id)
    assert batches.look() == [batch_id]
    picture = scene.picture(but="job_events")
    thaw.set()
    assert old.result(20).settlement is Settlement.IGNORE
    assert scene.picture(but="job_events") == picture
    assert (keys(scene, batch_id), batches.completions()) == (KEYS, 1)


def test_page_of_a_lost_attempt_is_rolled_back_whole(
    scene: Scene, batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old attempt is in the middle of its page when the job is taken from it, and its session lives on."""
    batch_id, worker = batches.submit(children=N, size=SIZE), scene.worker()

    def taken() -> None:
        holder = {"job_id": str(batch_id), "worker": str(worker.worker_id)}
        rows(
            scene.eyes,
            "UPDATE jobs SET state = 'queued', worker_id = NULL, child_pid = NULL, stalls = stalls + 1"
            " WHERE job_id = %(job_id)s AND worker_id = %(worker)s",
            holder,
        )

    monkeypatch.setattr(mechanism, "submit_children", nth_time(mechanism.submit_children, 2, taken, before=False))
    assert batches.attempt(batch_id, worker).settlement is Settlement.IGNORE
    assert keys(scene, batch_id) == KEYS[:SIZE]
    assert batches.row(batch_id)["cursor"] == SIZE


def test_leaving_worker_hands_over_at_a_page(scene: Scene, batches: Batches, monkeypatch: pytest.MonkeyPatch) -> None:
    stops = iter([False, True])
    with monkeypatch.context() as patched:
        patched.setattr(Job, "should_stop", property(lambda _job: next(stops)))
        batch_id = batches.submit(children=N, size=SIZE)
        assert batches.attempt(batch_id).settlement is Settlement.IGNORE
    row = scene.row(batch_id)
    assert (row["state"], row["releases"], row["crashes"]) == ("queued", 1, 0)
    assert keys(scene, batch_id) == KEYS[:SIZE]
    batches.attempt(batch_id)
    assert keys(scene, batch_id) == KEYS


def test_coordinator_gives_itself_back_before_its_time_limit(
    scene: Scene, batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([0.0, 1.0, batches.tasks.numbers.job_type.time_limit_s / 2 + 1])
    with monkeypatch.context() as patched:
        patched.setattr(mechanism, "boottime_s", lambda: next(times))
        batch_id = batches.submit(children=N, size=SIZE)
        batches.attempt(batch_id)
    assert (scene.state(batch_id), scene.row(batch_id)["releases"]) == ("queued", 1)
    assert keys(scene, batch_id) == KEYS[:SIZE]


def test_empty_source_completes_at_once(scene: Scene, batches: Batches) -> None:
    batch_id = batches.run(children=0)
    assert batches.row(batch_id)["finished_at"] is not None
    assert (batches.completions(), counts(scene, batch_id)) == (1, {})


def test_page_that_does_not_move_on_is_refused(scene: Scene, batches: Batches, monkeypatch: pytest.MonkeyPatch) -> None:
    submit_page = mechanism.submit_page

    def stuck(job: Job, plan: mechanism.Plan, before: Any) -> Any:
        here = mechanism.Plan(lambda _session, _payload, _after: mechanism.Page((), {"at": 1}), plan.child)
        return submit_page(job, here, before)

    monkeypatch.setattr(mechanism, "submit_page", stuck)
    batch_id = batches.submit(children=N)
    assert batches.attempt(batch_id).settlement is Settlement.QUARANTINED
    assert "UnrecoverableError" in scene.row(batch_id)["reason"]


def test_key_with_another_payload_quarantines_the_coordinator(scene: Scene, batches: Batches, jobs: Any) -> None:
    jobs.leased_effect.apply_async(kwargs={"n": 999}, idempotency_key="n5")
    batch_id = batches.submit(children=N, size=SIZE)
    assert batches.attempt(batch_id).settlement is Settlement.QUARANTINED
    assert keys(scene, batch_id) == KEYS[:SIZE], "nothing of the page that has the taken key"
    assert batches.look() == []


def test_an_atomic_coordinator_is_refused(jobs: Any) -> None:
    from app.errors import ConfigurationError  # noqa: PLC0415
    from tasks.batch import batch  # noqa: PLC0415

    with pytest.raises(ConfigurationError, match="cannot be atomic"):
        batch("tests.refused", payload=jobs.Number, child=jobs.leased_effect, mode="atomic")


# the end


def test_last_two_children_that_end_at_the_same_moment(scene: Scene, batches: Batches) -> None:
    """Each one's transaction sees the other unfinished, so neither can complete the batch: the next look does."""
    batch_id = batches.run(children=2)
    holders = [scene.claimed(scene.worker(), child) for child in batches.children(batch_id)]
    sessions = [scene.connect() for _ in holders]
    open_child = f"SELECT {completion.HAS_OPEN_CHILD} FROM batches WHERE batch_id = %s"
    for holder, session in zip(holders, sessions, strict=True):
        rows(session, "BEGIN")
        rows(
            session,
            "UPDATE jobs SET state = 'succeeded', worker_id = NULL, child_pid = NULL, result_key = 'k',"
            " finished_at = clock_timestamp() WHERE job_id = %s AND state = 'running'",
            (str(holder.claimed.job_id),),
        )
    assert [rows(session, open_child, (str(batch_id),)) for session in sessions] == [[(True,)], [(True,)]]
    for session in sessions:
        rows(session, "COMMIT")
    assert batches.completions() == 0
    assert (batches.look(), batches.completions()) == ([batch_id], 1)


def test_many_who_notice_at_once_submit_one_completion(scene: Scene, batches: Batches) -> None:
    batch_id = batches.run(children=2)
    batches.end_by_hand(batch_id)
    sessions = [scene.connect() for _ in range(4)]
    looks = [partial(completion.complete, session, batch_id) for session in sessions]
    assert sorted(scene.at_once(*looks)) == [False, False, False, True]
    assert batches.completions() == 1


def test_death_between_end_and_completion_loses_nothing(
    scene: Scene, batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id = batches.run(children=2)
    batches.end_by_hand(batch_id)
    with monkeypatch.context() as patched:
        patched.setattr(completion, "rows", nth_time(rows, 1, die, before=True))
        with pytest.raises(KeyboardInterrupt):
            completion.complete(scene.connect(), batch_id)
    assert (batches.row(batch_id)["finished_at"], batches.completions()) == (None, 0)
    assert (batches.look(), batches.completions()) == ([batch_id], 1)


def test_batch_that_cannot_be_completed_keeps_no_other_waiting(scene: Scene, batches: Batches) -> None:
    spoilt, sound = batches.run(children=1, name="a"), batches.run(children=1, name="b")
    rows(scene.eyes, "UPDATE batches SET completion = '{\"type\": 5}' WHERE batch_id = %s", (str(spoilt),))
    batches.end_by_hand(spoilt)
    batches.end_by_hand(sound)
    assert batches.look() == [sound]


def test_looks_go_round_many_open_batches(scene: Scene, batches: Batches, monkeypatch: pytest.MonkeyPatch) -> None:
    rows(
        scene.eyes,
        "INSERT INTO batches (batch_id, coordinator_id, exhausted)"
        " SELECT md5(n::text)::uuid, md5(n::text)::uuid, true FROM generate_series(1, 450) n;"
        "INSERT INTO jobs (job_id, type, payload, payload_digest, correlation_id, batch_id)"
        " SELECT md5('c' || n)::uuid, 't', '{}', '', '', md5(n::text)::uuid FROM generate_series(1, 449) n",
    )
    monkeypatch.setattr(completion, "SHARE_OF_TIME", 1)
    found = [done for _ in range(3) for done in batches.completer.look(scene.eyes)]
    assert [str(batch_id) for batch_id in found] == [scene.ask("SELECT md5('450')::uuid::text")]


def decide(command: str, job_id: UUID) -> None:
    """`deadsure quarantine COMMAND JOB_ID`."""
    from tasks.commands import deadsure  # noqa: PLC0415  reads the environment when it is imported

    why = ["--evidence", "seen"] if command == "settle" else ["--reason", "c31", "--yes"]
    done = CliRunner().invoke(deadsure, ["quarantine", command, str(job_id), *why])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("last", ["replay", "cancel", "settle"])
def test_c31_completion_comes_once_whatever_became_of_the_children(scene: Scene, batches: Batches, last: str) -> None:
    """Requeued by an orderly shutdown, retried, killed at a deploy, cancelled; and one that went to quarantine."""
    batch_id = batches.run(children=6)
    requeued, retried, killed, cancelled, quarantined, plain = batches.children(batch_id)
    worker, eyes = scene.worker(), scene.eyes
    scene.claimed(worker, requeued)
    assert release.release(eyes, requeued, worker.worker_id, worker.pid, "the worker is leaving")
    finish.retry(eyes, scene.claimed(worker, retried), 0, "transient", "why", in_transaction=False)
    scene.claimed(worker, killed)
    batches.lose(worker)
    cancel(eyes, cancelled)
    batches.quarantine(quarantined)
    assert counts(scene, batch_id) == {"queued": 3, "retry_wait": 1, "quarantined": 1, "cancelled": 1}
    assert batches.look() == []
    batches.succeed(requeued, retried, killed, plain)
    assert counts(scene, batch_id) == {"succeeded": 4, "quarantined": 1, "cancelled": 1}
    assert (batches.look(), batches.completions()) == ([], 0), "a quarantined child blocks"
    decide(last, quarantined)
    if last == "replay":
        assert scene.state(quarantined) == "queued"
        assert batches.look() == []
        batches.succeed(quarantined)
    assert (batches.look(), batches.look(), batches.completions()) == ([batch_id], [], 1)
    assert sum(batches.row(batch_id)["final_counts"].values()) == 6
    batches.attempt(UUID(batches.row(batch_id)["completion_id"]))
    done = scene.row(UUID(batches.row(batch_id)["completion_id"]))
    assert (done["state"], done["result"], done["parent_id"]) == (
        "succeeded",
        {"batch_id": str(batch_id)},
        str(batch_id),
    )
    assert scene.ask("SELECT count(*) FROM test_effects WHERE kind = 'effect' AND job_id = %s", (done["job_id"],)) == 1


def test_what_has_finished_is_told_after_its_children_were_pruned(scene: Scene, batches: Batches) -> None:
    batch_id = batches.run(children=3)
    batches.end_by_hand(batch_id)
    batches.look()
    rows(scene.eyes, "DELETE FROM jobs WHERE batch_id = %s", (str(batch_id),))
    assert counts(scene, batch_id) == {"succeeded": 3}


# children that were there before


@pytest.mark.parametrize("was", ["queued", "succeeded", "of another batch", "pruned"])
def test_child_that_was_there_before_is_counted_and_waited_for(
    scene: Scene, batches: Batches, jobs: Any, was: str
) -> None:
    other = None
    if was == "of another batch":
        other = batches.run(children=1, name="other")
        (earlier,) = batches.children(other)
    else:
        earlier = UUID(jobs.leased_effect.apply_async(kwargs={"n": 1}, idempotency_key="n1").id)
    if was in ("succeeded", "pruned"):
        batches.succeed(earlier)
    if was == "pruned":
        rows(
            scene.eyes,
            "INSERT INTO job_tombstones (job_id, type, state, payload_digest) SELECT job_id, type, state,"
            " payload_digest FROM jobs WHERE job_id = %(id)s; DELETE FROM jobs WHERE job_id = %(id)s",
            {"id": str(earlier)},
        )
    batch_id = batches.run(children=4)
    assert keys(scene, batch_id) == ["n2", "n3", "n4"], "the first submitter's batch stays"
    assert scene.row(batch_id)["result"] == {"children": 4}
    open_before = was in ("queued", "of another batch")
    batches.end_by_hand(batch_id)
    assert counts(scene, batch_id) == ({"queued": 1, "succeeded": 3} if open_before else {"succeeded": 4})
    if open_before:
        assert batches.look() == []
        batches.succeed(earlier)
    assert set(batches.look()) == {batch_id, *([other] if other else [])}
    assert counts(scene, batch_id) == {"succeeded": 4}
    if other:
        assert counts(scene, other) == {"succeeded": 1}


def test_two_batches_over_the_same_keys_at_once_share_the_children(scene: Scene, batches: Batches) -> None:
    both = [batches.submit(children=N, size=SIZE, name=name) for name in ("a", "b")]
    scene.at_once(*[partial(batches.attempt, batch_id) for batch_id in both])
    for _ in range(3):  # who lost a deadlock is tried again
        for batch_id in both:
            if scene.state(batch_id) == "retry_wait":
                scene.change(batch_id, not_before="now")
                batches.attempt(batch_id)
    assert sorted(keys(scene, both[0]) + keys(scene, both[1])) == sorted(KEYS)
    assert [counts(scene, batch_id) for batch_id in both] == [{"queued": N}, {"queued": N}]
    for batch_id in both:
        batches.end_by_hand(batch_id)
    assert (set(batches.look()), batches.completions()) == (set(both), 2)


# jobs in one process


def test_eager_mode_runs_children_and_completion(
    scene: Scene, batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tasks import app  # noqa: PLC0415

    monkeypatch.setitem(app.conf, "task_always_eager", value=True)
    batch_id = batches.submit(children=4, size=2)
    assert scene.ask("SELECT count(*) FROM jobs WHERE state <> 'succeeded'") == 0
    assert (counts(scene, batch_id), batches.completions()) == ({"succeeded": 4}, 1)


def test_monthly_orders_one_report_for_each_active_account_and_sums_up(
    scene: Scene, batches: Batches, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from tasks import app  # noqa: PLC0415
    from tasks.monthly import monthly_reports  # noqa: PLC0415

    assert isinstance(batches, Batches)
    monkeypatch.setenv("REPORTS_DIR", str(tmp_path))
    app_settings.settings.cache_clear()
    monkeypatch.setitem(app.conf, "task_always_eager", value=True)
    rows(
        scene.eyes,
        "INSERT INTO accounts (name, email, currency, active)"
        " SELECT 'Ada', 'a' || n || '@b', 'EUR', n % 4 <> 0 FROM generate_series(1, 8) AS n;"
        "INSERT INTO orders (account_id, ordered_at, sku, quantity, unit_price_cents, total_cents)"
        " SELECT account_id, '2026-10-05', 'x', 2, 5, 10 FROM accounts",
    )
    batch_id = UUID(monthly_reports.delay(month="2026-10").id)
    (summary,) = scene.records("SELECT * FROM monthly_summaries")
    assert (summary["batch_id"], summary["month"]) == (str(batch_id), "2026-10")
    assert (summary["reports"], summary["missing"], summary["rows"]) == (6, 0, 6)
    assert summary["bytes"] == sum(file.stat().st_size for file in tmp_path.glob("*.csv"))
    assert scene.row(UUID(summary["job_id"]))["state"] == "succeeded"
    assert submit.identify(monthly_reports.job_type, "", "2026-10") == batch_id


def test_no_such_batch(scene: Scene) -> None:
    assert completion.complete(scene.eyes, uuid.uuid4()) is False
