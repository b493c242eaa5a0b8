"""The ledger of external calls: one row for each, with an idempotency key of its own.

The race: a worker makes the call and dies before it can say so; the next attempt must not make it a second time
blindly. The row is `started` before the call, under the current attempt only, and `finished` with its result after.
A rerun returns the result of a finished call. A started one may have happened:

    the job type has a check  -> ask: done closes the row, not done repeats the call
    the other side takes keys -> repeat with the same key, which the other side honours
    neither, or no answer     -> UncertainEffect, unless the job type's `on_uncertain` says that a second call is better

"Not done" without a key is believed only when the earlier attempt can no longer act (H11): a frozen process that wakes
up later would make its call after the answer was given.

A first call that failed in a way which proves that nothing happened (refused connection, a reply that says no) is
withdrawn, so that the next attempt may make it. What the other side answered is kept in memory until the ledger has
it, through outages of the database: an answer that is lost here is a call that nobody can judge later.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any
from uuid import UUID

from psycopg2.extensions import connection as PgConnection

from app.clock import pause_s
from app.errors import LeaseLost, UncertainEffect, UnrecoverableError
from app.failures import proves_nothing_happened
from app.journal import log
from app.json_text import to_json
from app.limit_clock import NO_CLOCK, LimitClock
from app.seat import DatabaseAway, noticing_outage
from app.sweep import CHILD_DIED, HARD_LIMIT
from db.session import one

# The lock on the job's row makes the order certain: a call is entered before its attempt loses the job, or not at all.
# Without it a call could be entered after a replay had looked at the ledger and found it empty (H11).
START = """
INSERT INTO effects (job_id, name, attempt, idempotency_key, takes_key)
SELECT job_id, %(name)s, attempt, %(key)s, %(takes_key)s FROM jobs
 WHERE job_id = %(job_id)s AND state = 'running' AND attempt = %(attempt)s AND worker_id = %(worker_id)s
   FOR SHARE
ON CONFLICT (job_id, name) DO NOTHING
RETURNING 1
"""
SEEN_DEAD = [f"killed: {CHILD_DIED}%", f"killed: {HARD_LIMIT}%"]
# Words of an attempt that can no longer act: it ended itself, or its worker's main process saw it die.
ENDED = "(event IN ('retry', 'quarantine', 'release') OR event = 'expire' AND reason LIKE ANY (%(seen)s))"
EARLIER = f"""
SELECT effects.status, effects.result, effects.attempt,
       EXISTS (SELECT FROM job_events ended
                WHERE ended.job_id = effects.job_id AND ended.attempt = effects.attempt AND {ENDED})
  FROM effects JOIN jobs USING (job_id)
 WHERE job_id = %(job_id)s AND name = %(name)s
   AND state = 'running' AND jobs.attempt = %(attempt)s AND worker_id = %(worker_id)s
"""
AGAIN = """
WITH mine AS (
    SELECT job_id FROM jobs
     WHERE job_id = %(job_id)s AND state = 'running' AND attempt = %(attempt)s AND worker_id = %(worker_id)s
       FOR SHARE
)
UPDATE effects SET attempt = %(attempt)s, takes_key = %(takes_key)s, started_at = clock_timestamp()
  FROM mine
 WHERE effects.job_id = mine.job_id AND name = %(name)s AND status = 'started' AND effects.attempt <= %(attempt)s
RETURNING 1
"""
FINISH = """
UPDATE effects SET status = 'finished', result = %(result)s::jsonb, finished_at = clock_timestamp()
 WHERE job_id = %(job_id)s AND name = %(name)s AND attempt = %(attempt)s
RETURNING 1
"""
WITHDRAW = """
DELETE FROM effects
 WHERE job_id = %(job_id)s AND name = %(name)s AND attempt = %(attempt)s AND status = 'started'
RETURNING 1
"""


class Answer(Enum):
    """What a check found out about a call."""

    DONE = "done"
    NOT_DONE = "not done"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Checked:
    """The other side's answer; `result` (JSON) is what the call would have returned, when it is done."""

    answer: Answer
    result: Any = None


# (name of the call, its idempotency key, the job's payload) -> what the other side knows.
Check = Callable[[str, str, Any], Checked]


