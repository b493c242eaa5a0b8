"""A run of the retention: page by page, with pauses, until all is done or it is time to stop.

It can be stopped or killed anywhere and run again, and two may run at once: what a run has done is what is gone.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

from psycopg2.extensions import connection as PgConnection

from app.retention import jobs, rest
from app.retention.archive import Archive
from app.retention.jobs import FIRST, Verdict
from app.retention.policy import Retention
from db.session import rows

PAGE_ROWS = 500
PAUSE_S = 0.05


@dataclass
class Pruned:
    """What a run did, or would do. `kept` counts jobs by what keeps them; their age is not among the reasons.

    `jobs_complete`: the last of the old jobs was looked at; `complete`: so was everything else.
    """

    jobs: Counter[tuple[str, str]] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)
    rest: Counter[str] = field(default_factory=Counter)
    jobs_complete: bool = False
    complete: bool = False

    def note(self, found: Verdict) -> None:
        """Count a job that is gone, or would be."""
        self.jobs[found.state, found.type] += 1


@dataclass
class Run:
    """The terms of one run. `stop` is asked between pages; `saved` is told the cursor that a later run can begin at."""

    connection: PgConnection
    retention: Retention
    page_rows: int = PAGE_ROWS
    pause_s: float = PAUSE_S
    stop: Callable[[], bool] = bool
    archive: Archive | None = None
    dry: bool = False
    after: tuple[datetime, str] = FIRST
    saved: Callable[[tuple[datetime, str]], None] = lambda _: None
    done: Pruned = field(default_factory=Pruned)

    def go(self) -> Pruned:
        """Prune; what came of it. Raises psycopg2.Error and ArchiveError: what was done stays done."""
        done = self.done
        now = jobs.clock(self.connection)
        # Letters and runs first: jobs that only they kept can go in the same run.
        letters, runs, *others = rest.KINDS
        steps: list[Callable[[], bool]] = [
            *(lambda kind=kind: self._rest(done, kind, now) for kind in (letters, runs)),
            lambda: self._jobs(done, now),
            *(lambda kind=kind: self._rest(done, kind, now) for kind in others),
            lambda: self._journal(done, now),
        ]
        done.complete = all(step() for step in steps)
        return done

    def _jobs(self, done: Pruned, now: datetime) -> bool:
        done.jobs_complete = self._walk_jobs(done, now)
        return done.jobs_complete

    def _walk_jobs(self, done: Pruned, now: datetime) -> bool:
        if self.retention.soonest.seconds is None:
            return True
        while not self.stop():
            found = jobs.page(self.connection, self.retention, now, self.after, self.page_rows)
            if not found:
                return True
            done.kept.update(each.why for each in found if each.why not in (None, "its retention", "it has not ended"))
            self._bury(done, now, [each for each in found if each.why is None])
            self.after = (found[-1].created_at, found[-1].job_id)
            self.saved(self.after)
        return False

    def _bury(self, done: Pruned, now: datetime, chosen: list[Verdict]) -> None:
        if self.dry:
            for each in chosen:
                done.note(each)
            return
        if not chosen:
            return
        try:
            held = jobs.hold(self.connection, self.retention, now, [each.job_id for each in chosen])
            ids = [each.job_id for each in held]
            if self.archive is not None:
                self.archive.write(self.connection, ids)
            jobs.bury(self.connection, ids)
        except BaseException:
            if not self.connection.closed:
                rows(self.connection, "ROLLBACK")
            raise
        for each in held:
            done.note(each)
        time.sleep(self.pause_s)

    def _rest(self, done: Pruned, kind: rest.Kind, now: datetime) -> bool:
        if self.dry:
            done.rest[kind.name] = rest.count(self.connection, kind, self.retention, now)
            return True
        while not self.stop():
            gone = rest.delete(self.connection, kind, self.retention, now, self.page_rows)
            if gone:
                done.rest[kind.name] += gone
                time.sleep(self.pause_s)
            if gone < self.page_rows:
                return True
        return False

    def _journal(self, done: Pruned, now: datetime) -> bool:
        if self.retention.journal.seconds is None:
            return True
        walk = rest.JournalWalk.anywhere()
        while not self.stop():
            found = walk.orphans(self.connection, self.retention, now, self.page_rows)
            if found is None:
                return True
            if not found:
                continue
            if self.dry:
                done.rest["journals"] += len(found)
                continue
            if self.archive is not None:
                self.archive.write_orphans(self.connection, found)
            rest.forget(self.connection, found)
            done.rest["journals"] += len(found)
            time.sleep(self.pause_s)
        return False
