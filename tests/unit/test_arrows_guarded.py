"""A rule of the house: every UPDATE of a job's state checks the state it comes from, and no ORM writes it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for folder in ("app", "tasks") for path in (ROOT / folder).rglob("*.py"))
UPDATE = re.compile(r"\bUPDATE\s+jobs\b(?P<assignments>.*?)\bWHERE\b(?P<guard>.*?)(?:\bRETURNING\b|\Z)", re.DOTALL)


def texts(path: Path) -> Iterator[str]:
    """Every string of a module, f-strings with their fields as they are written."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else f"{{{ast.unparse(part)}}}"
                for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def updates() -> list[tuple[str, str, str]]:
    """(file, assignments, guard) of each UPDATE of jobs."""
    found = []
    for path in SOURCES:
        for text in texts(path):
            found += [
                (str(path.relative_to(ROOT)), match["assignments"], match["guard"]) for match in UPDATE.finditer(text)
            ]
    return found


def test_the_updates_are_found() -> None:
    files = {file for file, _, _ in updates()}
    assert files >= {"app/claim.py", "app/finish.py", "app/release.py", "app/sweep.py"}


@pytest.mark.parametrize(("file", "assignments", "guard"), updates(), ids=lambda value: value[:20])
def test_an_update_of_the_state_checks_the_state(file: str, assignments: str, guard: str) -> None:
    if re.search(r"\bstate\s*=", assignments):
        assert re.search(r"\bstate(::text)?\s*(=|IN)|\{guard\}", guard), f"{file}: {guard}"


def test_the_guards_of_finish_check_state_and_attempt() -> None:
    from app import finish  # noqa: PLC0415

    for guard in (finish.COMMITTED, finish.UNCOMMITTED):
        assert re.search(r"\bstate(::text)? = ", guard)
        assert "attempt = " in guard
    assert "worker_id = " in finish.COMMITTED


def test_no_attribute_named_state_is_assigned() -> None:
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            targets = node.targets if isinstance(node, ast.Assign) else []
            names = [target.attr for target in targets if isinstance(target, ast.Attribute)]
            assert "state" not in names, f"{path}:{node.lineno if isinstance(node, ast.Assign) else 0}"


def test_arrows_ask_the_database_for_the_time() -> None:
    """now() is the start of the transaction, and a client's clock is nobody's."""
    for path in SOURCES:
        for text in texts(path):
            if re.search(r"\b(UPDATE|INSERT INTO|DELETE FROM)\b", text):
                assert not re.search(r"\bnow\(\)|CURRENT_TIMESTAMP", text, re.IGNORECASE), f"{path}: {text}"
