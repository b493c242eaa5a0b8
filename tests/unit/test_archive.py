"""The export file: what a crash cut off goes, what was whole stays, and one process writes at a time."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from app.retention.archive import CHUNK, Archive, ArchiveError


def append(path: Path, *lines: str) -> None:
    with Archive(path) as archive:
        archive._append(lines)


def text(path: Path) -> str:
    return (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode()


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
@pytest.mark.parametrize("size", [1, CHUNK + 7])
def test_a_cut_off_end_is_dropped_at_any_byte(tmp_path: Path, name: str, size: int) -> None:
    path = tmp_path / name
    append(path, "one" * size)
    whole = path.read_bytes()
    append(path, "two", "three")
    both = path.read_bytes()
    for cut in {1, 5, len(both) - len(whole) - 1}:
        path.write_bytes(both[: len(whole) + cut])
        append(path, "four")
        kept = text(path).splitlines()
        assert (kept[0], kept[-1]) == ("one" * size, "four")
        assert all(line in ("two", "four") for line in kept[1:])


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_garbage_alone_is_dropped(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"\x1f\x8b half")
    append(path, "one")
    assert text(path) == "one\n"


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with Archive(path), pytest.raises(ArchiveError, match="another prune"), Archive(path):
        pass
    append(path, "one")


def test_a_file_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="No such file"), Archive(tmp_path / "no" / "a.jsonl"):
        pass
