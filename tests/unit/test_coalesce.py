"""Which debts travel together, and what a message may say about it."""

from __future__ import annotations

import logging
import uuid
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kombu.message import Message

from app.claim import Refusal
from app.coalesce import groups
from app.ending import Ending, Outcome, Settlement
from app.failures import Failure
from app.job_types import COALESCE_LIMIT
from app.outbox import Debt
from tasks.endings import Briefly, JobRejected, ending_of, endings_of, tell, tell_all
from tasks.headers import COPY, JOBS
from tasks.inspection import BODY, complaint, jobs_of
from tasks.intake import members, readable

LIMITS = {"a": 50, "b": 1, "c": 3}


def debt(name: str = "a", *, kind: str = "wake", copy: int = 1, priority: int = 0, episode: int = 1) -> Debt:
    return Debt(uuid.uuid4(), kind, name, 1, priority, "", None, episode, copy)


def limit(name: str, _version: int) -> int:
    return LIMITS[name]


debts = st.lists(
    st.builds(
        debt,
        st.sampled_from("abc"),
        kind=st.sampled_from(["wake", "trace"]),
        copy=st.integers(1, 2),
        priority=st.integers(0, 1),
        episode=st.integers(1, 2),
    ),
    max_size=300,
)


@given(debts)
def test_every_debt_travels_once_in_a_group_of_its_kind(found: list[Debt]) -> None:
    made = groups(found, limit)
    assert sorted(d.job_id for group in made for d in group) == sorted(d.job_id for d in found)
    for group in made:
        assert len({(d.type, d.version, d.priority, d.episode) for d in group}) == 1
        assert len(group) <= LIMITS[group[0].type]
        assert len(group) == 1 or all(d.kind == "wake" and d.copy == 1 for d in group)


@given(debts)
def test_messages_keep_the_order_of_their_first_jobs(found: list[Debt]) -> None:
    place = {d.job_id: number for number, d in enumerate(found)}
    firsts = [place[group[0].job_id] for group in groups(found, limit)]
    assert firsts == sorted(firsts)


@pytest.mark.parametrize(("due", "sizes"), [(1, {1}), (7, {1}), (8, {2}), (100, {25}), (1000, {50})])
def test_light_load_stays_one_job_per_delivery(due: int, sizes: set[int]) -> None:
    assert {len(group) for group in groups([debt() for _ in range(due)], limit)} == sizes


IDS = [str(uuid.UUID(int=n)) for n in range(1, 4)]  # the same in every process that collects


@pytest.mark.parametrize(
    ("jobs", "fine"),
    [
        (IDS, True),
        (IDS[:1], False),
        ([], False),
        (IDS[::-1], False),
        ([*IDS, IDS[1]], False),
        ([*IDS, IDS[1].upper()], False),
        ([*IDS, "x"], False),
        ([*IDS, None], False),
        ("x" * 36, False),
        ({"0": IDS[0]}, False),
        ([IDS[0], *(str(uuid.UUID(int=n)) for n in range(1000, 1200))], False),
    ],
)
def test_only_a_list_as_the_relay_writes_it_passes(jobs: Any, fine: bool) -> None:
    headers = {"task": "a", "id": IDS[0], COPY: 1, JOBS: jobs}
    assert (complaint(headers, BODY, "application/json", "utf-8") is None) is fine
    if fine:
        assert jobs_of(headers) == [uuid.UUID(job_id) for job_id in jobs]


def test_endings_reach_the_main_process_as_they_were() -> None:
    told = [
        Ending(Settlement.SUCCEEDED, result_key='it\'s "k"', outcome=Outcome.SUCCEEDED, waited_s=0.25, ran_s=0.5),
        Ending(Settlement.RETRIED, outcome=Outcome.RETRIED, failure=Failure.TRANSIENT, cause="transient", waited_s=0.5),
        Ending(Settlement.IGNORE, expired=True),
    ] * 60
    assert endings_of(repr(tell_all(told))) == told
    assert endings_of("'something else'") is None
    assert endings_of(None) is None


@pytest.mark.parametrize(
    "returned",
    [
        "'jobs of one delivery: 5'",
        "'jobs of one delivery: [[1, 2]]'",
        '\'jobs of one delivery: [["succeeded", "succ...\'',
        "'jobs of one delivery: ",
        "'jobs of one delivery: '\x00",
        "'jobs of one delivery: " + "[" * 100_000 + "'",
    ],
)
def test_what_only_looks_like_endings_is_none(returned: str) -> None:
    """A plain task returned it, and its log line goes through the same filter."""
    assert endings_of(returned) is None
    record = logging.LogRecord("x", logging.INFO, "", 0, "", ({"return_value": returned},), None)
    assert Briefly().filter(record)


def test_result_keys_of_any_length_leave_room_for_all_endings() -> None:
    told = [Ending(Settlement.SUCCEEDED, result_key="\u20ac" * 5000, outcome=Outcome.SUCCEEDED)] * COALESCE_LIMIT
    assert len(repr(tell_all(told))) < 1 << 18


def test_a_delivery_with_a_job_that_nobody_knows_is_rejected() -> None:
    """After a restore from a backup the message is all that is left of it."""
    fine = Ending(Settlement.SUCCEEDED, outcome=Outcome.SUCCEEDED)
    unknown = Ending(Settlement.QUARANTINED, reason=Refusal.UNKNOWN.value)
    with pytest.raises(JobRejected) as rejected:
        tell_all([fine, unknown, fine])
    make, given = rejected.value.__reduce__()  # as it reaches the main process
    error = make(*given)
    assert (error.ending, error.others, error.requeue) == (unknown, [fine, fine], False)


@pytest.mark.parametrize("key", ["plain", "it's", '"quoted"'])
def test_the_times_of_a_success_are_read_whatever_its_key(key: str) -> None:
    ending = Ending(Settlement.SUCCEEDED, result_key=key, outcome=Outcome.SUCCEEDED, waited_s=-0.5, ran_s=1.5)
    found = ending_of(repr(tell(ending)))
    assert found is not None
    assert (found.waited_s, found.ran_s) == (-0.5, 1.5)


@pytest.mark.parametrize("job_id", [IDS[0], int(uuid.UUID(IDS[0]).int % 10**31 + 10**31), None, [IDS[0]]])
@pytest.mark.parametrize("jobs", [IDS, "x", 5, None, ...])
def test_the_intake_outlives_every_id(job_id: Any, jobs: Any) -> None:
    """An entry of a Redis/Valkey list may hold a number of as many digits as an id has."""
    headers = {"id": job_id, "task": "a", COPY: 1} | ({} if jobs is ... else {JOBS: jobs})
    message = Message(BODY, headers=headers, content_type="application/json", content_encoding="utf-8")
    letter = readable(message, None)
    whole = job_id == IDS[0] and jobs == IDS
    assert list(members(message, letter)) == ([uuid.UUID(found) for found in IDS] if whole else [letter.job_id])
