"""The story of one demo run: submit, let it work, `kill -9` in the middle, start another worker, count."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from app.demo import load
from app.demo.errors import DemoError
from app.demo.screen import Screen, Show
from app.demo.stage import Stage, shown
from app.demo.tally import Progress, Tally, TypeTally
from app.demo.worker import COMMAND, Workers, workers
from app.settings import settings
from db.migrate import upgrade
from db.session import connect, engine

KILL_FROM = 0.3  # of the jobs succeeded; then at the first look that finds jobs being worked on
KILL_LATEST = 0.8
POLL_S = 0.01
STUCK_NAMED = 10
BASE_TIMEOUT_S, TIMEOUT_PER_JOB_S = 120.0, 0.1


@dataclass(frozen=True)
class Kill:
    """The kill: whom, when (database time), and where the run was."""

    pid: int
    at: datetime
    progress: Progress


@dataclass(frozen=True)
class Outcome:
    """What a run came to. `kill` is None when time was up before it; times in seconds from the kill."""

    stage: Stage
    run: str
    kill: Kill | None
    types: list[TypeTally]
    bad_files: list[str]
    stuck: list[dict[str, Any]]
    recovery_s: float | None
    last_effect_s: float | None
    story_of: str | None
    story: Sequence[tuple[Any, ...]]

    def total(self, field: str) -> int:
        """A column of the table, summed."""
        return sum(getattr(entry, field) for entry in self.types)

    @property
    def good(self) -> bool:
        """Whether every job had its effect, once."""
        return not (self.total("lost") or self.total("doubled") or self.bad_files)

    def summary(self) -> dict[str, Any]:
        """The JSON object of the last line."""
        columns = ("jobs", "succeeded", "lost", "doubled", "redelivered", "attempts_over_1", "crashes")
        return {
            **{name: self.total(name) for name in columns},
            "bad_files": len(self.bad_files),
            "recovery_s": rounded(self.recovery_s),
            "last_effect_s": rounded(self.last_effect_s),
            "broker": self.stage.broker,
            "killed_pid": self.kill and self.kill.pid,
            "succeeded_when_killed": self.kill and self.kill.progress.succeeded,
            "running_when_killed": self.kill and self.kill.progress.running,
            "stuck": [job["job_id"] for job in self.stuck[:STUCK_NAMED]],
            "types": [asdict(entry) for entry in self.types],
            "run": self.run,
            "reports_dir": str(self.stage.reports),
        }


def rounded(seconds: float | None) -> float | None:
    """Milliseconds are enough."""
    return None if seconds is None else round(seconds, 3)


def play(stage: Stage, screen: Screen, jobs: int, timeout_s: float | None) -> Outcome:
    """Play on running servers. Jobs that do not finish in `timeout_s` are in `Outcome.stuck`.

    Raises DemoError when a worker ends by itself.
    """
    url = settings().need_database()
    upgrade(url)
    database = engine(url)
    seeded, prepared = load.prepare(database, jobs)
    screen.say(f"There are {seeded.accounts:,} accounts and {seeded.orders:,} orders to work on.")
    deadline = time.monotonic() + (timeout_s or BASE_TIMEOUT_S + TIMEOUT_PER_JOB_S * jobs)
    with workers(stage.root) as crew, closing(connect(url, "deadsure demo", statement_timeout_s=60)) as connection:
        tally = Tally(connection, prepared.run)
        crew.start()
        screen.say(f"Started a worker: {' '.join(COMMAND)}   (pid {crew.pid}, log {shown(crew.log)})")
        submitted = send(screen, prepared, lambda page: load.submit_page(database, page))
        with screen.bar("finished", jobs) as show:
            kill = None
            if watch(tally, crew, show, deadline, lambda seen: ripe(seen, jobs)):
                kill = strike(tally, crew, screen, jobs)
                crew.start()
                screen.say(f"Started another worker (pid {crew.pid}, log {shown(crew.log)}); nobody repairs anything.")
                watch(tally, crew, show, deadline, lambda seen: not seen.unfinished)
        crew.stop()  # in good order: it still takes the deliveries that came a second time
        screen.say("Counting, in the database and on the disk ...")
        recovery_s, last_effect_s = tally.after(kill.at) if kill else (None, None)
        hit = tally.hit()
        return Outcome(
            stage=stage,
            run=prepared.run,
            kill=kill,
            types=tally.by_type(submitted),
            bad_files=tally.bad_files(stage.reports),
            stuck=tally.stuck(),
            recovery_s=recovery_s,
            last_effect_s=last_effect_s,
            story_of=hit,
            story=tally.story(hit) if hit else (),
        )


def send(screen: Screen, prepared: load.Load, submit_page: Callable[[list[Any]], Sequence[Any]]) -> dict[str, int]:
    """Submit page by page; returns how many jobs of each type the database said it has."""
    exports, posts = len(prepared.exports), len(prepared.posts)
    screen.say(f"Submitting {exports} exports (a CSV file each) and {posts} ledger posts (a database row each).")
    submitted: Counter[str] = Counter()
    with screen.bar("submitted", exports + posts) as show:
        for page in prepared.pages():
            answers = submit_page(page)
            if not all(answer.created for answer in answers):
                raise DemoError(f"run {prepared.run}: a job of this run was there before it was submitted")
            submitted.update(job.job_type.name for job in page)
            show(submitted.total())
    return dict(submitted)


def watch(tally: Tally, crew: Workers, show: Show, deadline: float, enough: Callable[[Progress], bool]) -> bool:
    """Show progress until it is `enough` (True) or the deadline is over (False)."""
    while True:
        seen = tally.progress()
        show(seen.succeeded)
        if enough(seen):
            return True
        crew.check()
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)


def ripe(seen: Progress, jobs: int) -> bool:
    """Whether this is the middle: enough is done, and something is being done."""
    return seen.succeeded >= KILL_FROM * jobs and (seen.running > 0 or seen.succeeded >= KILL_LATEST * jobs)


def strike(tally: Tally, crew: Workers, screen: Screen, jobs: int) -> Kill:
    """`kill -9` the whole worker and say what it held."""
    pid, at = crew.pid, tally.now()
    children = crew.kill9()
    seen = tally.progress()
    screen.say(
        f"kill -9 {pid}: the worker and its {children} child processes are gone "
        f"({seen.succeeded} of {jobs} jobs finished, {seen.running} in the middle of their work)."
    )
    return Kill(pid, at, seen)
