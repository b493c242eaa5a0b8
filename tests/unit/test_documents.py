"""The documents: links resolve, commands and settings that they name exist, their jobs can be registered."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from app.settings import Settings
from app.settings_reference import markdown

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "tests").rglob("*.md"))
    if ".venv" not in path.parts
)
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
BLOCK = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
COMMAND = re.compile(r"\bdeadsure((?: [a-z][a-z-]*)+)")
VARIABLE = re.compile(r"\bDEADSURE_[A-Z_]*[A-Z]\b(?!_?\*)")


def prose(path: Path) -> str:
    """A document without its code blocks, where a link is no link."""
    return BLOCK.sub("", path.read_text())


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    path = ROOT / name
    wrong = []
    for target in (match["target"] for match in LINK.finditer(prose(path))):
        place, _, anchor = target.partition("#")
        if "://" in target:
            continue
        there = (path.parent / place).resolve() if place else path
        if not there.exists() or (anchor and there.suffix == ".md" and anchor not in anchors(there)):
            wrong.append(target)
    assert wrong == []


def test_the_configuration_reference_is_the_settings() -> None:
    """Write it anew with `deadsure settings --markdown > docs/configuration.md`."""
    assert (ROOT / "docs/configuration.md").read_text() == markdown()


def words(path: Path) -> Iterator[tuple[str, ...]]:
    """The words behind each `deadsure` in code of a document."""
    text = path.read_text()
    code = [match["text"] for match in BLOCK.finditer(text)] + re.findall(r"`([^`\n]+)`", BLOCK.sub("", text))
    for piece in code:
        for match in COMMAND.finditer(piece):
            yield tuple(match[1].split())


def unknown_command(said: tuple[str, ...]) -> bool:
    """Whether a group of `deadsure` has no command of this name."""
    from tasks.commands import deadsure  # noqa: PLC0415  reads the environment

    at: click.Command = deadsure
    for word in said:
        if not isinstance(at, click.Group):
            return False
        if word not in at.commands:
            return True
        at = at.commands[word]
    return False


@pytest.mark.parametrize("name", NAMES)
def test_commands_and_settings_that_are_named_exist(name: str) -> None:
    path = ROOT / name
    assert [" ".join(said) for said in words(path) if unknown_command(said)] == []
    known = {variable for variable, _, _ in Settings.describe()}
    assert sorted(set(VARIABLE.findall(path.read_text())) - known) == []


@pytest.mark.parametrize("name", NAMES)
def test_python_is_python(name: str) -> None:
    for match in BLOCK.finditer((ROOT / name).read_text()):
        if match["language"] == "python":
            ast.parse(match["text"])


def test_decisions_have_a_number_each() -> None:
    numbers = [path.name[:3] for path in (ROOT / "docs/decisions").glob("*.md")]
    assert len(numbers) == len(set(numbers))
    for path in (ROOT / "docs/decisions").glob("*.md"):
        assert path.read_text().startswith(f"# {path.name[:3]}: ")


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 190
