"""What a finding means to a script, and durations for people."""

from __future__ import annotations

import pytest

from app.checks.finding import Finding, Severity, lasted, name_of, unchecked
from tasks.doctor import exit_code

OK, INFO, WARNING, ERROR = (Finding(severity, "c", "w", "n") for severity in Severity)
AWAY = Finding(Severity.ERROR, "c", "w", "n", checked=False)
UNSEEN = unchecked("c", "w", "n")


@pytest.mark.parametrize(
    ("found", "code", "strict"),
    [
        ([], 0, 0),
        ([OK, INFO], 0, 0),
        ([OK, WARNING], 0, 1),
        ([ERROR, WARNING], 1, 1),
        ([UNSEEN, OK], 2, 2),
        ([UNSEEN, WARNING], 2, 1),
        ([AWAY, OK], 2, 2),
        ([AWAY, ERROR], 1, 1),
    ],
)
def test_exit_codes(found: list[Finding], code: int, strict: int) -> None:
    assert exit_code(found, strict=False) == code
    assert exit_code(found, strict=True) == strict


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(None, "0 s"), (-3, "0 s"), (119, "119 s"), (300, "5 min"), (7200, "2 h"), (259_200, "3 days")],
)
def test_durations(seconds: float | None, words: str) -> None:
    assert lasted(seconds) == words


def test_an_error_is_named_without_its_text() -> None:
    assert name_of(ValueError("a password")) == "ValueError"
