"""The allowlist of job types."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, ValidationError

from app import job_types
from app.errors import ConfigurationError, UnknownJobType
from app.job_types import JobType, find, queues, register


class Empty(BaseModel):
    """No fields."""


class Number(BaseModel):
    n: int


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_types, "REGISTRY", {})


def test_the_newest_version_is_the_default() -> None:
    versions = [register(JobType("a", Empty, version=version)) for version in (1, 3, 2)]
    assert find("a") is versions[1]
    assert find("a", 1) is versions[0]


def test_an_unknown_type_lists_what_is_known() -> None:
    register(JobType("b", Empty))
    register(JobType("a", Empty))
    with pytest.raises(UnknownJobType, match="no job type 'c'; known: a, b"):
        find("c")
    with pytest.raises(UnknownJobType, match="no job type 'a' version 9"):
        find("a", 9)


def test_nothing_is_known() -> None:
    with pytest.raises(UnknownJobType, match="known: none"):
        find("a")


def test_a_name_and_version_are_taken_once() -> None:
    known = register(JobType("a", Empty))
    assert register(known) is known
    with pytest.raises(ConfigurationError, match="'a' version 1 is registered twice"):
        register(JobType("a", Empty))


def test_an_atomic_type_is_short() -> None:
    JobType("a", Empty, mode="atomic", time_limit_s=30)
    with pytest.raises(ConfigurationError, match="make it leased"):
        JobType("a", Empty, mode="atomic", time_limit_s=31)


def test_queues_of_all_types() -> None:
    assert queues() == ["jobs"]
    register(JobType("a", Empty, queue="mail"))
    register(JobType("b", Empty))
    assert queues() == ["jobs", "mail"]


def test_a_payload_is_validated() -> None:
    made = JobType("a", Number)
    assert made.parse({"n": 3}) == Number(n=3)
    with pytest.raises(ValidationError):
        made.parse({"n": "x"})
