"""What became of the jobs of a test: read from the job rows, the journal and the outbox."""

from __future__ import annotations

from collections import Counter
from typing import Any
from uuid import UUID

from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from tests.faults.effects import Effects
from tests.nodes.waiting import WaitTimeoutError, wait_for

DONE_TIMEOUT_S = 90


def submit_each(engine: Engine, jobs: Any, each: int) -> None:
    """Submit `each` leased and `each` atomic jobs of `tests.faults.jobs`, in one transaction."""
    with Session(engine) as session:
        for task in (jobs.leased_effect, jobs.atomic):
            task.submit_many(session, [{"n": n} for n in range(each)])
        session.commit()


class Outcomes:
    """Reads of one test's database; waits outlive an outage of the server."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._effects = Effects(engine)

    def rows(self, statement: str, **parameters: Any) -> list[Any]:
        """Rows of any query."""
        with self._engine.connect() as connection:
            return list(connection.execute(text(statement), parameters))

    def value(self, statement: str, **parameters: Any) -> Any:
        """First column of the first row."""
        return self.rows(statement, **parameters)[0][0]

    def states(self) -> Counter[str]:
        """Number of jobs in each state."""
        return Counter(dict(map(tuple, self.rows("SELECT state::text, count(*) FROM jobs GROUP BY 1"))))

    def blamed(self) -> list[Any]:
        """Jobs to which anything was counted: (job_id, type, failures, crashes, stalls, episode, cause, reason)."""
        return self.rows(
            "SELECT job_id::text, type, failures, crashes, stalls, episode, cause, reason FROM jobs"
            " WHERE failures + crashes + stalls + episode > 0"
        )

    def events(self, event: str, job_id: UUID | str | None = None) -> list[Any]:
        """Journal rows of one kind, oldest first: (job_id, at, attempt, copy, redelivered, reason)."""
        return self.rows(
            "SELECT job_id, at, attempt, copy, redelivered, reason FROM job_events"
            " WHERE event = :event AND job_id = coalesce(:job_id, job_id) ORDER BY event_id",
            event=event,
            job_id=UUID(str(job_id)) if job_id else None,
        )

    def debts(self) -> int:
        """Number of jobs that somebody must wake up."""
        return int(self.value("SELECT count(*) FROM outbox"))

    def sends(self) -> int:
        """Number of publishes that the unpaid debts have seen."""
        return int(self.value("SELECT coalesce(sum(sends), 0) FROM outbox"))

    def wait_effects(self, count: int, timeout_s: float = DONE_TIMEOUT_S) -> None:
        """Wait until so many effects, of whatever job, are there."""
        wait_for(
            lambda: self._effects.count() >= count, timeout_s, f"{count} effects", poll_s=0.02, retry_on=(DBAPIError,)
        )

    def wait_running(self, count: int, timeout_s: float = DONE_TIMEOUT_S) -> None:
        """Wait until so many handlers have started."""
        wait_for(lambda: self._effects.starts() >= count, timeout_s, f"{count} starts", retry_on=(DBAPIError,))

    def wait_all_succeeded(self, count: int, timeout_s: float = DONE_TIMEOUT_S) -> None:
        """Wait until exactly `count` jobs exist and all have succeeded; a failure names the states seen last."""
        seen: Counter[str] = Counter()

        def all_succeeded() -> bool:
            nonlocal seen
            seen = self.states()
            return seen == {"succeeded": count}

        try:
            wait_for(all_succeeded, timeout_s, f"{count} jobs succeed", poll_s=0.1, retry_on=(DBAPIError,))
        except WaitTimeoutError as error:
            raise WaitTimeoutError(f"{error}; states: {dict(seen)}") from None

    def assert_once(self, count: int) -> None:
        """`count` jobs succeeded, each with one effect, none blamed, no debt left."""
        seen = (self.states(), self._effects.doubled(), self._effects.count(), self.blamed(), self.debts())
        assert seen == ({"succeeded": count}, {}, count, [], 0), seen
