"""The judge convicts: each rule on a journal that breaks it."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from app.states import State
from tests.faults.judge import Case, Event, breaches

CLEAN = "submit published received claim/1 result_saved/1 succeed/1 ack_sent"
STALLED = "submit received claim/1 expire/1:stalled received claim/2 result_saved/2 succeed/2"
CRASHED = "submit received claim/1 expire/1:killed received claim/2 result_saved/2 succeed/2"


def case(journal: str, **changes: Any) -> Case:
    """A job of one attempt that succeeded, unless `changes` say otherwise."""
    made = Case(UUID(int=1), "tests.atomic", State.SUCCEEDED, 1, 0, 0, 0, 0, "key", debt=None, effects=1)
    for name, value in changes.items():
        setattr(made, name, value)
    for word in journal.split():
        place, _, proof = word.partition(":")
        event, _, attempt = place.partition("/")
        reason = f"{proof}: r" if proof else None
        made.journal.append(Event(event, int(attempt) if attempt else None, None, None, None, None, reason, None))
    return made


def quarantined(journal: str, **changes: Any) -> Case:
    """A job that was quarantined once, and owes its dead letter."""
    given = {"state": State.QUARANTINED, "result_key": None, "effects": 0, "debt": "trace 1", "episode": 1}
    return case(journal, **{**given, "entries": 1, "open_entries": 1, **changes})


def waiting(**changes: Any) -> Case:
    """A job that nobody has claimed yet."""
    given = {"state": State.QUEUED, "attempt": 0, "result_key": None, "debt": "wake 1", "effects": 0}
    return case("submit", **{**given, **changes})


FAILED = "submit claim/1 quarantine/1 quarantined/1"
KILLED = "submit claim/1 expire/1:killed quarantined/1"
TRACED: dict[str, Any] = {"debt": None, "stamped": 1, "letters": 1}


@pytest.mark.parametrize(
    "innocent",
    [
        case(CLEAN),
        case(CRASHED, attempt=2, crashes=1),
        case(STALLED, attempt=2, stalls=1),
        waiting(),
        case(
            "submit claim/1 retry/1 retry_scheduled/1",
            state=State.RETRY_WAIT,
            failures=1,
            result_key=None,
            debt="wake 1",
            effects=0,
        ),
        case("submit claim/1 release/1 claim/2 result_saved/2 succeed/2", attempt=2, releases=1),
        quarantined(KILLED, crashes=1),
        quarantined(FAILED, failures=1),
        quarantined(FAILED),  # its failure was not its fault
        quarantined(FAILED + " repaired"),
        quarantined(FAILED + " reject_sent dead_lettered", **TRACED),
        quarantined("submit received quarantine/0 quarantined/0", attempt=0),  # of a type that nobody knew
        quarantined(FAILED, letters=1),  # it came while the job was running, and paid nothing
        case(FAILED + " cancel", state=State.CANCELLED, result_key=None, effects=0, episode=1, entries=1),
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
        (
            case("submit claim/1 expire/1:killed claim/1 result_saved/1 succeed/1", crashes=1),
            "claim of attempt 1 after",
        ),
        (
            case("submit claim/1 expire/1:killed claim/2 result_saved/1 succeed/1", attempt=2),
            "succeed by attempt 1 while",
        ),
        (case(CLEAN, attempt=0), "attempt is 0, the journal says 1"),
        (case(CLEAN + " result_saved/1 succeed/1"), "succeeded twice"),
        (case("submit claim/1 succeed/1"), "result_saved and succeed"),
        (case(CLEAN + " expire/1:killed", crashes=1), "expire after succeed"),
        (case(CLEAN, result_key=None), "result_key is None"),
        (case(CRASHED, attempt=2, stalls=1), "0 counted as killed, 1 in the journal"),
        (case(STALLED, attempt=2, crashes=1), "1 counted as killed, 0 in the journal"),
        (case(CRASHED.replace(":killed", ""), attempt=2, crashes=1), "1 counted as killed, 0 in the journal"),
        (case(CRASHED, attempt=2, crashes=2), "2 crashes + 0 stalls, 1 expiries"),
        (case(CRASHED, attempt=2), "0 crashes + 0 stalls, 1 expiries"),
        (case(CLEAN, releases=1), "1 releases, 0 in the journal"),
        (case(CLEAN, failures=1), "1 failures, 0 retries"),
        (waiting(debt=None), "the debt is None, it should be wake 1"),
        (waiting(debt="trace 1"), "the debt is trace 1, it should be wake 1"),
        (waiting(debt="wake 2"), "the debt is wake 2, it should be wake 1"),
        (case(CLEAN, debt="wake 1"), "the debt is wake 1, it should be None"),
        (quarantined(FAILED, debt=None), "the debt is None, it should be trace 1"),
        (quarantined(FAILED, debt="wake 1"), "the debt is wake 1, it should be trace 1"),
        (quarantined(FAILED, debt="trace 2"), "the debt is trace 2, it should be trace 1"),
        (
            quarantined(FAILED + " dead_lettered", **{**TRACED, "debt": "trace 1"}),
            "the debt is trace 1, it should be None",
        ),
        (quarantined(FAILED + " dead_lettered", **{**TRACED, "letters": 0}), "stamped without a dead letter"),
        (quarantined(FAILED, **TRACED), "stamped, but the journal does not say so"),
        (quarantined(FAILED, entries=0), "episode 1, 0 entries"),
        (quarantined("submit claim/1 quarantine/1"), "episode 1, 1 entries, 0 in the journal"),
        (quarantined(FAILED, open_entries=0), "0 open entries"),
        (case(CLEAN, open_entries=1), "1 open entries"),
        (case(CLEAN + " obeyed"), "unknown event obeyed"),
        (case(CLEAN, effects=2), "2 effects"),
        (case(CLEAN, effects=0), "0 effects"),
        (waiting(effects=1), "1 effects"),
    ],
)
def test_a_breach_is_found(guilty: Case, breach: str) -> None:
    assert any(breach in found for found in breaches(guilty)), breaches(guilty)
