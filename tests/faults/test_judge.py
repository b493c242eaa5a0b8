"""The judge convicts: each rule on a journal that breaks it."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from app.states import State
from tests.faults.judge import Case, Event, breaches

CLEAN = "submit received claim/1 result_saved/1 succeed/1 ack_sent"
CRASHED = "submit received claim/1 expire/1 received claim/2 result_saved/2 succeed/2"


def case(journal: str, **changes: Any) -> Case:
    """A job of one attempt that succeeded, unless `changes` say otherwise."""
    made = Case(UUID(int=1), "tests.atomic", State.SUCCEEDED, 1, 0, 0, 0, 0, "key", has_debt=False, effects=1)
    for name, value in changes.items():
        setattr(made, name, value)
    for word in journal.split():
        event, _, attempt = word.partition("/")
        made.journal.append(Event(event, int(attempt) if attempt else None, None, None, None, None, None, None))
    return made


@pytest.mark.parametrize(
    "innocent",
    [
        case(CLEAN),
        case(CRASHED, attempt=2, crashes=1),
        case(CRASHED, attempt=2, stalls=1),
        case("submit", state=State.QUEUED, attempt=0, result_key=None, has_debt=True, effects=0),
        case(
            "submit claim/1 retry/1 retry_scheduled/1",
            state=State.RETRY_WAIT,
            failures=1,
            result_key=None,
            has_debt=True,
            effects=0,
        ),
        case("submit claim/1 release/1 claim/2 result_saved/2 succeed/2", attempt=2, releases=1),
        case(
            "submit claim/1 expire/1 quarantined/1",
            state=State.QUARANTINED,
            crashes=1,
            result_key=None,
            effects=0,
        ),
    ],
)
def test_a_legal_journal_is_acquitted(innocent: Case) -> None:
    assert breaches(innocent) == []


@pytest.mark.parametrize(
    ("guilty", "breach"),
    [
        (case("submit claim/1 claim/2 result_saved/2 succeed/2", attempt=2), "claim from ['running']"),
        (case("submit result_saved succeed"), "succeed from ['queued']"),
        (case(CLEAN, state=State.QUEUED), "the journal ends in ['succeeded']"),
        (case("submit claim/1 expire/1 claim/1 result_saved/1 succeed/1", crashes=1), "claim of attempt 1 after"),
        (case("submit claim/1 expire/1 claim/2 result_saved/1 succeed/1", attempt=2), "succeed by attempt 1 while"),
        (case(CLEAN, attempt=0), "attempt is 0, the journal says 1"),
        (case(CLEAN + " result_saved/1 succeed/1"), "succeeded twice"),
        (case("submit claim/1 succeed/1"), "result_saved and succeed"),
        (case(CLEAN + " expire/1", crashes=1), "expire after succeed"),
        (case(CLEAN, result_key=None), "result_key is None"),
        (case(CRASHED, attempt=2, crashes=2), "2 crashes + 0 stalls, 1 expiries"),
        (case(CRASHED, attempt=2), "0 crashes + 0 stalls, 1 expiries"),
        (case(CLEAN, releases=1), "1 releases, 0 in the journal"),
        (case(CLEAN, failures=1), "1 failures, 0 retries"),
        (case("submit", state=State.QUEUED, attempt=0, result_key=None, effects=0), "no debt"),
        (case(CLEAN, has_debt=True), "has a debt"),
        (case(CLEAN, effects=2), "2 effects"),
        (case(CLEAN, effects=0), "0 effects"),
        (case("submit", state=State.QUEUED, attempt=0, result_key=None, has_debt=True), "1 effects"),
    ],
)
def test_a_breach_is_found(guilty: Case, breach: str) -> None:
    assert any(breach in found for found in breaches(guilty)), breaches(guilty)
