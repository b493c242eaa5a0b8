"""Job ids: two jobs share one only when type, scope and key are the same."""

from __future__ import annotations

import uuid

from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel

from app.job_types import JobType
from app.submit import identify

# Characters that any separator could be made of.
parts = st.text(st.sampled_from('ab,":\\[]/ \n\x1f|'), max_size=6)
triples = st.tuples(parts, parts, parts)


def job_id(triple: tuple[str, str, str]) -> uuid.UUID:
    name, scope, key = triple
    return identify(JobType(name=name, payload=BaseModel), scope, key)


@given(triples, triples)
@example(("a", "b", "c"), ("a,b", "", "c"))
@example(("a", '","', "c"), ("a", "", '","c'))
@example(("", "a", ""), ("", "", "a"))
@example(("a", "b\\", "c"), ("a", "b", "\\c"))
def test_other_parts_are_another_job(one: tuple[str, str, str], other: tuple[str, str, str]) -> None:
    assert (job_id(one) == job_id(other)) is (one == other)


@given(st.tuples(st.text(max_size=8), st.text(max_size=8), st.text(min_size=1, max_size=8)))
def test_the_same_parts_are_the_same_job(triple: tuple[str, str, str]) -> None:
    name, scope, key = triple
    newer = JobType(name=name, payload=BaseModel, version=2, queue="other", priority=3)
    assert identify(newer, scope, key) == job_id(triple)
    assert job_id(triple).version == 5


@given(parts, parts)
def test_without_a_key_every_job_is_new(name: str, scope: str) -> None:
    job_type = JobType(name=name, payload=BaseModel)
    ids = {identify(job_type, scope, None) for _ in range(20)}
    assert len(ids) == 20
    assert {made.version for made in ids} == {7}
