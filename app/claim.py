"""claim: queued | retry_wait (due) -> running. The gate before every effect.

The race: two deliveries of one job reach two workers at once, or one reaches a second worker while the first still
works. The claim is one guarded UPDATE behind `SKIP LOCKED`: one wins, the other sees why and acknowledges.

Two ways through the gate. `claim` commits the new attempt, so a crash of the handler is counted. `begin_atomic` only
locks the row: claim, effect and success share one commit. It is taken only when nothing can have started before:
attempt = 0, crashes = 0, not redelivered by a broker whose flag can be trusted, copy 1 of a debt with `sends` = 1,
never in quarantine: a replay's debt has a first copy too, and one of the debt before it may still be about.
A worker whose lease is over can claim nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any
from uuid import UUID

from psycopg2.extensions import connection as PgConnection

from app.states import TERMINAL, State
from db.prepared import Plans
from db.session import one, rows

JOB_PLANS = Plans("job")
CLAIM = JOB_PLANS.statement(
    "claim",
    """
WITH owner AS (
    SELECT worker_id FROM workers
     WHERE worker_id = %(worker_id)s AND lost_at IS NULL AND stopped_at IS NULL AND lease_until > clock_timestamp()
), candidate AS (
    SELECT job_id, greatest(changed_at, not_before) AS ready_at FROM jobs
     WHERE job_id = %(job_id)s AND state::text IN ('queued', 'retry_wait')
       AND (not_before IS NULL OR not_before <= clock_timestamp())
       AND (expires_at IS NULL OR expires_at > clock_timestamp())
       FOR NO KEY UPDATE SKIP LOCKED
), job AS (
    UPDATE jobs SET state = 'running', attempt = attempt + 1, worker_id = owner.worker_id, child_pid = %(pid)s,
                    parked_at = NULL, changed_at = clock_timestamp()
      FROM candidate, owner
     WHERE jobs.job_id = candidate.job_id AND state::text IN ('queued', 'retry_wait')
    RETURNING jobs.*, ready_at
), paid AS (
    DELETE FROM outbox USING job WHERE outbox.job_id = job.job_id
), journal AS (
    INSERT INTO job_events (job_id, event, attempt, copy, delivery_tag, redelivered, worker_id)
    SELECT job_id, word, attempt, %(copy)s, %(delivery_tag)s, %(redelivered)s, worker_id
      FROM job, (VALUES (1, 'received'), (2, 'claim')) AS words (place, word) ORDER BY place
)
SELECT attempt, payload, type, schema_version, failures, max_failures, correlation_id, checkpoint,
       extract(epoch FROM clock_timestamp() - coalesce(replayed_at, created_at))::float8, last_delay_s, trace_context,
       extract(epoch FROM clock_timestamp() - ready_at)::float8
  FROM job
""",
    job_id="uuid",
    worker_id="uuid",
    pid="int",
    copy="bigint",
    delivery_tag="text",
    redelivered="boolean",
)
# By the keys alone, whatever the statistics say: as text, `state` fits no index that has all open jobs in it, and a
# join with the outbox could begin with all that was sent.
# The lock comes before the savepoint of the handler's first statement, or rolling back to it would give the row away
# (H13). A row that changed between the look and the lock is checked again by PostgreSQL, another copy's claim included.
HOLD = JOB_PLANS.statement(
    "hold",
    """
SELECT job_id::text, attempt + 1, payload, type, schema_version, failures, max_failures, correlation_id, checkpoint,
       extract(epoch FROM clock_timestamp() - created_at)::float8, last_delay_s, trace_context,
       extract(epoch FROM clock_timestamp() - greatest(changed_at, not_before))::float8
  FROM jobs
 WHERE job_id = ANY (%(job_ids)s::uuid[]) AND state::text = 'queued' AND attempt = 0 AND crashes = 0 AND episode = 0
   AND (not_before IS NULL OR not_before <= clock_timestamp())
   AND (expires_at IS NULL OR expires_at > clock_timestamp())
   AND (SELECT sends FROM outbox WHERE outbox.job_id = jobs.job_id) = 1
   AND EXISTS (SELECT FROM workers WHERE worker_id = %(worker_id)s AND lost_at IS NULL AND stopped_at IS NULL
                  AND lease_until > clock_timestamp())
   FOR NO KEY UPDATE OF jobs SKIP LOCKED
""",
    job_ids="text[]",
    worker_id="uuid",
)
BEGIN_ATOMIC = JOB_PLANS.message("BEGIN; {hold}", hold=HOLD)
LOOK = """
SELECT jobs.state::text, coalesce(not_before > clock_timestamp(), false),
       episode = %(episode)s AND EXISTS (
           SELECT FROM outbox debt WHERE debt.job_id = jobs.job_id AND kind = 'trace' AND debt.episode = jobs.episode),
       EXISTS (SELECT FROM workers WHERE worker_id = %(worker_id)s AND lost_at IS NULL AND stopped_at IS NULL
                  AND lease_until > clock_timestamp()),
       coalesce(expires_at <= clock_timestamp(), false)
  FROM jobs WHERE jobs.job_id = %(job_id)s
