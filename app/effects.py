"""The ledger of external calls: one row for each, with an idempotency key of its own.

The race: a worker makes the call and dies before it can say so; the next attempt must not make it a second time
blindly. The row is `started` before the call, under the current attempt only, and `finished` with its result after.
A rerun returns the result of a finished call. A started one may have happened: it is repeated only with the same
idempotency key, which the other side honours; without one nobody knows, and the job is quarantined as uncertain.
"""

from __future__ import annotations

import json
from collections.abc import Callable
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
SELECT status, effects.result, effects.attempt FROM effects JOIN jobs USING (job_id)
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


def call(
    connection: PgConnection,
    job_id: UUID,
    attempt: int,
    worker_id: UUID,
    name: str,
    function: Callable[[str], Any],
    takes_key: bool,
) -> Any:
    """Make the external call `name` of this job once; `function` gets its idempotency key, returns JSON or None.

    Raises LeaseLost when the attempt no longer owns the job, UncertainEffect when an earlier attempt started the call
    and the other side takes no key.
    """
    key = f"{job_id}:{name}"
    values: dict[str, Any] = {
        "job_id": str(job_id),
        "attempt": attempt,
        "worker_id": str(worker_id),
        "name": name,
        "key": key,
    }
    if one(connection, START, values) is None:
        earlier = one(connection, EARLIER, values)
        if earlier is None:
            raise LeaseLost(f"job {job_id}: attempt {attempt} no longer owns the job; {name!r} was not called")
        status, result, by_attempt = earlier
        if status == "finished":
            return result
        if not takes_key:
            raise UncertainEffect(
                f"job {job_id}: attempt {by_attempt} started {name!r} and did not finish it; "
                "the other side takes no idempotency key, so it is not repeated"
            )
        if one(connection, AGAIN, values) is None:
            raise LeaseLost(f"job {job_id}: another attempt took over {name!r}; it was not called")
    answer = function(key)
    values["result"] = None if answer is None else json.dumps(answer)
    if one(connection, FINISH, values) is None:
        raise LeaseLost(f"job {job_id}: {name!r} was called, but attempt {attempt} no longer owns the job")
    return answer
