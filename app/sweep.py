"""expire: running -> queued | quarantined. Finds workers that are gone and frees their jobs.

What counts as proof, and what does not (H5, H6): a lease that is over decides alone. A missing session is a hint: a
PostgreSQL restart or a cut socket takes every session while every worker lives. It counts when the lock was registered
after the server's start and is missing on two looks at least `HINT_GAP_S` apart, or together with a redelivery, and
only for jobs that allow it (`expire_early`).

Mass brake: a sweep whose expired leases hold most of the running jobs is more likely a jump of the clock or an outage
than a mass death, so it waits one lease, on the local clock, and looks again.

Two sweepers at once are harmless: each arrow is guarded by state and owner.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from psycopg2.extensions import connection as PgConnection

from app.clock import boottime_s
from app.journal import log
from db.session import one, rows

HINT_GAP_S = 1.0
# What a worker's main process has seen itself: the ledger takes these for proof that an attempt can no longer act.
CHILD_DIED = "the child process died"
HARD_LIMIT = "the handler ran into its hard time limit"
PAGE = 500

LOCK_IS_MISSING = """
NOT EXISTS (
    SELECT FROM pg_locks held
     WHERE held.locktype = 'advisory' AND held.granted AND held.objsubid = 1
       AND held.database = (SELECT oid FROM pg_database WHERE datname = current_database())
       AND (held.classid::bigint << 32) | held.objid::bigint = workers.lock_key)
"""
SESSION_IS_GONE = f"NOT pooled AND locked_at > pg_postmaster_start_time() AND {LOCK_IS_MISSING}"
WORKERS = f"""
SELECT worker_id, lock_key, lease_until < clock_timestamp(), {SESSION_IS_GONE}, lost_cause,
       (SELECT count(*) FROM jobs WHERE jobs.worker_id = workers.worker_id AND state = 'running')
  FROM workers WHERE stopped_at IS NULL
"""
LOSE = """
UPDATE workers SET lost_at = clock_timestamp(), lost_cause = %(cause)s
 WHERE worker_id = %(worker_id)s AND lost_at IS NULL AND stopped_at IS NULL AND lock_key = %(lock_key)s
   AND (lease_until < clock_timestamp() OR %(cause)s = 'killed')
RETURNING 1
"""
# A frozen worker's open transaction would hold its rows for ever (H7): its sessions end with its lease.
TERMINATE = """
SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
 WHERE datname = current_database() AND application_name = 'deadsure job ' || %(worker_id)s
"""
CLOSE = """
UPDATE workers SET stopped_at = clock_timestamp()
 WHERE worker_id = %(worker_id)s AND lost_at IS NOT NULL AND stopped_at IS NULL
   AND NOT EXISTS (SELECT FROM jobs WHERE jobs.worker_id = workers.worker_id AND state = 'running')
"""
EXPIRE = """
WITH gone AS (
    SELECT job_id FROM jobs
     WHERE state = 'running' AND worker_id = %(worker_id)s AND {which}
     LIMIT {page} FOR NO KEY UPDATE SKIP LOCKED
), job AS (
    UPDATE jobs SET
        state = CASE WHEN cancel_requested THEN 'cancelled'
                     WHEN crashes + %(crash)s >= max_crashes OR stalls + %(stall)s >= max_stalls THEN 'quarantined'
                     ELSE 'queued' END::job_state,
        crashes = crashes + %(crash)s, stalls = stalls + %(stall)s, worker_id = NULL, child_pid = NULL,
        episode = episode + CASE WHEN NOT cancel_requested AND (crashes + %(crash)s >= max_crashes
                                      OR stalls + %(stall)s >= max_stalls) THEN 1 ELSE 0 END,
        not_before = NULL, cause = %(cause)s, reason = %(reason)s, changed_at = clock_timestamp(),
        finished_at = CASE WHEN cancel_requested THEN clock_timestamp() END
      FROM gone
     WHERE jobs.job_id = gone.job_id AND state = 'running' AND worker_id = %(worker_id)s
    RETURNING jobs.*
), debt AS (
    INSERT INTO outbox (job_id, queue, type, schema_version, priority, correlation_id, trace_context, episode)
    SELECT job_id, queue, type, schema_version, priority, correlation_id, trace_context, episode + 1
      FROM job WHERE state = 'queued'
    ON CONFLICT (job_id) DO UPDATE
       SET kind = 'wake', episode = excluded.episode, due_at = excluded.due_at, sends = 0, sent_at = NULL
), trace AS (
    INSERT INTO outbox (job_id, kind, queue, type, schema_version, priority, correlation_id, trace_context, episode)
    SELECT job_id, 'trace', queue, type, schema_version, priority, correlation_id, trace_context, episode
      FROM job WHERE state = 'quarantined'
    ON CONFLICT (job_id) DO UPDATE
       SET kind = 'trace', episode = excluded.episode, due_at = excluded.due_at, sends = 0, sent_at = NULL
), entry AS (
    INSERT INTO quarantine_entries (job_id, episode, cause, fingerprint, reason, attempt)
    SELECT job_id, episode, cause, cause, reason, attempt FROM job WHERE state = 'quarantined'
), journal AS (
    INSERT INTO job_events (job_id, event, attempt, worker_id, reason)
    SELECT job_id, word, attempt, %(worker_id)s, %(proof)s || ': ' || reason
      FROM job, unnest(CASE WHEN state = 'quarantined' THEN ARRAY['expire', 'quarantined'] ELSE ARRAY['expire'] END)
           WITH ORDINALITY AS words (word, place) ORDER BY job_id, place
)
SELECT job_id::text, state::text, type FROM job
"""
OF_WORKER = EXPIRE.format(which="(expire_early OR %(lease_over)s)", page=PAGE)
OF_CHILD = EXPIRE.format(which="job_id = %(job_id)s AND child_pid = %(pid)s", page=1)
OF_JOB = EXPIRE.format(which="job_id = %(job_id)s AND expire_early", page=1)
GONE_OWNER = f"""
SELECT worker_id FROM workers
 WHERE worker_id = (SELECT worker_id FROM jobs WHERE job_id = %(job_id)s AND state = 'running')
   AND {SESSION_IS_GONE}