@dataclass(frozen=True)
class Caller:
    """Who makes a call: the job's current attempt. `ledger` gives an open session in autocommit, anew after a loss.

    `risk_repeat`: a call that nobody can judge is made again all the same.
    """

    ledger: Callable[[], PgConnection]
    job_id: UUID
    attempt: int
    worker_id: UUID
    payload: Any
    check: Check | None
    risk_repeat: bool = False
    clock: LimitClock = NO_CLOCK

    def call(self, name: str, function: Callable[[str], Any], *, takes_key: bool) -> Any:
        """Make the external call `name` once; `function` gets its idempotency key, returns JSON or None.

        Raises LeaseLost when the attempt no longer owns the job, UncertainEffect when an earlier attempt started the
        call and nobody can tell what became of it.
        """
        values = {**self.values(name), "takes_key": takes_key}
        first = self.start(values)
        if not first:
            earlier = self.fetch(EARLIER, values)
            if earlier is None:
                raise self.lost(f"{name!r} was not called")
            status, result, by_attempt, ended = earlier
            if status == "finished":
                return result
            checked = self.ask(name, values["key"])
            if not may_go_on(checked, takes_key=takes_key or self.risk_repeat, ended=ended):
                raise UncertainEffect(
                    f"job {self.job_id}: attempt {by_attempt} started {name!r} and did not finish it, "
                    "and it is not known whether it took effect"
                )
            if self.fetch(AGAIN, values) is None:
                raise self.lost(f"another attempt took over {name!r}; it was not called")
            if checked.answer is Answer.DONE:
                return self.finish(name, checked.result)
        try:
            answer = function(values["key"])
        except Exception as error:
            if first and proves_nothing_happened(error):
                self.write(WITHDRAW, values)
            raise
        return self.finish(name, answer)

    def start(self, values: dict[str, Any]) -> bool:
        """Enter the call as started; False when an earlier attempt did. Raises DatabaseAway."""
        try:
            return self.fetch(START, values) is not None
        except DatabaseAway:
            # It may be entered all the same, and would look like a call that was made.
            self.write(WITHDRAW, values)
            raise

    def fetch(self, statement: str, values: dict[str, Any]) -> tuple[Any, ...] | None:
        """The first row of a ledger statement; raises DatabaseAway when the session broke."""
        connection = self.ledger()
        with noticing_outage(connection):
            return one(connection, statement, values)

    def ask(self, name: str, key: str) -> Checked:
        """The answer of the job type's check; unknown when it has none."""
        if self.check is None:
            return Checked(Answer.UNKNOWN)
        return self.check(name, key, self.payload)

    def finish(self, name: str, answer: Any) -> Any:
        """Record the result of the call and return it; raises UnrecoverableError when it is not JSON."""
        text, wrong = None, None
        try:
            text = None if answer is None else to_json(answer)
        except (TypeError, ValueError, RecursionError) as error:
            wrong = error
        if not self.write(FINISH, {**self.values(name), "result": text}):
            raise self.lost(f"{name!r} was called, but its result is not recorded")
        if wrong is not None:
            # The call is recorded as finished: a mistake in the handler must not make it a second time.
            raise UnrecoverableError(
                f"job {self.job_id}: {name!r} returned a {type(answer).__name__}, not JSON"
            ) from wrong
        return answer

    def write(self, statement: str, values: dict[str, Any]) -> bool:
        """Write what became of the call, however long the database is away; whether the row was still ours.

        The answer to a commit may be lost, so a statement gives the same row when it is repeated.
        """
        tries = 0
        while True:
            try:
                written = self.fetch(statement, values) is not None
            except DatabaseAway as error:
                self.clock.wait()
                if tries == 0:
                    log.warning(
                        "effect.held",
                        job_id=str(self.job_id),
                        error=type(error).__name__,
                        consequence="what became of the call is kept until the database is back",
                    )
                time.sleep(pause_s(tries))
                tries += 1
            else:
                self.clock.go_on()
                return written

    def values(self, name: str) -> dict[str, Any]:
        """The parameters that the statements share."""
        return {
            "job_id": str(self.job_id),
            "attempt": self.attempt,
            "worker_id": str(self.worker_id),
            "name": name,
            "seen": SEEN_DEAD,
            "key": f"{self.job_id}:{name}",
        }

    def lost(self, consequence: str) -> LeaseLost:
        """The error of an attempt that no longer owns the job."""
        return LeaseLost(f"job {self.job_id}: attempt {self.attempt} no longer owns the job; {consequence}")


def may_go_on(checked: Checked, *, takes_key: bool, ended: bool) -> bool:
    """Whether a call that an earlier attempt started may be closed as done, or made again."""
    match checked.answer:
        case Answer.DONE:
            return True
        case Answer.NOT_DONE:
            return takes_key or ended
        case Answer.UNKNOWN:
            return takes_key
