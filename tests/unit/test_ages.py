"""Ages as people write them."""

from __future__ import annotations

import copy
import math

import pytest

from app.ages import Age
from app.errors import ConfigurationError
from app.settings import read


@pytest.mark.parametrize(
    ("text", "seconds"), [("30d", 2_592_000), ("12h", 43_200), ("1.5h", 5400), ("45min", 2700), ("90s", 90)]
)
def test_an_age_reads_and_prints(text: str, seconds: float) -> None:
    assert Age(text) == Age(text).seconds == seconds
    assert Age(str(Age(text))) == seconds


def test_an_age_can_be_copied() -> None:
    assert [str(age) for age in copy.deepcopy([Age("2d"), Age("never")])] == ["2d", "never"]


def test_never_is_longer_than_anything() -> None:
    never = Age("never")
    assert (never == math.inf, never.seconds, str(never)) == (True, None, "never")
    assert min(never, Age("1d")).seconds == 86_400


@pytest.mark.parametrize("text", ["", "30", "d", "-1d", "30 d", "1w", "0s", "0.5s", "nan", "inf", "1e9d", "99999999d"])
def test_what_is_no_age(text: str) -> None:
    with pytest.raises(ValueError, match="write 30d"):
        Age(text)


def test_a_setting_is_an_age() -> None:
    assert read({"DEADSURE_RETENTION_SUCCEEDED": "never"}).retention_succeeded == math.inf
    assert str(read({"DEADSURE_RETENTION_CANCELLED": "2d"}).retention_cancelled) == "2d"
    with pytest.raises(ConfigurationError, match=r"DEADSURE_RETENTION_SUCCEEDED='30' is no age: write 30d"):
        read({"DEADSURE_RETENTION_SUCCEEDED": "30"})
