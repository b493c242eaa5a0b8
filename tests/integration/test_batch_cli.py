"""`deadsure batch`: for people and for scripts."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from click.testing import CliRunner, Result
from psycopg2.extensions import connection as PgConnection

from app import batch_story
from app.cli import batch as commands
from tests.integration.batch_scene import Batches
from tests.integration.scene import Scene

Run = Callable[..., Result]


@pytest.fixture
def cli(jobs: Any) -> Run:
    """`deadsure batch` in this process: (arguments) -> what it printed."""
    assert jobs
    from tasks.commands import deadsure  # noqa: PLC0415  reads the environment when it is imported

    def run(*arguments: object, says: str | None = None) -> Result:
        words = ["batch", *map(str, arguments)]
        return CliRunner().invoke(deadsure, words, input=says, prog_name="deadsure")

    return run


def as_json(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout)


@pytest.fixture
def blocked(batches: Batches) -> UUID:
    """One child has succeeded, one is in quarantine, two wait."""
    batch_id = batches.run(children=4)
    first, second, *_ = batches.children(batch_id)
    batches.succeed(first)
    batches.quarantine(second)
    return batch_id


def test_show_tells_counts_and_what_blocks(cli: Run, batches: Batches, blocked: UUID) -> None:
    _done, quarantined, waiting, _ = batches.children(blocked)
    told = as_json(cli("show", blocked, "--json"))
    assert (told["phase"], told["type"], told["coordinator"]) == ("waiting", "tests.batch", "succeeded")
    assert (told["children"], told["ended"], told["total"]) == ({"queued": 2, "succeeded": 1, "quarantined": 1}, 1, 4)
    stuck, open_ones = told["blocking"]
    assert (stuck["what"], stuck["count"], stuck["reason"]) == ("quarantined f", 1, "why")
    assert (stuck["jobs"], stuck["next"]) == ([str(quarantined)], f"deadsure quarantine show {quarantined}")
    assert (open_ones["what"], open_ones["count"]) == ("queued", 2)
    assert str(waiting) in open_ones["jobs"]
    text = cli("show", blocked).output
    for part in ("1 of 4 children have ended", "what blocks it", "quarantined f: why", str(quarantined), "next: "):
        assert part in text


def test_show_of_a_coordinator_that_is_stuck(cli: Run, scene: Scene, batches: Batches, jobs: Any) -> None:
    jobs.leased_effect.apply_async(kwargs={"n": 999}, idempotency_key="n5")
    batch_id = batches.submit(children=6, size=3)
    batches.attempt(batch_id)
    assert scene.state(batch_id) == "quarantined"
    told = as_json(cli("show", batch_id, "--json"))
    assert (told["phase"], told["cursor"], told["total"]) == ("stuck", 3, 3)
    assert told["blocking"][0]["what"] == "the coordinator is quarantined"
    assert told["blocking"][0]["next"] == f"deadsure quarantine show {batch_id}"


def test_list_shows_the_newest_first(cli: Run, batches: Batches, blocked: UUID) -> None:
    empty = batches.run(children=0)
    assert [story["batch_id"] for story in as_json(cli("list", "--json"))] == [str(empty), str(blocked)]
    assert [story["batch_id"] for story in as_json(cli("list", "--open", "--json"))] == [str(blocked)]
    assert [story["batch_id"] for story in as_json(cli("list", "--limit", "1", "--json"))] == [str(empty)]
    table = cli("list").output
    assert "2 batches" in table
    assert str(blocked) in table
    assert "2 queued, 1 succeeded, 1 quarantined" in table


@pytest.mark.parametrize("command", [("show",), ("show", "--follow"), ("cancel", "--reason", "r", "--yes")])
def test_no_such_batch(cli: Run, command: tuple[str, ...]) -> None:
    missing = uuid.uuid4()
    result = cli(*command, missing)
    assert result.exit_code == 1
    assert f"Error: there is no batch {missing}" in result.stderr


def test_cancel_asks_first(cli: Run, scene: Scene, blocked: UUID) -> None:
    result = cli("cancel", blocked, "--reason", "r", says="n\n")
    assert result.exit_code == 1
    assert "3 of 4 children are open" in result.stderr
    assert scene.ask("SELECT count(*) FROM jobs WHERE state = 'cancelled'") == 0
    assert cli("cancel", blocked, "--reason", "r", says="y\n").exit_code == 0
    assert scene.ask("SELECT count(*) FROM jobs WHERE state = 'cancelled'") == 3


def test_cancel_for_scripts(cli: Run, blocked: UUID) -> None:
    told = as_json(cli("cancel", blocked, "--reason", "r", "--author", "ann", "--yes", "--json"))
    assert (told["cancelled"], told["asked"], told["phase"], told["cancelled_by"]) == (3, 0, "cancelled", "ann")
    assert as_json(cli("cancel", blocked, "--reason", "r", "--yes", "--json"))["cancelled"] == 0


def test_cancel_needs_a_reason_and_a_batch_that_has_not_finished(cli: Run, batches: Batches, blocked: UUID) -> None:
    assert cli("cancel", blocked, "--yes").exit_code == 2
    result = cli("cancel", batches.run(children=0), "--reason", "r", "--yes")
    assert result.exit_code == 1
    assert "has finished" in result.stderr


def test_follow_tells_each_change_until_the_end(cli: Run, batches: Batches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "FOLLOW_S", 0.05)
    batch_id = batches.run(children=3)
    told: list[Result] = []
    watcher = threading.Thread(target=lambda: told.append(cli("show", batch_id, "--follow", "--json")))
    looked = threading.Event()
    show = batch_story.show

    def seen(connection: PgConnection, wanted: UUID) -> Any:
        story = show(connection, wanted)
        looked.set()
        return story

    monkeypatch.setattr(batch_story, "show", seen)
    watcher.start()
    assert looked.wait(10), "the first line"
    batches.succeed(*batches.children(batch_id))
    batches.look()
    watcher.join(20)
    (result,) = told
    assert result.exit_code == 0
    # The log of this process is there too.
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert (lines[0]["phase"], lines[0]["ended"]) == ("waiting", 0)
    assert (lines[-1]["phase"], lines[-1]["ended"], lines[-1]["completion"]) == ("finished", 3, "queued")
    assert [line["ended"] for line in lines] == sorted(line["ended"] for line in lines)


def test_follow_of_a_cancelled_batch_fails(cli: Run, blocked: UUID) -> None:
    cli("cancel", blocked, "--reason", "r", "--yes")
    result = cli("show", blocked, "--follow")
    assert result.exit_code == 1
    assert "cancelled: 4 of 4" in result.stderr


def test_follow_draws_a_bar_on_a_terminal(
    batches: Batches, blocked: UUID, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console  # noqa: PLC0415

    terminal = lambda **_given: Console(stderr=True, force_terminal=True, width=160)  # noqa: E731
    monkeypatch.setattr(commands, "Console", terminal)
    monkeypatch.setattr(commands, "FOLLOW_S", 0.01)
    _done, quarantined, *waiting = batches.children(blocked)
    batches.end_by_hand(blocked)
    batches.look()
    assert quarantined not in waiting
    commands.follow_bar(batches.scene.eyes, blocked)
    assert "4/4" in capsys.readouterr().err
