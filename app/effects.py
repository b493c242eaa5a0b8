"""The ledger of external calls: one row for each, with an idempotency key of its own.

The race: a worker makes the call and dies before it can say so; the next attempt must not make it a second time
blindly. The row is `started` before the call, under the current attempt only, and `finished` with its result after.
A rerun returns the result of a finished call. A started one may have happened:

    the job type has a check  -> ask: done closes the row, not done repeats the call
    the other side takes keys -> repeat with the same key, which the other side honours
    neither, or no answer     -> UncertainEffect; the job type's `on_uncertain` decides

"Not done" without a key is believed only when the earlier attempt can no longer act (H11): a frozen process that wakes
up later would make its call after the answer was given.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any
from uuid import UUID

from psycopg2.extensions import connection as PgConnection

from app.errors import LeaseLost, UncertainEffect
from db.session import one

START = """
INSERT INTO effects (job_id, name, attempt, idempotency_key)
SELECT job_id, %(name)s, attempt, %(key)s FROM jobs
 WHERE job_id = %(job_id)s AND state = 'running' AND attempt = %(attempt)s AND worker_id = %(worker_id)s
ON CONFLICT (job_id, name) DO NOTHING
RETURNING 1
"""
EARLIER = """
SELECT status, effects.result, effects.attempt,
       EXISTS (SELECT FROM job_events ended
                WHERE ended.job_id = effects.job_id AND ended.attempt = effects.attempt
                  AND (event IN ('retry', 'quarantine', 'release') OR event = 'expire' AND reason LIKE 'killed:%%'))
  FROM effects JOIN jobs USING (job_id)
 WHERE job_id = %(job_id)s AND name = %(name)s
   AND state = 'running' AND jobs.attempt = %(attempt)s AND worker_id = %(worker_id)s
"""
AGAIN = """
UPDATE effects SET attempt = %(attempt)s, started_at = clock_timestamp()
 WHERE job_id = %(job_id)s AND name = %(name)s AND status = 'started' AND attempt <= %(attempt)s
RETURNING 1
"""
FINISH = """
UPDATE effects SET status = 'finished', result = %(result)s::jsonb, finished_at = clock_timestamp()
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
    """Who makes a call: the job's current attempt."""

    connection: PgConnection
    job_id: UUID
    attempt: int
    worker_id: UUID
    payload: Any
    check: Check | None

    def call(self, name: str, function: Callable[[str], Any], *, takes_key: bool) -> Any:
        """Make the external call `name` once; `function` gets its idempotency key, returns JSON or None.

        Raises LeaseLost when the attempt no longer owns the job, UncertainEffect when an earlier attempt started the
        call and nobody can tell what became of it.
        """
        values = self.values(name)
        if one(self.connection, START, values) is None:
            earlier = one(self.connection, EARLIER, values)
            if earlier is None:
                raise self.lost(f"{name!r} was not called")
            status, result, by_attempt, ended = earlier
            if status == "finished":
                return result
            checked = self.ask(name, values["key"])
            if not may_go_on(checked, takes_key=takes_key, ended=ended):
                raise UncertainEffect(
                    f"job {self.job_id}: attempt {by_attempt} started {name!r} and did not finish it, "
                    "and it is not known whether it took effect"
                )
            if one(self.connection, AGAIN, values) is None:
                raise self.lost(f"another attempt took over {name!r}; it was not called")
            if checked.answer is Answer.DONE:
                return self.finish(name, checked.result)
        return self.finish(name, function(values["key"]))

    def ask(self, name: str, key: str) -> Checked:
        """The answer of the job type's check; unknown when it has none."""
        if self.check is None:
            return Checked(Answer.UNKNOWN)
        return self.check(name, key, self.payload)

    def finish(self, name: str, answer: Any) -> Any:
        """Record the result of the call and return it."""
        values = {**self.values(name), "result": None if answer is None else json.dumps(answer)}
        if one(self.connection, FINISH, values) is None:
            raise self.lost(f"{name!r} was called, but its result is not recorded")
        return answer

    def values(self, name: str) -> dict[str, Any]:
        """The parameters that the statements share."""
        return {
            "job_id": str(self.job_id),
            "attempt": self.attempt,
            "worker_id": str(self.worker_id),
            "name": name,
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
