"""What `deadsure quarantine replay` takes: JSON objects and stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click


class JsonObject(click.ParamType[Any]):
    """A JSON object, or `@FILE` that holds one: secrets do not belong on a command line."""

    name = "JSON|@FILE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The object."""
        if isinstance(value, dict):
            return value
        try:
            found = json.loads(Path(value[1:]).read_text() if value.startswith("@") else value)
        except OSError as error:
            self.fail(f"cannot be read: {error.strerror}", param, ctx)
        except ValueError as error:
            self.fail(f"no JSON: {error}", param, ctx)
        if not isinstance(found, dict):
            self.fail("must be a JSON object", param, ctx)
        return found


class Stages(click.ParamType[Any]):
    """Numbers of jobs, `all` at the end: 1,10,all."""

    name = "N,…,all"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """A tuple of numbers; None stands for all that are left."""
        if isinstance(value, tuple):
            return value
        *trials, last = [part.strip() for part in value.split(",")]
        numbers = [*trials, last] if last != "all" else trials
        if not all(part.isdecimal() and int(part) for part in numbers):
            self.fail(f"{value!r} is not like 1,10,all", param, ctx)
        return (*map(int, numbers), *([None] if last == "all" else []))
