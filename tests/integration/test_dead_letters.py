"""The store of dead letters: once each, stamping their own episode and no other."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.dead_letters import BODY_LIMIT, ITEMS_LIMIT, TEXT_LIMIT, DeadLetter, storable, store
from app.json_text import to_json
from tests.integration.scene import Scene

AGE_S = 2.0


def letter(job_id: UUID | None, **changed: Any) -> DeadLetter:
    """A dead letter of a job's first episode, first copy."""
    given_: dict[str, Any] = {
        "episode": 1,
        "copy": 1,
        "headers": {"id": str(job_id)},
        "properties": {},
        "body": b"[[], {}, null]",
        "reason": "rejected",
    }
    return DeadLetter(job_id=job_id, **{**given_, **changed})


def quarantined(scene: Scene, episode: int = 1) -> UUID:
    """A job in its `episode`-th quarantine, whose trace is owed; earlier episodes are closed."""
    job_id = scene.job()
    scene.change(job_id, state="quarantined", cause="permanent", reason="r", episode=episode)
    for number in range(1, episode + 1):
        scene.ask(
            "INSERT INTO quarantine_entries (job_id, episode, cause, fingerprint, reason, attempt, closed_at)"
            " VALUES (%s, %s, 'permanent', 'f', 'r', 1, CASE WHEN %s THEN clock_timestamp() END) RETURNING 1",
            (str(job_id), number, number < episode),
        )
    scene.ask("UPDATE outbox SET kind = 'trace', episode = %s WHERE job_id = %s RETURNING 1", (episode, str(job_id)))
    return job_id


def letters(scene: Scene) -> int:
    return int(scene.ask("SELECT count(*) FROM dead_letters"))


def stamped(scene: Scene, job_id: UUID) -> list[bool]:
    """Whether each episode of the job has its dead letter."""
    return [entry["dead_lettered_at"] is not None for entry in scene.entries(job_id)]


def test_it_stamps_its_episode_and_pays_the_trace(scene: Scene) -> None:
    job_id = quarantined(scene)
    assert store(scene.eyes, letter(job_id), AGE_S) == (True, False)
    assert stamped(scene, job_id) == [True]
    assert scene.debt(job_id) is None
    assert scene.journal(job_id)[-1] == "dead_lettered"


def test_a_repeat_changes_nothing(scene: Scene) -> None:
    job_id = quarantined(scene)
    store(scene.eyes, letter(job_id), AGE_S)
    before = scene.picture(but="dead_letters")
    assert store(scene.eyes, letter(job_id), AGE_S) == (False, False)
    assert (letters(scene), scene.picture(but="dead_letters")) == (1, before)


def test_another_copy_of_the_same_episode_is_kept_and_changes_nothing(scene: Scene) -> None:
    job_id = quarantined(scene)
    store(scene.eyes, letter(job_id), AGE_S)
    before = scene.picture(but="dead_letters")
    store(scene.eyes, letter(job_id, copy=2), AGE_S)
    assert (letters(scene), scene.picture(but="dead_letters")) == (2, before)


@pytest.mark.parametrize("episode", [1, 3, None])
def test_a_letter_of_another_episode_stamps_nothing(scene: Scene, episode: int | None) -> None:
    job_id = quarantined(scene, episode=2)
    before = scene.picture(but="dead_letters")
    assert store(scene.eyes, letter(job_id, episode=episode), AGE_S) == (False, False)
    assert (letters(scene), scene.picture(but="dead_letters")) == (1, before)
    assert store(scene.eyes, letter(job_id, episode=2), AGE_S) == (True, False)
    assert stamped(scene, job_id) == [False, True]


def test_a_letter_of_a_healthy_job_makes_its_debt_due_with_a_growing_gap(scene: Scene) -> None:
    job_id = scene.job()
    due_in = "SELECT extract(epoch FROM due_at - sent_at)::float8 FROM outbox WHERE job_id = %s"
    for sends in range(1, 5):
        scene.sent(job_id, sends)
        scene.ask("UPDATE outbox SET due_at = clock_timestamp() + interval '1 hour' RETURNING 1")
        assert store(scene.eyes, letter(job_id, copy=sends), AGE_S) == (False, True)
        assert scene.ask(due_in, (str(job_id),)) == pytest.approx(AGE_S * 2 ** (sends - 1), abs=0.001)
    assert scene.state(job_id) == "queued"


