"""The look at an envelope before Celery takes it: what passes, what does not, and what the reason gives away."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.headers import COPY, EPISODE, VERSION
from tasks.inspection import BODY, BODY_BYTES, BODY_LIMIT, complaint, is_of_a_job, priority_of, time_of
from tests.faults.raw_messages import GOOD, JSON, PRIVATE, UTF8, Raw, body, broken, envelope, our_headers

# Their envelope is in order: kombu, the allowlist, the adoption or the attempt turns them away later.
LATER = {
    "C08 bad gzip": "compressed",
    "C09 id is no UUID": None,
    "C09 our version is huge": None,
    "C09 NUL and control characters": None,
    "C10 a Python class": None,
    "C10 a class in the options": None,
    "C10 an unknown tag": None,
}


def look(raw: Raw) -> str | None:
    return complaint(raw.headers, raw.body, raw.content_type, raw.content_encoding)


@pytest.mark.parametrize("name", sorted(set(broken("trap")) - set(LATER)))
def test_c08_c09_c10_each_is_complained_about_without_a_word_of_its_content(name: str) -> None:
    reason = look(broken("trap")[name])
    assert reason
    assert PRIVATE not in reason
    assert len(reason) < 100


LEGAL: list[dict[str, Any]] = [
    {},
    {"timelimit": [None, None]},
    {"timelimit": (10, 5.5)},
    {"eta": "2026-10-25T02:30:00+01:00"},
    {"expires": "2026-10-25T02:30:00"},
    {"retries": 3, "root_id": "x", "group": None, "shadow": "name", "argsrepr": "()"},
    {"stamps": {}, "stamped_headers": []},
]
OURS = {COPY: 1, EPISODE: 1, VERSION: 2}


@pytest.mark.parametrize("changed", LEGAL)
@pytest.mark.parametrize("given_body", [GOOD, GOOD.decode(), BODY, BODY_BYTES, memoryview(GOOD)])
def test_a_legal_message_passes(changed: dict[str, Any], given_body: Any) -> None:
    assert complaint(envelope(**changed), given_body, JSON, UTF8) is None


@pytest.mark.parametrize("given_body", [BODY, BODY_BYTES])
def test_a_wake_up_call_passes(given_body: Any) -> None:
    assert complaint(envelope(**OURS), given_body, JSON, UTF8) is None


@pytest.mark.parametrize(
    ("changed", "given_body"),
    [
        ({}, GOOD),
        ({}, b'[[], {}, {"chain": [{"task": "x"}]}]'),
        ({"eta": "2099-01-01T00:00:00"}, BODY),
        ({"expires": "2026-10-25T02:30:00"}, BODY),
        ({"group": "x"}, BODY),
    ],
)
def test_what_only_looks_like_a_wake_up_call_does_not(changed: dict[str, Any], given_body: Any) -> None:
    """Celery would hold it in memory until its time, or stumble over its options and never settle it."""
    reason = complaint(envelope(**{**OURS, **changed}), given_body, JSON, UTF8)
    assert reason
    assert "wake-up call" in reason


@pytest.mark.parametrize("encoding", ["utf-8", "UTF-8", "utf8", "us-ascii"])
def test_names_of_utf8_pass(encoding: str) -> None:
    assert complaint(envelope(), GOOD, JSON, encoding) is None


def test_a_body_of_exactly_the_limit_passes() -> None:
    room = BODY_LIMIT - len(body([], {"note": ""}, None))
    assert complaint(envelope(), body([], {"note": "x" * room}, None), JSON, UTF8) is None
    assert complaint(envelope(), body([], {"note": "x" * (room + 1)}, None), JSON, UTF8)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)
NAMES = ["task", "id", "timelimit", "eta", "expires", "retries", "stamps", "compression", COPY, EPISODE, VERSION, "x"]


@given(st.dictionaries(st.sampled_from(NAMES), json_values), json_values)
def test_no_header_and_no_body_makes_the_inspection_raise(headers: dict[str, Any], content: Any) -> None:
    reason = complaint({**envelope(), **headers}, json.dumps(content).encode(), JSON, UTF8)
    assert reason is None or len(reason) < 100


@given(st.binary(max_size=200), st.none() | st.text() | st.integers(), st.none() | st.text() | st.integers())
def test_no_bytes_and_no_property_make_it_raise(content: bytes, content_type: Any, encoding: Any) -> None:
    complaint(envelope(), content, content_type, encoding)
    complaint(envelope(), content, JSON, UTF8)


@pytest.mark.parametrize("headers", [None, [], "text", 5])
def test_headers_that_are_no_table(headers: Any) -> None:
    assert complaint(headers, GOOD, JSON, UTF8) == "the headers are no table"


@pytest.mark.parametrize(
    ("changed", "ours"),
    [
        ({}, True),
        ({COPY: "1"}, False),
        ({COPY: True}, False),
        ({COPY: -1}, False),
        ({COPY: 10**30}, False),
        ({"id": 5}, False),
    ],
)
def test_only_a_settlement_with_an_id_and_a_copy_is_journaled(changed: dict[str, Any], ours: bool) -> None:
    assert is_of_a_job({**our_headers("tests.foreign", uuid4()), **changed}) is ours


def test_a_time_without_a_zone_is_utc() -> None:
    assert time_of(None) is None
    assert time_of("2026-10-25T02:30:00") == datetime(2026, 10, 25, 2, 30, tzinfo=UTC)
    assert time_of("2026-10-25T02:30:00+02:00") == datetime(2026, 10, 25, 0, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    ("asked", "own", "amqp", "given"),
    [
        (None, 4, True, 4),
        (0, 4, True, 0),
        (7, 4, True, 7),
        (255, 4, True, 9),
        ("high", 4, True, 4),
        (-1, 4, True, 4),
        (True, 4, True, 4),
        (0, 4, False, 4),
        (3, 4, False, 4),
        (6, 4, False, 3),
        (9, 4, False, 0),
        (200, 4, False, 0),
    ],
)
def test_the_priority_that_a_client_asked_for(asked: Any, own: int, amqp: bool, given: int) -> None:
    assert priority_of({"priority": asked}, own, amqp=amqp) == given
    assert priority_of({}, own, amqp=amqp) == own
