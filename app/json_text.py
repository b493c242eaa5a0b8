"""JSON as PostgreSQL stores it: strict, UTF-8, without what JSONB refuses."""

from __future__ import annotations

import json
import re
from typing import Any

NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


def to_json(value: Any, *, sort_keys: bool = False) -> str:
    """Compact JSON; raises ValueError or TypeError naming what cannot be stored (NaN, NUL, lone surrogates, …)."""
    text = json.dumps(value, sort_keys=sort_keys, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("a text holds a lone surrogate") from None
    if NUL.search(text):
        raise ValueError("a text holds a NUL character")
    return text
