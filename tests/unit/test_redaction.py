"""What is marked secret is stored as it is and never printed."""

from __future__ import annotations

import json
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, ConfigDict, Field, Secret, SecretBytes, SecretStr, field_serializer

from app.errors import InvalidPayload
from app.redaction import HIDDEN, SECRET, UNDECLARED, redact
from app.submit import encode

HUSH = "hush-4711"


class Inner(BaseModel):
    key: SecretStr
    name: str = "n"


class Tree(BaseModel):
    value: Annotated[str, SECRET] = HUSH
    children: list[Tree] = []


class Login(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    user: str = "me"
    password: SecretStr = SecretStr(HUSH)
    token: Annotated[str, SECRET] = HUSH
    raw: SecretBytes = SecretBytes(HUSH.encode())
    number: Secret[int] = Secret(4711)
    many: list[SecretStr] = [SecretStr(HUSH)]
    named: dict[str, SecretStr | None] = {"a": SecretStr(HUSH), "b": None}
    inner: Inner = Inner(key=SecretStr(HUSH))
    either: Inner | int = Inner(key=SecretStr(HUSH))
    pair: tuple[str, SecretStr] = ("plain", SecretStr(HUSH))
    whole: Annotated[dict[str, Any], SECRET] = {"a": HUSH}
    tree: Tree = Tree(children=[Tree()])
    free: dict[str, Any] = {"shown": [1, 2]}


def stored(payload: BaseModel) -> Any:
    return json.loads(encode(payload)[0])


def test_the_database_holds_the_secret_and_the_handler_gets_it() -> None:
    """pydantic writes asterisks into JSON: a handler would be given those."""
    payload = Inner(key=SecretStr(HUSH))
    assert stored(payload) == {"key": HUSH, "name": "n"}
    assert Inner.model_validate(stored(payload)) == payload
    whole = stored(Login())
    assert "***" not in json.dumps(whole)
    assert (whole["number"], whole["many"], whole["named"]["b"]) == (4711, [HUSH], None)


def test_nothing_secret_is_printed() -> None:
    shown = redact(Login, stored(Login()))
    assert HUSH not in json.dumps(shown)
    assert "4711" not in json.dumps(shown)
    assert shown["user"] == "me"
    assert shown["free"] == {"shown": [1, 2]}
    assert shown["pair"] == ["plain", HIDDEN]
    assert shown["named"] == {"a": HIDDEN, "b": None}
    assert shown["inner"] == {"key": HIDDEN, "name": "n"}
    assert shown["tree"]["children"][0]["value"] == HIDDEN


@pytest.mark.parametrize(
    "payload",
    [
        {"passwrod": HUSH},
        {"password": {"nested": HUSH}},
        {"password": [HUSH]},
        {"inner": {"kee": HUSH}},
        {"inner": [{"key": HUSH}]},
        {"either": {"key": HUSH}},
        {"many": HUSH, "number": HUSH},
    ],
)
def test_a_payload_that_fits_no_model_tells_no_secret_either(payload: dict[str, Any]) -> None:
    assert HUSH not in json.dumps(redact(Login, payload))


def test_without_a_model_only_names_are_told() -> None:
    shown = redact(None, {"user": HUSH})
    assert list(shown) == ["user"]
    assert HUSH not in str(shown)
    assert HUSH not in str(redact(None, HUSH))


def test_undeclared_members_are_hidden_unless_the_model_takes_any() -> None:
    class Open(BaseModel):
        model_config = ConfigDict(extra="allow")
        a: int = 1

    class Aliased(BaseModel):
        token: Annotated[SecretStr, Field(alias="t")]

    assert redact(Open, {"a": 1, "b": 2}) == {"a": 1, "b": 2}
    assert redact(Inner, {"b": 2}) == {"b": UNDECLARED}
    assert HUSH not in str(redact(Aliased, {"t": HUSH}))
    assert HUSH not in str(redact(Aliased, {"token": HUSH}))


def test_a_secret_that_a_serializer_hides_is_refused_and_not_lost() -> None:
    class Folded(BaseModel):
        keys: dict[str, SecretStr]

        @field_serializer("keys", when_used="json")
        def fold(self, keys: dict[str, SecretStr]) -> list[str]:
            return [*keys, "more"]

    with pytest.raises(InvalidPayload, match="secrets in it would be lost"):
        encode(Folded(keys={"a": SecretStr(HUSH)}))
