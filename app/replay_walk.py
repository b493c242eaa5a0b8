"""The way through a replay run, stage by stage; it stops by itself when the same failure comes back.

    decide about jobs until so many are out -> wait until all of them are at rest -> next stage
    stopped: the fingerprint returned, another failure in a trial stage, or a stage took too long

A stage counts jobs that really went out: what was left or settled proves nothing about a fix. A job that somebody else
replayed meanwhile is not replayed again, but watched: two operators who start the same group must not make each other
skip the trial.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from uuid import UUID

from psycopg2.extensions import connection as PgConnection

from app.replay import Decider
from app.replay_run import Run
from app.submit import NOTIFY
from app.triage import Leave, Replay, decide
from db.session import one, rows

LOOK_S = 0.3
LOOK_SHARE = 10  # a look at many jobs is not taken more often than this multiple of its own length
PENDING = """
SELECT job_id, episode FROM replay_run_jobs WHERE run_id = %(run_id)s AND outcome IS NULL ORDER BY place
"""
POSITION = """
SELECT stage, count(*) FILTER (WHERE outcome NOT LIKE 'left%%' AND outcome <> 'settled')
  FROM replay_run_jobs WHERE run_id = %(run_id)s AND stage IS NOT NULL GROUP BY stage ORDER BY stage DESC LIMIT 1
"""
NOTE = """
UPDATE replay_run_jobs SET outcome = %(outcome)s, stage = %(stage)s
 WHERE run_id = %(run_id)s AND job_id = %(job_id)s AND outcome IS NULL
"""
# Who came back is told by the next entry, not by the state: it may have been replayed and have succeeded since.
LOOK = """
WITH judged AS (
    SELECT run.job_id, CASE WHEN again.fingerprint = before.fingerprint THEN 'returned'
                            WHEN again.fingerprint IS NOT NULL THEN 'quarantined for another cause'
                            ELSE jobs.state::text END AS outcome
      FROM replay_run_jobs run JOIN jobs USING (job_id)
      JOIN quarantine_entries before ON before.job_id = run.job_id AND before.episode = run.episode
      LEFT JOIN quarantine_entries again ON again.job_id = run.job_id AND again.episode = run.episode + 1
     WHERE run_id = %(run_id)s AND outcome IN ('replayed', 'elsewhere')
       AND (again.fingerprint IS NOT NULL OR jobs.state IN ('succeeded', 'cancelled'))
), noted AS (
    UPDATE replay_run_jobs run SET outcome = judged.outcome
      FROM judged WHERE run_id = %(run_id)s AND run.job_id = judged.job_id AND run.outcome IN ('replayed', 'elsewhere')
    RETURNING run.job_id, run.outcome
), stop AS (
    UPDATE replay_runs SET stopped_at = clock_timestamp(),
                           stopped_reason = CASE WHEN EXISTS (SELECT FROM noted WHERE outcome = 'returned')
                                                 THEN 'returned' ELSE 'another cause' END
     WHERE run_id = %(run_id)s AND stopped_at IS NULL
       AND EXISTS (SELECT FROM noted WHERE outcome = 'returned'
                      OR outcome = 'quarantined for another cause' AND %(trial)s)
    RETURNING stopped_reason
)
SELECT (SELECT count(*) FROM replay_run_jobs WHERE run_id = %(run_id)s AND outcome IN ('replayed', 'elsewhere'))
       - (SELECT count(*) FROM noted),
       coalesce((SELECT stopped_reason FROM stop), (SELECT stopped_reason FROM replay_runs WHERE run_id = %(run_id)s))
"""
STOP = """
UPDATE replay_runs SET stopped_at = clock_timestamp(), stopped_reason = %(reason)s
 WHERE run_id = %(run_id)s AND stopped_at IS NULL AND finished_at IS NULL
"""
FINISH = """
UPDATE replay_runs SET finished_at = clock_timestamp()
 WHERE run_id = %(run_id)s AND finished_at IS NULL AND stopped_at IS NULL
