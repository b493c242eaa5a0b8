"""Random lives of one job over the real arrows: the journal never shows an arrow that the legend does not have.

Two workers, two attempts at everything, stale holders that try again, messages that become dead letters early or late:
whatever order things happen in. After each step the debt and both traces must fit the state.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.states import ARROWS, TERMINAL, Arrow, State
from db.session import rows
from tests.integration.scene import Scene
from tests.integration.worklist import known
from tests.property.life import STEPS, Life, far_side_says

# Few kinds of step, so that lives reach a second and a third quarantine with messages of the first still about.
EDIT_STEPS = ("die in the call", "freeze in the call", "replay and fail", "edit and call", "wake")
TRACE_STEPS = ("replay", "take", "park", "fail again", "refuse", "dead letter")


def lives(kinds: tuple[str, ...]) -> st.SearchStrategy[list[tuple[str, int, int]]]:
    """Steps (what, who, which) of these kinds."""
    return st.lists(st.tuples(st.sampled_from(kinds), st.integers(0, 1), st.integers(0, 3)), max_size=16)


def edited_lives() -> st.SearchStrategy[list[tuple[str, int, int]]]:
    """Short ones, of whole passages: what must not happen takes three to five of them in the right order."""
    steps = st.tuples(st.sampled_from(EDIT_STEPS), st.just(0), st.integers(0, 1))
    return st.lists(steps, min_size=3, max_size=6)


def walk(journal: list[dict[str, Any]], final: str) -> None:
    """The arrows of the journal, one after the other, lead from nothing to the final state."""
    possible: set[State | None] = {None}
    for entry in journal:
        if entry["event"] not in set(Arrow):
            continue
        sources, targets = ARROWS[Arrow(entry["event"])]
        assert possible & sources, f"{entry['event']} from {possible}"
        possible = set(targets)
    assert State(final) in possible


fixed = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def known_type(monkeypatch: pytest.MonkeyPatch) -> None:
    known(monkeypatch, check=far_side_says)


@settings(fixed, max_examples=250)
@given(life=lives(STEPS))
def test_no_life_leaves_the_legend(scene: Scene, life: list[tuple[str, int, int]]) -> None:
    live(scene, life)


@settings(fixed, max_examples=100)
@given(life=edited_lives())
def test_of_two_payloads_one_acts(scene: Scene, life: list[tuple[str, int, int]]) -> None:
    """H11: whoever was frozen, wherever, and whenever it wakes up."""
    live(scene, life)


@settings(fixed, max_examples=150)
@given(life=lives(TRACE_STEPS))
def test_a_dead_letter_pays_its_own_episode_alone(scene: Scene, life: list[tuple[str, int, int]]) -> None:
    live(scene, [("take", 0, 0), ("park", 0, 1), *life])


PARTS = {
    "fail again": ("replay", "take", "park"),
    "die in the call": ("claim", "call", "crash", "claim", "quarantine"),
    "freeze in the call": ("claim", "call", "expire", "claim", "quarantine"),
    "freeze": ("claim", "expire", "claim", "quarantine"),
    "replay and fail": ("replay", "claim", "quarantine"),
    "edit and call": ("replay with another payload", "claim", "call"),
}


def live(scene: Scene, life: list[tuple[str, int, int]]) -> None:
    """Take the steps, judging after each, and then the whole journal."""
    scene.empty_jobs()
    workers = [scene.worker_again(0), scene.worker_again(1)]
    lived = Life(scene, workers)
    for what, who, which in life:
        for part in PARTS.get(what, (what,)):
            lived.step(part, who, which)
            lived.judge()
    if lived.begun is not None:
        rows(lived.begun[0].session, "ROLLBACK")
    journal = scene.records(
        "SELECT event, attempt, reason FROM job_events WHERE job_id = %s ORDER BY event_id", (str(lived.job_id),)
    )
    row = scene.row(lived.job_id)
    walk(journal, row["state"])
    attempts = [entry["attempt"] for entry in journal if entry["event"] == Arrow.CLAIM]
    assert attempts == list(range(1, row["attempt"] + 1)), "each attempt is claimed once, in order"
    assert sum(entry["event"] in (Arrow.SUCCEED, Arrow.SETTLE) for entry in journal) == (
        row["state"] == State.SUCCEEDED
    )
    assert sum(entry["event"] == "quarantined" for entry in journal) == row["episode"]
    proofs = [entry["reason"].split(":")[0] for entry in journal if entry["event"] == Arrow.EXPIRE]
    assert (proofs.count("killed"), proofs.count("stalled")) == (row["crashes"], row["stalls"])
    assert len(proofs) == row["crashes"] + row["stalls"]


def test_every_arrow_of_the_legend_starts_and_ends_somewhere() -> None:
    assert set(ARROWS) == set(Arrow)
    reached = {target for _, targets in ARROWS.values() for target in targets}
    assert reached == set(State)
    for sources, targets in ARROWS.values():
        assert not sources & TERMINAL
        assert sources
        assert targets