def test_a_letter_never_delays_a_debt(scene: Scene) -> None:
    job_id = scene.job()
    scene.sent(job_id, 20)
    before = scene.debt(job_id)
    store(scene.eyes, letter(job_id), AGE_S)
    assert scene.debt(job_id) == before


@pytest.mark.parametrize("state", ["running", "succeeded", "cancelled"])
def test_a_letter_of_a_job_that_needs_no_message_changes_nothing(scene: Scene, state: str) -> None:
    worker = scene.worker()
    job_id = scene.job()
    if state == "running":
        scene.claimed(worker, job_id)
    else:
        key = "k" if state == "succeeded" else None
        scene.change(job_id, state=state, finished_at="2026-01-01+00", result_key=key)
    before = scene.picture(but="dead_letters")
    assert store(scene.eyes, letter(job_id), AGE_S) == (False, False)
    assert scene.picture(but="dead_letters") == before


@pytest.mark.parametrize(
    "changed", [{"job_id": None, "episode": None, "copy": None}, {"copy": None}, {"episode": None}]
)
def test_a_crash_between_store_and_acknowledgement_stores_nothing_twice(scene: Scene, changed: dict[str, Any]) -> None:
    found = letter(uuid4(), headers={"x-death": [{"time": "12:00"}]})
    again = DeadLetter(**{**found.__dict__, **changed})
    for _ in range(2):
        store(scene.eyes, again, AGE_S)
    assert letters(scene) == 1
    store(scene.eyes, DeadLetter(**{**again.__dict__, "headers": {"x-death": [{"time": "12:01"}]}}), AGE_S)
    assert letters(scene) == 2


def test_a_large_body_is_cut_and_says_so(scene: Scene) -> None:
    store(scene.eyes, letter(None, body=b"x" * BODY_LIMIT), AGE_S)
    store(scene.eyes, letter(None, body=b"y" * (BODY_LIMIT + 1)), AGE_S)
    rows = scene.records("SELECT length(body) AS length, truncated FROM dead_letters ORDER BY dead_letter_id")
    assert [tuple(row.values()) for row in rows] == [(BODY_LIMIT, False), (BODY_LIMIT, True)]


def test_any_bytes_are_kept(scene: Scene) -> None:
    body = bytes(range(256))
    store(scene.eyes, letter(None, body=body), AGE_S)
    assert bytes(scene.ask("SELECT body FROM dead_letters")) == body


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.datetimes() | st.decimals(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.integers(), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=60, deadline=None)
@given(values)
def test_whatever_headers_hold_can_be_stored(value: Any) -> None:
    to_json(storable(value))


def test_headers_that_were_cut_say_so() -> None:
    whole = {f"h{n}": n for n in range(ITEMS_LIMIT)}
    assert storable(whole) == whole
    assert storable({**whole, "one": 1, "two": 2}) == {**whole, "…": "2 more"}
    assert storable({"text": "x" * TEXT_LIMIT, "list": list(range(ITEMS_LIMIT))}) == {
        "text": "x" * TEXT_LIMIT,
        "list": list(range(ITEMS_LIMIT)),
    }


def test_headers_are_bounded() -> None:
    deep: Any = "x"
    for _ in range(50):
        deep = {"a": deep}
    kept = storable({"long": "x" * 10_000, "many": list(range(1000)), "deep": deep, "nul": "a\x00b", "huge": 10**40})
    assert kept["long"] == "x" * TEXT_LIMIT + "… 8000 more characters"
    assert kept["many"] == [*range(ITEMS_LIMIT), "… 900 more"]
    assert to_json(kept["deep"]).count("{") < 10
    assert (kept["nul"], kept["huge"]) == ("a\ufffdb", str(10**40))
