"""The end of a batch: when its source is exhausted and all its children have ended, its completion job is submitted.

The race: the last two children finish in two transactions at the same moment, and each sees the other one unfinished.
So no child's transaction decides. A look that comes later does, in every worker and relay, about once a second: one
guarded UPDATE of the batch's row says whether it has ended, and the completion job is inserted in the same commit. Of
two looks at once the second waits for the row, and finds it finished.

That is safe because what it asks for stays true: an ended job never leaves its state, and an exhausted source gets no
further child. A quarantined child has not ended; `replay`, `settle` and `cancel` decide about it.

The look is cheap: a partial index holds the batches that may end, and (batch_id, state) answers "is one of its children
in an open state" without reading those that have ended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from uuid import UUID

import psycopg2
from psycopg2.extensions import connection as PgConnection

from app.clock import boottime_s
from app.errors import DeadsureError
from app.journal import log
from app.submit import CREATED, EXISTING, NOTIFY
from db.session import one, rows

PAGE = 200
SHARE_OF_TIME = 20  # looks take at most a twentieth of the time
FIRST = UUID(int=0)
OPEN_STATES = "('queued', 'running', 'retry_wait', 'quarantined')"
HAS_OPEN_CHILD = f"""(
    EXISTS (SELECT FROM jobs WHERE jobs.batch_id = batches.batch_id AND state IN {OPEN_STATES})
    OR EXISTS (SELECT FROM batch_shared_jobs shared JOIN jobs USING (job_id)
                WHERE shared.batch_id = batches.batch_id AND state IN {OPEN_STATES})
)"""
# Those that others pruned while this batch waited have left their state in a tombstone.
CHILD_STATES = """
    SELECT state::text FROM jobs WHERE batch_id = {batch_id}
     UNION ALL
    SELECT coalesce(jobs.state::text, old.state, 'gone')
      FROM batch_shared_jobs shared LEFT JOIN jobs USING (job_id)
      LEFT JOIN job_tombstones old ON old.job_id = shared.job_id
     WHERE shared.batch_id = {batch_id}
"""
# A planner that believes most children to be open would read the whole table for the first one, and find none.
BY_INDEX = "BEGIN; SET LOCAL enable_seqscan = off; SET LOCAL jit = off; "
LOOK = f"""
SELECT batch_id, NOT {HAS_OPEN_CHILD}
  FROM batches
 WHERE exhausted AND finished_at IS NULL AND cancelled_at IS NULL AND batch_id > %(after)s
 ORDER BY batch_id LIMIT {PAGE}
"""
FINISH = f"""
UPDATE batches SET finished_at = clock_timestamp(), final_counts = (
           SELECT coalesce(jsonb_object_agg(state, count), '{{}}')
             FROM (SELECT state, count(*) FROM ({CHILD_STATES.format(batch_id="batches.batch_id")}) child GROUP BY 1) n)
 WHERE batch_id = %(batch_id)s AND exhausted AND finished_at IS NULL AND cancelled_at IS NULL
   AND NOT {HAS_OPEN_CHILD}
RETURNING completion
"""


def complete(connection: PgConnection, batch_id: UUID) -> bool:
    """Finish the batch and submit its completion job if all has ended; whether this call was the one that did."""
    try:
        ended = one(connection, BY_INDEX + FINISH, {"batch_id": str(batch_id)})
        if ended is None:
            rows(connection, "ROLLBACK")
            return False
        if ended[0] is not None:
            submit_completion(connection, ended[0])
        rows(connection, f"COMMIT; {NOTIFY}")
    except BaseException:
        with suppress(psycopg2.Error):
            rows(connection, "ROLLBACK")
        raise
    log.info("batch.finished", batch_id=str(batch_id), completion=ended[0] is not None)
    return True


def submit_completion(connection: PgConnection, completion: Mapping[str, Any]) -> None:
    """Insert the completion job in the open transaction; raises DeadsureError when there is none afterwards."""
    # Written by the release of the coordinator: what a later one added to the INSERT is NULL.
    values = defaultdict(lambda: None, completion)
    if not rows(connection, CREATED, values) and not rows(connection, EXISTING, values):
        raise DeadsureError("what the batch has stored of its completion job makes no job")


class Completer:
    """Looks for batches that have ended; remembers how far it came, and how long a look took."""

    def __init__(self) -> None:
        self._after = FIRST
        self._next_look_at = 0.0

    def look(self, connection: PgConnection) -> list[UUID]:
        """Complete what has ended among the next `PAGE` batches that may end; raises psycopg2.Error."""
        began = boottime_s()
        if began < self._next_look_at:
            return []
        found = rows(connection, BY_INDEX + LOOK, {"after": str(self._after)})
        rows(connection, "COMMIT")
        self._after = UUID(str(found[-1][0])) if len(found) == PAGE else FIRST
        ended = [UUID(str(batch_id)) for batch_id, has_ended in found if has_ended]
        done = [batch_id for batch_id in ended if self._complete(connection, batch_id)]
        self._next_look_at = boottime_s() + (boottime_s() - began) * (SHARE_OF_TIME - 1)
        return done

    @staticmethod
    def _complete(connection: PgConnection, batch_id: UUID) -> bool:
        """One batch; what is wrong with it is told, and must not keep the others waiting."""
        try:
            return complete(connection, batch_id)
        except (psycopg2.OperationalError, psycopg2.InterfaceError):
            raise
        except Exception as error:  # noqa: BLE001
            log.error("batch.not_finished", batch_id=str(batch_id), error=type(error).__name__)
            return False
