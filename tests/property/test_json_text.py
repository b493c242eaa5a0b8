"""`to_json` accepts exactly what PostgreSQL's jsonb stores, and nothing changes on the way."""

from __future__ import annotations

import json
import math
from typing import Any

import psycopg2
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from app.json_text import to_json
from db.session import one
from tests.integration.scene import Scene

ON_DATABASE = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
# Every code point, lone surrogates and NUL among them, and backslashes often: \\u0000 is not \u0000.
texts = st.text(
    st.one_of(st.characters(), st.characters(categories=["Cs"]), st.sampled_from(["\0", "\\", "u", "0", '"'])),
    max_size=12,
)
floats = st.floats(allow_nan=True, allow_infinity=True)
scalars = st.one_of(st.none(), st.booleans(), st.integers(), floats, texts)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)


def storable(value: Any) -> bool:
    """What jsonb can hold: finite numbers, and text that is UTF-8 without NUL."""
    match value:
        case float():
            return math.isfinite(value)
        case str():
            return "\0" not in value and not any("\ud800" <= char <= "\udfff" for char in value)
        case list():
            return all(map(storable, value))
        case dict():
            return all(storable(key) and storable(entry) for key, entry in value.items())
    return True


@ON_DATABASE
@given(value=values)
@example(value="\\u0000")
@example(value="\\\0")
@example(value="\\\\u0000")
@example(value={"\\": "\0"})
@example(value={"\0": 1})
@example(value="\ud83d\ude00")
@example(value=-0.0)
@example(value=5e-324)
@example(value=1.7976931348623157e308)
@example(value=10**4000)
def test_what_to_json_lets_through_is_stored_as_it_is(scene: Scene, value: Any) -> None:
    if not storable(value):
        with pytest.raises(ValueError, match=r"NUL|surrogate|JSON compliant"):
            to_json(value)
        return
    text = to_json(value)
    found = one(scene.eyes, "SELECT %s::jsonb::text", (text,))
    assert found is not None
    assert same(json.loads(found[0]), value)


def same(stored: Any, value: Any) -> bool:
    """Equal as JSON: numeric writes 1e+308 as a whole number, and -0.0 as 0.0."""
    match value:
        case bool() | None:
            return stored is value
        case float():
            return float(stored) == value
        case list():
            return len(stored) == len(value) and all(map(same, stored, value))
        case dict():
            return stored.keys() == value.keys() and all(same(stored[key], value[key]) for key in value)
    return bool(stored == value)


@ON_DATABASE
@given(text=texts)
def test_what_to_json_refuses_the_database_refuses_too(scene: Scene, text: str) -> None:
    try:
        to_json(text)
    except ValueError:
        with pytest.raises((psycopg2.Error, ValueError)):
            one(scene.eyes, "SELECT %s::jsonb", (json.dumps(text, ensure_ascii="\0" in text),))


@given(values)
def test_keys_are_sorted_only_when_asked(value: Any) -> None:
    if storable(value):
        assert json.loads(to_json(value, sort_keys=True)) == json.loads(to_json(value))


@given(st.permutations(["a", "b", "c", "é", "\N{GRINNING FACE}"]))
def test_the_canonical_text_does_not_know_the_order_of_fields(order: list[str]) -> None:
    assert to_json(dict.fromkeys(order, 1), sort_keys=True) == to_json(dict.fromkeys(sorted(order), 1), sort_keys=True)
