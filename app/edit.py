"""An edit of a quarantined job's payload: a JSON merge patch or a whole new one, checked before anything is written."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from app.errors import EditRefused
from app.job_types import JobType
from app.json_patch import merge_patch
from app.redaction import redact
from app.submit import encode


@dataclass(frozen=True)
class Edit:
    """What is to become of a payload: `patch` is merged into it (RFC 7396), or `payload` takes its place."""

    patch: dict[str, Any] | None = None
    payload: dict[str, Any] | None = None

    def stored(self) -> dict[str, Any]:
        """The edit as a replay run keeps it."""
        return {"patch": self.patch, "payload": self.payload}

    def apply(self, job_type: JobType, old: dict[str, Any], key: str | None) -> Edited | None:
        """The new payload; None when it says the same as the old one.

        Raises pydantic.ValidationError when it fits no model, EditRefused when it would be another job's payload.
        """
        new = self.payload if self.payload is not None else merge_patch(old, self.patch)
        if not isinstance(new, dict):
            raise EditRefused(f"{job_type.name}: the payload must stay a JSON object")
        model = job_type.parse(new)
        text, digest = encode(model)
        if json.loads(text) == old:
            return None
        if changes_key(job_type, old, model, key):
            raise EditRefused(
                f"{job_type.name}: the edit changes what the idempotency key is made of, so it makes another job; "
                "cancel this one and submit that one"
            )
        return Edited(old, text, digest)


@dataclass(frozen=True)
class Edited:
    """A checked edit: the old payload, the new one as JSON text, its SHA-256 in hex."""

    old: dict[str, Any]
    text: str
    digest: str

    def diff(self, model: type[BaseModel]) -> list[str]:
        """Lines that go and come, secrets hidden."""
        before, after = (lines(redact(model, payload)) for payload in (self.old, json.loads(self.text)))
        changed = [line for line in difflib.ndiff(before, after) if line.startswith(("- ", "+ "))]
        return changed or ["  (only secret fields change)"]


def changes_key(job_type: JobType, old: dict[str, Any], new: BaseModel, key: str | None) -> bool:
    """Whether the job's identity was derived from what the edit changes."""
    if job_type.key is None or key is None:
        return False
    if job_type.key(new) == key:
        return False
    try:
        return job_type.key(job_type.parse(old)) == key
    except ValueError:
        return True  # nobody can tell: the key is the type's own, as far as we know


def lines(payload: Any) -> list[str]:
    """One line for each member, in the order of their names."""
    return json.dumps(payload, indent=2, sort_keys=True, ensure_ascii=False).splitlines()
