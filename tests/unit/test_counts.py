"""From a child's ending to a count: nothing is lost on the way, and no label is ever free text."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from uuid import uuid4

import pytest
from celery.utils.saferepr import saferepr
from prometheus_client import REGISTRY as USERS_OWN
from pydantic import BaseModel

from app import job_types
from app.ending import Ending, Outcome, Settlement
from app.failures import Failure
from app.job_types import JobType, register
from app.metrics import counts
from tasks.endings import JobIgnored, JobRejected, JobRetried, ending_of, tell


class Nothing(BaseModel):
    """A payload."""


@pytest.fixture
def known() -> Iterator[str]:
    """A type that is registered for this test only; its counts are new."""
    name = f"unit.counted {uuid4()}"
    register(JobType(name=name, payload=Nothing))
    yield name
    del job_types.REGISTRY[name, 1]
    counts._types.pop(name, None)


def value(name: str, **labels: str) -> float:
    return counts.COUNTS.get_sample_value(name, labels) or 0.0


FAILED = Ending(
    Settlement.RETRIED,
    reason="builtins.KeyError in shop.py:pay",
    delay_s=1.5,
    outcome=Outcome.RETRIED,
    failure=Failure.TRANSIENT,
    cause="transient",
    waited_s=0.25,
    ran_s=2.0,
)


@pytest.mark.parametrize(
    ("settlement", "kind"),
    [
        (Settlement.RETRIED, JobRetried),
        (Settlement.QUARANTINED, JobRejected),
        (Settlement.IGNORE, JobIgnored),
    ],
)
def test_an_ending_comes_through_a_pipe_with_its_exception(settlement: Settlement, kind: type[Exception]) -> None:
    ending = Ending(settlement, reason="r", outcome=Outcome.LOST, waited_s=0.1)
    with pytest.raises(kind) as raised:
        tell(ending)
    assert ending_of(pickle.loads(pickle.dumps(raised.value))) == ending  # noqa: S301  # our own


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 1e-6, 0.00002, 0.5, 86_400.25, 1e9])
def test_a_success_comes_through_as_celerys_text_of_the_returned_value(seconds: float) -> None:
    told = tell(Ending(Settlement.SUCCEEDED, result_key="job:1", waited_s=seconds, ran_s=seconds))
    found = ending_of(saferepr(told, 1024))
    assert found is not None
    assert found.outcome is Outcome.SUCCEEDED
    assert [found.waited_s, found.ran_s] == pytest.approx([seconds, seconds], abs=1e-6)


@pytest.mark.parametrize("foreign", [None, "'plain'", {"waited_s": 1}, KeyError("x"), "'job:1 waited long s, ran 1 s'"])
def test_what_is_not_ours_is_no_ending(foreign: object) -> None:
    assert ending_of(foreign) is None


def test_a_failed_attempt_is_counted_once_in_each_family(known: str) -> None:
    counts.of_type(known).note_ending(FAILED)
    assert value("deadsure_jobs_processed_total", type=known, outcome="retried") == 1
    assert value("deadsure_jobs_failed_total", type=known, failure="transient") == 1
    assert value("deadsure_job_wait_seconds_sum", type=known) == 0.25
    assert value("deadsure_job_duration_seconds_sum", type=known) == 2
    assert value("deadsure_jobs_quarantined_total", type=known, cause="transient") == 0


def test_causes_are_our_own_words_or_other(known: str) -> None:
    for cause in ("deadline", "whatever a later release says"):
        counts.of_type(known).note_quarantine(cause)
    assert value("deadsure_jobs_quarantined_total", type=known, cause="deadline") == 1
    assert value("deadsure_jobs_quarantined_total", type=known, cause="other") == 1


@pytest.mark.parametrize(("cause", "code"), [("killed", "killed_worker"), ("stalled", "stalled")])
def test_a_crash_may_end_in_quarantine(known: str, cause: str, code: str) -> None:
    counter, before = counts.of_type(known), value("deadsure_jobs_crashed_total", type=known, cause=cause)
    counter.note_crash(cause, "queued")
    counter.note_crash(cause, "quarantined")
    assert value("deadsure_jobs_crashed_total", type=known, cause=cause) == before + 2
    assert value("deadsure_jobs_quarantined_total", type=known, cause=code) == 1


def test_types_that_are_not_registered_share_one_label(known: str) -> None:
    assert counts.of_type(known) is counts.of_type(known)
    strangers = {counts.of_type(f"attack {n}") for n in range(100)}
    assert strangers == {counts.of_type(counts.UNKNOWN)}
    assert not [name for name in counts._types if name.startswith("attack")]


def test_begin_makes_every_series_of_a_known_type(known: str) -> None:
    counts.begin()
    assert counts.COUNTS.get_sample_value("deadsure_jobs_crashed_total", {"type": known, "cause": "stalled"}) == 0
    assert counts.COUNTS.get_sample_value("deadsure_relay_sends_total", {"kind": "trace"}) is not None


def test_the_default_registry_stays_the_users_own() -> None:
    assert not [family.name for family in USERS_OWN.collect() if family.name.startswith("deadsure")]
