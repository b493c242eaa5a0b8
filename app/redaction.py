"""Secrets in payloads: fields of pydantic's secret types, and fields marked `SECRET`, are stored and never printed.

    class Login(BaseModel):
        password: SecretStr
        token: Annotated[str, SECRET]

What is a secret is read from the model's JSON schema (`writeOnly`), so it is known for a payload that fits no model
too. Whatever the model does not declare is not printed either: it may be a secret under a misspelt name.
"""

from __future__ import annotations

import base64
import warnings
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from pydantic import BaseModel, Field, Secret, SecretBytes, SecretStr
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import to_jsonable_python

SECRET = Field(json_schema_extra={"writeOnly": True})
HIDDEN = "**********"
UNDECLARED = "(hidden: not in the model)"
UNKNOWN = "(hidden: the model is not known here)"
BRANCHES = ("anyOf", "oneOf", "allOf")
DESCRIBES = {"type", "$ref", "const", "enum", *BRANCHES}
Schema = Mapping[str, Any]
ANYTHING: Schema = {}


class MarkingSecrets(GenerateJsonSchema):
    """JSON schema that marks `Secret[…]` too; pydantic marks SecretStr and SecretBytes itself."""

    def generate_inner(self, schema: Any) -> JsonSchemaValue:
        """The schema of one part; pydantic's secrets are known by how they are serialized."""
        made = super().generate_inner(schema)
        serialization = schema.get("serialization") or {}
        if getattr(serialization.get("function"), "__name__", "").startswith("_serialize_secret"):
            made["writeOnly"] = True
        return made


@lru_cache(maxsize=256)
def schemas(model: type[BaseModel]) -> tuple[Schema, ...]:
    """The model's schema by field name and by alias; empty when it has none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of defaults that are no JSON
            return tuple(
                model.model_json_schema(by_alias=alias, schema_generator=MarkingSecrets) for alias in (False, True)
            )
    except PydanticUserError:
        return ()


@lru_cache(maxsize=256)
def has_secrets(model: type[BaseModel]) -> bool:
    """Whether pydantic would write asterisks for a field of this model."""
    found = schemas(model)
    return not found or "'writeOnly': True" in repr(found)


def redact(model: type[BaseModel] | None, payload: Any) -> Any:
    """The payload as it may be printed; without a model only the names of its fields."""
    whole = schemas(model) if model is not None else ()
    if not whole:
        return dict.fromkeys(payload, UNKNOWN) if isinstance(payload, dict) else UNKNOWN
    for schema in whole:
        payload = mask(schema, (schema,), payload)
    return payload


def mask(root: Schema, parts: Iterable[Schema], value: Any) -> Any:
    """`value` with everything hidden that one of the schemas of its place says is secret, or that none describes."""
    found = list(resolved(root, parts))
    if value is None:
        return None
    if any(part.get("writeOnly") is True for part in found):
        return HIDDEN
    if isinstance(value, dict):
        return {name: within(root, [member(part, name) for part in found], entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [within(root, [element(part, place) for part in found], entry) for place, entry in enumerate(value)]
    kinds = {part["type"] for part in found if "type" in part}
    misplaced = kinds and kinds <= {"array", "object"} and not any(undescribed(part) for part in found)
    return HIDDEN if misplaced else value


def within(root: Schema, parts: Iterable[Schema | None], value: Any) -> Any:
    """A member or an element; hidden when no schema describes it."""
    known = [part for part in parts if part is not None]
    return mask(root, known, value) if known else UNDECLARED


def member(part: Schema, name: str) -> Schema | None:
    """The schema of an object's member, None when this schema describes none of that name."""
    return described(part, part.get("properties", {}).get(name), "additionalProperties")


def element(part: Schema, place: int) -> Schema | None:
    """The schema of an array's element, None when this schema describes no array."""
    prefix = part.get("prefixItems", ())
    return described(part, prefix[place] if place < len(prefix) else None, "items")


def described(part: Schema, named: Schema | None, rest: str) -> Schema | None:
    """What was found by name or place, else what the schema says of the rest."""
    if named is not None:
        return named
    more = part.get(rest, undescribed(part))
    return more if isinstance(more, Mapping) else ANYTHING if more is True else None


def undescribed(part: Schema) -> bool:
    """Whether the schema lets anything pass."""
    return not DESCRIBES & part.keys()


def resolved(root: Schema, parts: Iterable[Schema]) -> Iterable[Schema]:
    """The schemas with references and alternatives followed; a reference's own marks count too."""
    for part in parts:
        yield part
        reference = part.get("$ref")
        if isinstance(reference, str):
            yield from resolved(root, [root.get("$defs", {}).get(reference.rpartition("/")[2], {})])
        for word in BRANCHES:
            yield from resolved(root, part.get(word, ()))


def reveal(python: Any, plain: Any) -> Any:
    """`plain` (a dump for JSON) with what pydantic put asterisks for taken from `python` (the same dump with objects).

    The database must hold the secret itself: its handler needs it.
    """
    if isinstance(python, SecretBytes):
        return text_of(python.get_secret_value())
    if isinstance(python, SecretStr | Secret):
        return to_jsonable_python(python.get_secret_value())
    if not (isinstance(python, Mapping | list | tuple | set | frozenset) and isinstance(plain, dict | list)):
        return plain
    if len(python) != len(plain):
        raise ValueError("its JSON has another shape than its fields, and secrets in it would be lost")
    if isinstance(python, Mapping) and isinstance(plain, dict):
        return {name: reveal(entry, plain[name]) for name, entry in zip(plain, python.values(), strict=True)}
    return [reveal(entry, shown) for entry, shown in zip(python, plain, strict=True)]


def text_of(secret: bytes) -> str:
    """Bytes as JSON holds them: text where it is text, as pydantic reads it back."""
    try:
        return secret.decode()
    except UnicodeDecodeError:
        return base64.b64encode(secret).decode()