"""
PRUNED = "SELECT 1 FROM job_tombstones WHERE job_id = %(job_id)s"
RECEIVED = """
INSERT INTO job_events (job_id, event, copy, delivery_tag, redelivered, worker_id, reason)
VALUES (%(job_id)s, 'received', %(copy)s, %(delivery_tag)s, %(redelivered)s, %(worker_id)s, %(reason)s)
"""


class Refusal(Enum):
    """Why a delivery found no work; the value is the reason that the journal and the log give."""

    FINISHED = "already finished"
    OWNED = "owned by a live worker"
    EXPIRED = "expired before it could start"
    NOT_DUE = "not due yet"
    LOCKED = "locked by another transaction"
    QUARANTINED = "quarantined, its dead letter is still to come"
    QUARANTINED_TRACED = "quarantined"
    NO_LEASE = "this worker has no lease"
    UNKNOWN = "no such job"


@dataclass(frozen=True, slots=True)
class Delivery:
    """One delivery of one copy. `redelivered_known` is False on brokers whose flag cannot be trusted.

    `episode`: the quarantine that this message's dead letter would belong to.
    """

    job_id: UUID
    copy: int
    episode: int
    delivery_tag: str | None
    redelivered: bool
    redelivered_known: bool


@dataclass(frozen=True, slots=True)
class Claimed:
    """A won claim: with `job_id`, `attempt` is the fencing token of every later write.

    `waited_s`: from the moment the job could be started to this claim.
    """

    committed: bool
    job_id: UUID
    attempt: int
    payload: dict[str, Any]
    type: str
    version: int
    failures: int
    max_failures: int
    correlation_id: str
    checkpoint: Any
    age_s: float
    last_delay_s: float | None
    trace_context: str | None
    waited_s: float


def parameters(delivery: Delivery, worker_id: UUID, pid: int) -> dict[str, Any]:
    """The parameters that CLAIM, LOOK and RECEIVED share."""
    return {
        "job_id": str(delivery.job_id),
        "worker_id": str(worker_id),
        "pid": pid,
        "copy": delivery.copy,
        "episode": delivery.episode,
        "delivery_tag": delivery.delivery_tag,
        "redelivered": delivery.redelivered,
    }


def claim(connection: PgConnection, delivery: Delivery, worker_id: UUID, pid: int) -> Claimed | None:
    """Commit a new attempt of the job for this worker; None when somebody or something stands in the way."""
    row = one(connection, CLAIM, parameters(delivery, worker_id, pid))
    return Claimed(True, delivery.job_id, *row) if row else None


def may_begin_atomic(delivery: Delivery) -> bool:
    """Whether this delivery can be the first start of its job, as far as the message tells (H3)."""
    return delivery.copy == 1 and delivery.redelivered_known and not delivery.redelivered


def begin_atomic(connection: PgConnection, delivery: Delivery, worker_id: UUID) -> Claimed | None:
    """Lock the row and leave the transaction open; None (and no transaction) when it cannot be had."""
    held = begin_atomic_all(connection, [delivery], worker_id)
    return held.get(delivery.job_id)


def begin_atomic_all(connection: PgConnection, deliveries: Sequence[Delivery], worker_id: UUID) -> dict[UUID, Claimed]:
    """Lock the rows that can be had and leave the transaction open; none (and no transaction) when there are none."""
    values = {"job_ids": [str(delivery.job_id) for delivery in deliveries], "worker_id": str(worker_id)}
    found = [Claimed(False, UUID(job_id), *rest) for job_id, *rest in rows(connection, BEGIN_ATOMIC, values)]
    if not found:
        rows(connection, "ROLLBACK")
    return {claimed.job_id: claimed for claimed in found}


def look(connection: PgConnection, delivery: Delivery, worker_id: UUID) -> Refusal:  # noqa: PLR0911  # one per reason
    """Why the claim gave nothing. LOCKED also covers a job that became free meanwhile: try again."""
    row = one(connection, LOOK, parameters(delivery, worker_id, 0))
    if row is None:
        # A late copy of a job that ended and was pruned since is acknowledged, like any other late copy.
        pruned = one(connection, PRUNED, parameters(delivery, worker_id, 0))
        return Refusal.UNKNOWN if pruned is None else Refusal.FINISHED
    state, early, untraced, lease, expired = row
    if state in TERMINAL:
        return Refusal.FINISHED
    if state == State.QUARANTINED:
        return Refusal.QUARANTINED if untraced else Refusal.QUARANTINED_TRACED
    if state == State.RUNNING:
        return Refusal.OWNED
    if expired:
        return Refusal.EXPIRED
    if early:
        return Refusal.NOT_DUE
    return Refusal.LOCKED if lease else Refusal.NO_LEASE


def received(connection: PgConnection, delivery: Delivery, worker_id: UUID, refusal: Refusal) -> None:
    """Journal a delivery that found no work, and why."""
    one(
        connection,
        RECEIVED,
        {**parameters(delivery, worker_id, 0), "reason": refusal.value},
    )