"""
CAUSES = {
    "killed": ("killed_worker", "the worker process ended while the handler ran", 1, 0),
    "stalled": ("stalled", "the worker did not renew its lease while the handler ran", 0, 1),
}


Expired = tuple[str, str, str]  # type, cause (`killed` or `stalled`) and new state of a job


@dataclass(frozen=True)
class Swept:
    """What one look did: workers declared lost, those of them that only went silent, jobs expired.

    `jobs` names the expired ones.
    """

    lost: int = 0
    silent: int = 0
    expired: int = 0
    jobs: tuple[Expired, ...] = field(default=(), compare=False)


class Sweeper:
    """Looks for lost workers; remembers between looks what it has seen once."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._missing_since: dict[tuple[UUID, int], float] = {}
        self._brake_since: float | None = None

    def look(self, connection: PgConnection) -> Swept:
        """One sweep; raises psycopg2.Error when the database is away."""
        now = boottime_s()
        found = rows(connection, WORKERS)
        running = sum(row[5] for row in found)
        over = [row for row in found if row[2] and row[4] is None]
        braked = self._brake(now, over, running)
        missing: dict[tuple[UUID, int], float] = {}
        lost = silent = 0
        expired: list[Expired] = []
        for worker_id, lock_key, lease_over, gone, lost_cause, jobs in found:
            cause = lost_cause
            if cause is None and gone:
                seen = self._missing_since.get((worker_id, lock_key), now)
                missing[worker_id, lock_key] = seen
                cause = "killed" if now - seen >= HINT_GAP_S else None
            if cause is None and lease_over and not braked:
                cause = "killed" if gone else "stalled"
            if cause is None:
                continue
            if lost_cause is None:
                if not self._lose(connection, worker_id, lock_key, cause, jobs):
                    continue
                lost += 1
                silent += cause == "stalled"
            expired += self._expire(connection, worker_id, cause, lease_over)
        self._missing_since = missing
        return Swept(lost, silent, len(expired), tuple(expired))

    def _brake(self, now: float, over: list[tuple[Any, ...]], running: int) -> bool:
        threatened = sum(row[5] for row in over)
        if not over or threatened * 2 <= running:
            self._brake_since = None
            return False
        if self._brake_since is None:
            self._brake_since = now
            log.warning(
                "sweep.braked",
                jobs=threatened,
                running=running,
                consequence=f"most running jobs would expire at once; looking again in {self._lease_s:g} s",
            )
        return now - self._brake_since < self._lease_s

    def _lose(self, connection: PgConnection, worker_id: UUID, lock_key: int, cause: str, jobs: int) -> bool:
        values = {"worker_id": str(worker_id), "lock_key": lock_key, "cause": cause}
        if not one(connection, LOSE, values):
            return False
        log.warning("sweep.worker_lost", worker_id=str(worker_id), cause=cause, running_jobs=jobs)
        return True

    def _expire(self, connection: PgConnection, worker_id: UUID, cause: str, lease_over: bool) -> list[Expired]:
        values = {**expire_values(worker_id, cause), "lease_over": lease_over}
        # At every look until the worker is closed: the sweeper that declared it lost may have died before this.
        rows(connection, TERMINATE, values)
        total: list[Expired] = []
        while True:
            freed = rows(connection, OF_WORKER, values)
            for job_id, state, name in freed:
                total.append((name, cause, state))
                log.info("job.expired", job_id=job_id, state=state, cause=cause)
            if len(freed) < PAGE:
                break
        rows(connection, CLOSE, values)
        return total


def expire_values(worker_id: UUID, cause: str) -> dict[str, Any]:
    """Parameters of EXPIRE for `killed` (counts a crash) or `stalled` (counts a stall)."""
    code, reason, crash, stall = CAUSES[cause]
    return {
        "worker_id": str(worker_id),
        "cause": code,
        "proof": cause,
        "reason": reason,
        "crash": crash,
        "stall": stall,
    }


def expire_child(connection: PgConnection, job_id: UUID, worker_id: UUID, pid: int, reason: str) -> str | None:
    """Expire the job of a child that its main process has seen die; the new state, None when it had not claimed."""
    values = {**expire_values(worker_id, "killed"), "job_id": str(job_id), "pid": pid, "reason": reason}
    row = one(connection, OF_CHILD, values)
    return row[1] if row else None


def expire_redelivered(connection: PgConnection, job_id: UUID) -> bool:
    """Expire a running job whose message the broker gave back *and* whose owner's session is gone."""
    owner = one(connection, GONE_OWNER, {"job_id": str(job_id)})
    if owner is None:
        return False
    values = {**expire_values(owner[0], "killed"), "job_id": str(job_id)}
    return one(connection, OF_JOB, values) is not None
