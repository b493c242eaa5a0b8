"""The legend of states and arrows is closed and complete."""

from __future__ import annotations

import pytest

from app.states import ARROWS, TERMINAL, Arrow, State
from db.models import JOB_STATES


def test_the_words_are_those_of_the_models() -> None:
    assert tuple(state.value for state in State) == JOB_STATES


def test_each_arrow_is_in_the_legend_once() -> None:
    assert list(ARROWS) == list(Arrow)


def test_nothing_leaves_a_terminal_state() -> None:
    assert {State.SUCCEEDED, State.CANCELLED} == TERMINAL
    for sources, _ in ARROWS.values():
        assert not sources & TERMINAL


def test_each_state_is_reached_from_nothing() -> None:
    reached: set[State | None] = {None}
    for _ in State:
        reached |= {target for sources, targets in ARROWS.values() if sources & reached for target in targets}
    assert reached == {None, *State}


@pytest.mark.parametrize("state", sorted(set(State) - TERMINAL))
def test_each_other_state_can_still_end(state: State) -> None:
    reached = {state}
    for _ in State:
        reached |= {target for sources, targets in ARROWS.values() if sources & reached for target in targets}
    assert reached >= TERMINAL


def test_only_a_claim_starts_to_run() -> None:
    assert [arrow for arrow, (_, targets) in ARROWS.items() if State.RUNNING in targets] == [Arrow.CLAIM]


def test_only_the_owner_and_the_proven_effect_succeed() -> None:
    arrows = {arrow for arrow, (_, targets) in ARROWS.items() if State.SUCCEEDED in targets}
    assert arrows == {Arrow.SUCCEED, Arrow.SETTLE}
