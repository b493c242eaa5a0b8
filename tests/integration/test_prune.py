"""Retention: what goes, what stays and why, and that a pruned job still answers for its key."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg2
import pytest

from app import claim, park, submit
from app.adopt import adopt
from app.ages import Age
from app.claim import Refusal
from app.errors import IdempotencyConflict
from app.retention import jobs as retention_jobs
from app.retention.archive import Archive, ArchiveError
from app.retention.policy import Retention
from app.retention.prune import Pruned, Run
from app.states import State
from app.submit import prepare
from db.session import rows
from tests.integration.scene import PLAIN, Background, Number, Scene

SHORT = Retention(
    succeeded=Age("1d"),
    cancelled=Age("1d"),
    quarantined=Age("1d"),
    journal=Age("1d"),
    dead_letters=Age("10d"),
    replay_runs=Age("10d"),
    batches=Age("10d"),
    workers=Age("1d"),
    keyless=Age("1d"),
)
LONG_AGO = "now() - interval '2 days'"
End = Callable[..., UUID]


@pytest.fixture
def ended(scene: Scene) -> End:
    """A job that ended two days ago, paid and with its journal; columns as given."""

    def made(key: str | None = "k", **columns: Any) -> UUID:
        job = prepare(PLAIN, Number(n=7), idempotency_key=key)
        submit.within(partial(rows, scene.eyes), [job])
        values = {"state": "succeeded", "result_key": "file:1", **columns}
        if values["state"] != "succeeded":
            values["result_key"] = None
        rows(scene.eyes, "DELETE FROM outbox WHERE job_id = %s", (str(job.job_id),))
        rows(
            scene.eyes,
            f"UPDATE jobs SET created_at = {LONG_AGO}, changed_at = {LONG_AGO}, finished_at = CASE"
            f" WHEN %(state)s IN ('succeeded', 'cancelled') THEN {LONG_AGO} END, "
            + ", ".join(f"{name} = %({name})s" for name in values)
            + " WHERE job_id = %(_id)s",
            {**values, "_id": str(job.job_id)},
        )
        return job.job_id

    return made


def prune(scene: Scene, retention: Retention = SHORT, **terms: Any) -> Pruned:
    return Run(scene.connect(), retention, pause_s=0, **terms).go()


def there(scene: Scene, job_id: UUID) -> bool:
    return bool(scene.ask("SELECT count(*) FROM jobs WHERE job_id = %s", (str(job_id),)))


def stone(scene: Scene, job_id: UUID) -> Any:
    found = scene.records("SELECT * FROM job_tombstones WHERE job_id = %s", (str(job_id),))
    return found[0] if found else None


# what goes


@pytest.mark.parametrize("state", ["succeeded", "cancelled"])
def test_an_old_end_goes_with_its_journal_and_leaves_a_tombstone(scene: Scene, ended: End, state: str) -> None:
    job_id = ended(state=state)
    row = scene.row(job_id)
    done = prune(scene)
    assert (done.jobs, done.complete) == ({(state, PLAIN.name): 1}, True)
    assert not there(scene, job_id)
    assert scene.journal(job_id) == []
    left = stone(scene, job_id)
    assert (left["type"], left["state"], left["result_key"]) == (PLAIN.name, state, row["result_key"])
    assert (bytes(left["payload_digest"]), left["keyed"]) == (bytes(row["payload_digest"]), True)
    assert not prune(scene).jobs


def test_what_belongs_to_a_job_goes_with_it(scene: Scene, ended: End) -> None:
    job_id = str(ended())
    rows(scene.eyes, "INSERT INTO effects (job_id, name, attempt, idempotency_key) VALUES (%s, 'a', 1, 'k')", (job_id,))
    rows(
        scene.eyes,
        "INSERT INTO quarantine_entries (job_id, episode, cause, fingerprint, reason, attempt, closed_at)"
        " VALUES (%s, 1, 'c', 'f', 'r', 1, now())",
        (job_id,),
    )
    prune(scene)
    for table in ("jobs", "effects", "quarantine_entries", "job_events"):
        assert scene.ask(f"SELECT count(*) FROM {table}") == 0


def test_many_pages_and_a_dry_run_before(scene: Scene, ended: End) -> None:
    ids = [ended(f"k{n}", state="cancelled" if n % 3 else "succeeded") for n in range(10)]
    rows(scene.eyes, "UPDATE jobs SET created_at = '2020-01-01'")  # one moment: the id breaks the tie
    seen: list[Any] = []
    dry = prune(scene, page_rows=3, dry=True, saved=seen.append)
    assert all(there(scene, job_id) for job_id in ids)
    assert len(seen) == 4
    assert prune(scene, page_rows=3).jobs == dry.jobs == {("cancelled", PLAIN.name): 6, ("succeeded", PLAIN.name): 4}
    assert not any(there(scene, job_id) for job_id in ids)


# what stays


def open_batch(scene: Scene, job_id: UUID, *, of: str) -> None:
    """One that needs the job: as its child, as somebody else's child that it waits for, as its coordinator."""
    batch = str(job_id) if of == "coordinator" else str(uuid.uuid4())
    rows(scene.eyes, "INSERT INTO batches (batch_id, coordinator_id) VALUES (%(id)s, %(id)s)", {"id": batch})
    if of == "child":
        scene.change(job_id, batch_id=batch)
    if of == "shared":
        rows(scene.eyes, "INSERT INTO batch_shared_jobs (batch_id, job_id) VALUES (%s, %s)", (batch, str(job_id)))


