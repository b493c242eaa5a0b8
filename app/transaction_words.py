"""What a handler's SQL would do to the transaction that its job shares, told by the first words of each statement.

The race: a handler sends COMMIT in the finishing transaction, and the process dies before the job's success is
written. The effect stands, its own and that of each job in the same commit, and runs again. So it is refused before
it is sent. PostgreSQL itself refuses a COMMIT in a function or a DO block there.

What is set for the rest of a transaction (`SET LOCAL app.tenant = …`) would hold for the next job too: a job that does
so shares no commit.
"""

from __future__ import annotations

import re
from functools import lru_cache

from app.errors import UnrecoverableError

QUOTED = re.compile(
    r"""(?sx) \b[eE]'(?:[^'\\]|''|\\.)*' | '(?:[^']|'')*' | "[^"]*" | (\$\w*\$) .*? \1 | --[^\n]* | /\*.*?\*/""",
)
ENDS = re.compile(r"(?is)(?:commit|end|abort|prepare\s+transaction)\b|rollback\b(?!\s+((work|transaction)\s+)?to\b)")
LASTS = re.compile(r"(?is)set\b|.*\bset_config\b|create\s+((local|global)\s+)?temp")
SUSPECT = re.compile(r"(?i)\b(?:commit|end|abort|rollback|prepare|set|set_config|create)\b")


def statements(sql: str) -> list[str]:
    """The statements of a message, without what is quoted or a comment."""
    return [found.strip() for found in QUOTED.sub(" ", sql).split(";")]


@lru_cache(maxsize=1000)
def ends(sql: str) -> bool:
    """Whether a statement of `sql` would end the transaction."""
    return bool(SUSPECT.search(sql)) and any(ENDS.match(found) for found in statements(sql))


@lru_cache(maxsize=1000)
def lasts(sql: str) -> bool:
    """Whether a statement of `sql` changes something for the rest of the transaction, or longer."""
    return bool(SUSPECT.search(sql)) and any(LASTS.match(found) for found in statements(sql))


def refuse_end(sql: str) -> None:
    """Raise UnrecoverableError for SQL that would end the transaction."""
    if ends(sql):
        raise UnrecoverableError(
            "the finishing transaction ends with the job's success: a handler sends no COMMIT and no ROLLBACK in it "
            "(a savepoint of its own is fine), and uses a connection of its own for separate work"
        )
