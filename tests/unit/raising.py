"""Errors with a traceback."""

from __future__ import annotations

import json
from collections.abc import Callable


def raised(function: Callable[[], object]) -> Exception:
    """What `function` raises, with its traceback."""
    try:
        function()
    except Exception as error:  # noqa: BLE001  whatever it is
        return error
    raise AssertionError("it raised nothing")


def raise_in_a_library(text: str) -> None:
    json.loads(text + "x")