"""


class Stopped(StrEnum):
    """Why a run stopped before its end; it can be resumed."""

    RETURNED = "returned"
    ANOTHER_CAUSE = "another cause"
    TIMEOUT = "timeout"


@dataclass(frozen=True)
class Progress:
    """Where a run is: `stage` counts from 1, `size` is None in the stage of all that are left.

    `stopped` tells why no further job goes out.
    """

    stage: int
    stages: int
    size: int | None
    out: int
    left_to_do: int
    stopped: str | None = None


Report = Callable[[Progress], None]


class Walk:
    """One command's way through a run."""

    def __init__(
        self, connection: PgConnection, run: Run, author: str, stage_timeout_s: float, report: Report | None = None
    ) -> None:
        self._connection, self._run, self._author = connection, run, author
        self._timeout_s, self._report = stage_timeout_s, report or (lambda _: None)
        self._values: dict[str, Any] = {"run_id": str(run.run_id)}
        self._pending: deque[tuple[UUID, int]] = deque()
        self._out = 0
        self._look_at = self._next_at = time.monotonic()

    def go(self) -> Stopped | None:
        """Walk on from where the run is; why it stopped, None when it came to its end. Raises psycopg2.Error."""
        terms = self._run.terms
        self._pending.extend(
            (UUID(str(job_id)), episode) for job_id, episode in rows(self._connection, PENDING, self._values)
        )
        position = one(self._connection, POSITION, self._values)
        stage, tried = position or (0, 0)
        stopped: Stopped | None = None
        while stage < len(terms.stages):
            stopped = self._send(stage, tried)
            rows(self._connection, NOTIFY)
            if terms.wait:
                stopped = self._rest(stage, stopped)
            if stopped is not None or not self._pending:
                break
            stage, tried = stage + 1, 0
        if stopped is None:
            rows(self._connection, FINISH, self._values)
        return stopped

    def _send(self, stage: int, tried: int) -> Stopped | None:
        """Decide about jobs until the stage is full."""
        size = self._run.terms.stages[stage]
        while self._pending and (size is None or tried < size):
            stopped = self._pace(stage)
            if stopped is not None:
                return stopped
            job_id, episode = self._pending.popleft()
            tried += self._decide(job_id, episode, stage)
        return None

    def _decide(self, job_id: UUID, episode: int, stage: int) -> bool:
        """One job; whether it went out, by our hand or another's."""
        terms = self._run.terms
        decider = Decider(self._author, terms.reason, self._run.run_id, stage)
        decision = decide(self._connection, job_id, episode, terms.wish, decider)
        out = isinstance(decision, Replay)
        if isinstance(decision, Leave):
            out = decision.decided == "replay"
            outcome = "elsewhere" if out else f"left: {decision}"
            rows(self._connection, NOTE, {**self._values, "job_id": str(job_id), "stage": stage, "outcome": outcome})
        self._out += out
        return out

    def _pace(self, stage: int) -> Stopped | None:
        """Keep to the rate, and look from time to time whether something came back."""
        rate = self._run.terms.rate_per_s
        while True:
            now = time.monotonic()
            if self._run.terms.wait and now >= self._look_at:
                stopped = self._look(stage)
                if stopped is not None:
                    return stopped
            if rate is None or now >= self._next_at:
                self._next_at = now + (1 / rate if rate else 0)
                return None
            rows(self._connection, NOTIFY)
            time.sleep(min(self._next_at - now, LOOK_S))

    def _rest(self, stage: int, stopped: Stopped | None) -> Stopped | None:
        """Wait until every job that is out is at rest; also when the run has stopped, to tell what became of them."""
        until = time.monotonic() + self._timeout_s
        while True:
            stopped = self._look(stage) or stopped
            if self._out == 0:
                return stopped
            if time.monotonic() >= until:
                rows(self._connection, STOP, {**self._values, "reason": Stopped.TIMEOUT.value})
                return stopped or Stopped.TIMEOUT
            time.sleep(max(0.0, min(self._look_at, until) - time.monotonic()))

    def _look(self, stage: int) -> Stopped | None:
        """Note who is at rest; why the run stopped, by our look or another command's."""
        stages = self._run.terms.stages
        before = time.monotonic()
        row = one(self._connection, LOOK, {**self._values, "trial": stages[stage] is not None})
        assert row is not None
        self._out, stopped = row
        took_s = time.monotonic() - before
        self._look_at = before + max(LOOK_S, took_s * LOOK_SHARE)
        self._report(Progress(stage + 1, len(stages), stages[stage], self._out, len(self._pending), stopped))
        return Stopped(stopped) if stopped else None