def batch_without_summary(scene: Scene, job_id: UUID) -> None:
    """It has ended, and its completion job, which reads the children, has not."""
    open_batch(scene, job_id, of="child")
    rows(
        scene.eyes,
        "UPDATE batches SET finished_at = now(), exhausted = true, completion_id = %s",
        (str(scene.job()),),
    )


def dead_letter(scene: Scene, job_id: UUID | None, received_at: str = "now") -> None:
    rows(
        scene.eyes,
        "INSERT INTO dead_letters (job_id, episode, copy, body, reason, received_at) VALUES (%s, 1, 1, '', 'r', %s)",
        (str(job_id) if job_id else None, received_at),
    )


def open_entry(scene: Scene, job_id: UUID) -> None:
    rows(
        scene.eyes,
        "INSERT INTO quarantine_entries (job_id, episode, cause, fingerprint, reason, attempt)"
        " VALUES (%s, 1, 'c', 'f', 'r', 1)",
        (str(job_id),),
    )


def open_parent(scene: Scene, job_id: UUID) -> None:
    scene.change(job_id, parent_id=str(scene.job()))


def unpaid_debt(scene: Scene, job_id: UUID) -> None:
    rows(
        scene.eyes,
        "INSERT INTO outbox (job_id, queue, type, schema_version, correlation_id) VALUES (%s, 'jobs', 't', 1, '')",
        (str(job_id),),
    )


def young(scene: Scene, job_id: UUID) -> None:
    rows(scene.eyes, "UPDATE jobs SET finished_at = now(), changed_at = now() WHERE job_id = %s", (str(job_id),))


@pytest.mark.parametrize(
    ("need", "why"),
    [
        (partial(open_batch, of="child"), "an open batch"),
        (partial(open_batch, of="coordinator"), "an open batch"),
        (partial(open_batch, of="shared"), "an open batch"),
        (batch_without_summary, "an open batch"),
        (dead_letter, "a dead letter"),
        (open_entry, "an open quarantine entry"),
        (open_parent, "an open parent"),
        (unpaid_debt, "an unpaid debt"),
        (young, None),
    ],
    ids=["batch", "coordinator", "shared", "summary", "dead letter", "entry", "parent", "debt", "young"],
)
def test_a_job_that_is_needed_stays(scene: Scene, ended: End, need: Callable[..., None], why: str | None) -> None:
    kept, other = ended("kept"), ended("other")
    need(scene, kept)
    done = prune(scene)
    assert (there(scene, kept), there(scene, other)) == (True, False)
    assert done.kept == ({why: 1} if why else {})
    assert scene.journal(kept)


def test_what_no_longer_needs_it_lets_it_go(scene: Scene, ended: End) -> None:
    job_id = ended()
    open_batch(scene, job_id, of="child")
    dead_letter(scene, job_id, "2020-01-01")  # older than its own retention: it goes first
    rows(scene.eyes, "UPDATE batches SET created_at = '2020-01-01', finished_at = '2020-01-02', exhausted = true")
    done = prune(scene)
    assert not there(scene, job_id)
    assert +done.rest == {"dead_letters": 1, "batches": 1}


