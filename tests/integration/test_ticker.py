"""The ticker's thread: through outages of the database, beside an entry that fails, and for plain runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from app.periodic import CatchUp, Entry, FromTick
from app.ticks import Every
from db.session import rows
from tests.integration.scene import PLAIN, Scene, kill_sessions
from tests.nodes.waiting import wait_for

SECOND = timedelta(seconds=1)
ENTRY = Entry("steady", PLAIN, Every(SECOND), catch_up=CatchUp.ALL)


@pytest.fixture
def start(scene: Scene) -> Iterator[Callable[..., object]]:
    """Starts a ticker of the given entries; it ends with the test."""
    from tasks.ticker import Ticker  # noqa: PLC0415  reads the environment

    made = []

    def started(*entries: Entry) -> Ticker:
        made.append(Ticker(scene.url, entries))
        made[-1].start()
        return made[-1]

    yield started
    for ticker in made:
        ticker.stop()
        assert not ticker.is_alive()


def ticks(scene: Scene) -> list[datetime]:
    found = rows(scene.eyes, "SELECT idempotency_key FROM jobs WHERE idempotency_key LIKE 'steady %' ORDER BY 1")
    return [datetime.fromisoformat(row[0].removeprefix("steady ")) for row in found]


def test_no_tick_is_lost_when_its_session_breaks(scene: Scene, start: Callable[..., object]) -> None:
    start(replace(ENTRY, name="failing", fields={"n": FromTick(lambda _: 1 // 0)}), ENTRY)
    start(ENTRY)
    for number in (1, 2, 3):
        wait_for(lambda number=number: len(ticks(scene)) >= number, 20, "a tick")  # type: ignore[misc]
        assert kill_sessions(scene.eyes, "deadsure beat")
    wait_for(lambda: len(ticks(scene)) >= 5, 20, "more ticks")
    found = ticks(scene)
    assert found == [found[0] + n * SECOND for n in range(len(found))]


def test_plain_runs_are_remembered_without_a_file(scene: Scene, start: Callable[..., object]) -> None:
    from tasks.ticker import Ticker  # noqa: PLC0415  reads the environment

    ticker = start()
    assert isinstance(ticker, Ticker)
    before = datetime.now(UTC) - SECOND
    ticker.note_plain_run("nightly")
    wait_for(lambda: scene.ask("SELECT count(*) FROM periodic_ticks"), 20, "the run is written")
    remembered = Ticker(scene.url, []).plain_runs(["nightly", "new"])
    assert list(remembered) == ["nightly"]
    assert remembered["nightly"] > before
    assert Ticker("postgresql+psycopg2://x@127.0.0.1:1/x", []).plain_runs(["nightly"]) == {}
