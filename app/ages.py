"""Ages as people write them: `30d`, `12h`, `45min`, `90s`, or `never`."""

from __future__ import annotations

import math
import re
from typing import Self

UNITS_S = {"d": 86_400, "h": 3600, "min": 60, "s": 1}
SHAPE = re.compile(r"([0-9]+(?:\.[0-9]+)?)(d|h|min|s)")
LONGEST_S = 100 * 366 * 86_400


class Age(float):
    """A number of seconds that reads and prints with its unit; `never` is infinite. Raises ValueError for other text.

    At least a second: a retention of nothing would delete what has just ended.
    """

    EXPECTED = "age: write 30d, 12h, 45min, 90s or never"

    def __new__(cls, text: str | float) -> Self:
        """From its text; from a number of seconds only as a copy."""
        if isinstance(text, float):
            return super().__new__(cls, text)
        if text == "never":
            return super().__new__(cls, math.inf)
        found = SHAPE.fullmatch(text)
        seconds = float(found[1]) * UNITS_S[found[2]] if found else 0.0
        if not 1 <= seconds <= LONGEST_S:
            raise ValueError(f"{text!r} is no {cls.EXPECTED}")
        return super().__new__(cls, seconds)

    def __str__(self) -> str:
        if self == math.inf:
            return "never"
        unit = next(unit for unit, seconds in UNITS_S.items() if self % seconds == 0 or seconds == 1)
        return f"{self / UNITS_S[unit]:g}{unit}"

    __repr__ = __str__

    @property
    def seconds(self) -> float | None:
        """For SQL: None is never."""
        return None if self == math.inf else float(self)