@pytest.mark.parametrize(
    "columns",
    [
        {"state": "queued"},
        {"state": "running", "worker_id": str(uuid.uuid4())},
        {"state": "retry_wait", "not_before": "now"},
    ],
    ids=lambda columns: columns["state"],
)
def test_a_job_that_has_not_ended_stays_however_old(scene: Scene, ended: End, columns: dict[str, Any]) -> None:
    job_id = ended(**columns)
    assert not prune(scene).jobs
    assert there(scene, job_id)


def test_quarantined_jobs_stay_by_default_and_while_their_entry_is_open(scene: Scene, ended: End) -> None:
    job_id = ended(state="quarantined", cause="permanent", episode=1)
    open_entry(scene, job_id)
    assert not prune(scene).jobs
    rows(scene.eyes, "UPDATE quarantine_entries SET closed_at = now()")
    assert not prune(scene, replace(SHORT, quarantined=Age("never"))).jobs
    assert prune(scene).jobs == {("quarantined", PLAIN.name): 1}


def test_a_replay_between_the_two_looks_keeps_the_job(
    scene: Scene, ended: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Judged as closed, then replayed and quarantined anew, then locked: it has an open entry again."""
    job_id = ended(state="quarantined", cause="permanent", episode=1)
    judged = retention_jobs.page

    def page(*arguments: Any) -> Any:
        found = judged(*arguments)
        if found:
            open_entry(scene, job_id)
        return found

    monkeypatch.setattr(retention_jobs, "page", page)
    assert not prune(scene).jobs
    assert there(scene, job_id)


def test_never_means_never(scene: Scene, ended: End) -> None:
    job_id = ended()
    dead_letter(scene, job_id, "2020-01-01")
    done = prune(scene, Retention())
    assert (done.jobs, +done.rest, done.complete) == ({}, {}, True)


# two at once, and ends in between


def test_two_at_once_share_the_work(scene: Scene, ended: End) -> None:
    for n in range(40):
        ended(f"k{n}")
    first, second = scene.at_once(*(partial(prune, scene, page_rows=3) for _ in range(2)))
    assert first.jobs.total() + second.jobs.total() == 40
    assert scene.ask("SELECT count(*) FROM job_tombstones") == 40


def test_a_row_that_somebody_holds_is_left_for_later(scene: Scene, ended: End) -> None:
    job_id = ended()
    with scene.holding(job_id):
        assert not prune(scene).jobs
    assert prune(scene).jobs.total() == 1


def test_it_stops_when_it_is_told_and_goes_on_from_its_cursor(scene: Scene, ended: End) -> None:
    for n in range(6):
        ended(f"k{n}")
    places: list[Any] = []
    done = prune(scene, page_rows=2, saved=places.append, stop=lambda: len(places) >= 2)
    assert (done.jobs.total(), done.complete) == (4, False)
    assert prune(scene, page_rows=2, after=places[-1]).jobs.total() == 2


# the same key afterwards


def again(scene: Scene, key: str | None = "k", n: int = 7) -> Any:
    return submit.within(partial(rows, scene.connect()), [prepare(PLAIN, Number(n=n), idempotency_key=key)])[0]


@pytest.mark.parametrize("state", ["succeeded", "cancelled"])
def test_the_same_key_gives_the_old_answer(scene: Scene, producer_settings: Any, ended: End, state: str) -> None:
    assert producer_settings
    job_id = ended(state=state)
    prune(scene)
    alone = submit.alone(prepare(PLAIN, Number(n=7), idempotency_key="k"))
    for answer in (again(scene), alone):
        assert (answer.job_id, answer.created, answer.state) == (job_id, False, State(state))
    with pytest.raises(IdempotencyConflict):
        again(scene, n=8)
    assert not there(scene, job_id)


@pytest.mark.parametrize("way", ["alone", "within"])
def test_a_submit_that_meets_the_prune_half_way(scene: Scene, producer_settings: Any, ended: End, way: str) -> None:
    """It looked for a tombstone before there was one, and the row that stands in its way goes while it waits."""
    assert producer_settings
    job_id = ended()
    other = scene.connect()
    (held,) = retention_jobs.hold(other, SHORT, retention_jobs.clock(other), [str(job_id)])
    rows(other, retention_jobs.BURY, {"ids": [held.job_id]})
    job = prepare(PLAIN, Number(n=7), idempotency_key="k")
    waiting = Background(lambda: submit.alone(job) if way == "alone" else again(scene))
    scene.wait_until_blocked()
    rows(other, "COMMIT")
    assert waiting.result() == submit.Submitted(job_id, created=False, state=State.SUCCEEDED)
    assert not there(scene, job_id)
    assert scene.debt(job_id) is None


def test_a_frozen_prune_gives_its_rows_back(
    scene: Scene, producer_settings: Any, ended: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped between its lock and its delete: who submits the key again waits for the server to end its session."""
    assert producer_settings
    job_id = ended()
    monkeypatch.setattr(retention_jobs, "BEGIN", retention_jobs.BEGIN.replace("'8s'", "'300ms'"))
    frozen = scene.connect()
    assert retention_jobs.hold(frozen, SHORT, retention_jobs.clock(frozen), [str(job_id)])
    answer = submit.alone(prepare(PLAIN, Number(n=7), idempotency_key="k"))
    assert (answer.job_id, answer.created, answer.state) == (job_id, False, State.SUCCEEDED)
    with pytest.raises(psycopg2.Error):
        retention_jobs.bury(frozen, [str(job_id)])
    assert there(scene, job_id)


def test_a_job_without_a_key_has_a_tombstone_for_a_while(scene: Scene, ended: End) -> None:
    job_id = ended(None)
    prune(scene)
    assert stone(scene, job_id)["keyed"] is False
    rows(scene.eyes, "UPDATE job_tombstones SET pruned_at = pruned_at - interval '2 days'")
    assert prune(scene).rest["tombstones"] == 1
    assert stone(scene, job_id) is None


def test_a_key_stays_taken_for_good_unless_told_otherwise(scene: Scene, ended: End) -> None:
    job_id = ended()
    prune(scene)
    rows(scene.eyes, "UPDATE job_tombstones SET pruned_at = '2020-01-01'")
    assert not +prune(scene).rest
    assert stone(scene, job_id)
    assert prune(scene, replace(SHORT, tombstones=Age("365d"))).rest["tombstones"] == 1
    assert again(scene).created


def test_the_callers_own_id_stays_taken(scene: Scene) -> None:
    """A foreign client's late copy of a message must not be adopted again."""
    task_id = uuid.uuid4()
    adopt(scene.eyes, task_id, PLAIN, {"n": 1})
    rows(scene.eyes, "DELETE FROM outbox")
    rows(
        scene.eyes,
        "UPDATE jobs SET state = 'succeeded', result_key = 'x', created_at = '2020-01-01', finished_at = '2020-01-01'"
        " WHERE job_id = %s",
        (str(task_id),),
    )
    prune(scene)
    assert stone(scene, task_id)["keyed"] is True
    assert adopt(scene.eyes, task_id, PLAIN, {"n": 1}) == task_id
    assert not there(scene, task_id)


@pytest.mark.parametrize("key", ["k", None])
def test_a_late_copy_of_a_pruned_job_is_acknowledged(scene: Scene, ended: End, key: str | None) -> None:
    job_id, worker = ended(key), scene.worker()
    prune(scene)
    delivery = scene.delivery(job_id)
    assert claim.claim(worker.session, delivery, worker.worker_id, worker.pid) is None
    assert claim.begin_atomic(worker.session, delivery, worker.worker_id) is None
    assert claim.look(worker.session, delivery, worker.worker_id) is Refusal.FINISHED
    parked = partial(park.park, scene.eyes, copy=1, episode=1, worker_id=worker.worker_id, grace_s=600, offer_s=1)
    assert parked(job_id=job_id) is park.Parked.LEFT
    assert parked(job_id=uuid.uuid4()) is park.Parked.UNKNOWN


# the rest


def test_the_journal_of_late_copies_goes_by_age(scene: Scene, ended: End) -> None:
    kept = ended(state="queued")
    for n, at in enumerate(("2020-01-01", "2020-01-02", "now")):
        rows(
            scene.eyes,
            "INSERT INTO job_events (job_id, event, at) SELECT md5(n::text)::uuid, 'received', %s"
            " FROM generate_series(%s, %s) n",
            (at, n * 100, n * 100 + 9),
        )
    rows(scene.eyes, "UPDATE job_events SET at = '2020-01-01' WHERE event = 'submit'")
    assert prune(scene, page_rows=4).rest["journals"] == 20
    assert scene.ask("SELECT count(*) FROM job_events WHERE event = 'received'") == 10
    assert scene.journal(kept) == ["submit"]


def test_workers_runs_and_dead_letters_by_age(scene: Scene, ended: End) -> None:
    job_id = ended(state="queued")
    lost, stopped, busy, live = (scene.worker() for _ in range(4))
    for worker in (lost, busy):
        scene.lose(worker)
    scene.do("UPDATE workers SET stopped_at = '2020-01-01' WHERE worker_id = %s", stopped)
    rows(scene.eyes, "UPDATE workers SET lost_at = '2020-01-01' WHERE lost_at IS NOT NULL")
    scene.change(job_id, state="running", worker_id=str(busy.worker_id))
    for at in ("2020-01-01", "now"):
        rows(
            scene.eyes,
            "INSERT INTO replay_runs (run_id, stages, author, reason, created_at)"
            " VALUES (gen_random_uuid(), '[]', 'a', 'r', %s)",
            (at,),
        )
    dead_letter(scene, None, "2020-01-01")
    rows(
        scene.eyes,
        "UPDATE dead_letters SET dismissed_at = '2020-01-02', dismissed_by = 'me', dismissed_reason = 'old'",
    )
    for whose in (job_id, None):  # of a job that has not ended, and of no job
        dead_letter(scene, whose, "2020-01-01")
    done = prune(scene)
    assert +done.rest == {"workers": 2, "replay_runs": 1, "dead_letters": 1}
    left = {row[0] for row in rows(scene.eyes, "SELECT worker_id::text FROM workers")}
    assert left == {str(busy.worker_id), str(live.worker_id)}
    assert scene.ask("SELECT count(*) FROM dead_letters") == 2


# the export


@pytest.mark.parametrize("name", ["pruned.jsonl", "pruned.jsonl.gz"])
def test_the_export_holds_each_job_and_no_payload(scene: Scene, ended: End, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    ids = [ended(f"k{n}", result='{"secret": 1}') for n in range(5)]
    rows(scene.eyes, "INSERT INTO job_events (job_id, event, at) VALUES (gen_random_uuid(), 'received', '2020-01-01')")
    with Archive(path) as archive:
        prune(scene, page_rows=2, archive=archive)
    found = lines(path)
    jobs = {line["job_id"]: line for line in found if line["job"]}
    assert set(jobs) == set(map(str, ids))
    line = jobs[str(ids[0])]
    assert (line["job"]["type"], line["job"]["idempotency_key"]) == (PLAIN.name, "k0")
    assert [event["event"] for event in line["journal"]] == ["submit"]
    assert not {"payload", "result", "checkpoint"} & line["job"].keys()
    (orphan,) = [line for line in found if not line["job"]]
    assert [event["event"] for event in orphan["journal"]] == ["received"]
    assert path.stat().st_mode & 0o077 == 0


def test_an_export_that_fails_deletes_nothing(
    scene: Scene, ended: End, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = ended()

    def full(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    with Archive(tmp_path / "a.jsonl") as archive:
        monkeypatch.setattr("app.retention.archive.os.fsync", full)
        with pytest.raises(ArchiveError, match="No space left"):
            prune(scene, archive=archive)
    assert there(scene, job_id)
    assert scene.journal(job_id) == ["submit"]


def test_a_database_that_goes_away_loses_nothing(scene: Scene, ended: End, tmp_path: Path) -> None:
    job_id = ended()
    session = scene.connect()
    with Archive(tmp_path / "a.jsonl") as archive:
        real = archive.write

        def written_then_gone(*given: Any) -> None:
            real(*given)
            session.close()

        archive.write = written_then_gone  # type: ignore[method-assign, assignment]
        with pytest.raises(psycopg2.InterfaceError):
            Run(session, SHORT, pause_s=0, archive=archive).go()
    assert there(scene, job_id)


def lines(path: Path) -> list[Any]:
    import gzip  # noqa: PLC0415

    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    return [json.loads(line) for line in text.splitlines()]
