"""replay: quarantined -> queued. A decision about one quarantine: it is made once, and it creates a debt.

The race: two operators, a double click, or a replay beside a cancel. The UPDATE's guard names the quarantine (job and
episode) that the decision was about; whoever comes second finds another state or a later episode and writes nothing.
A unique index on the recorded decision says the same again.

Counters never fall: a fresh budget is a higher limit. The debt is the job's one outbox row, so it takes the place of
a trace that was still owed; dead letters and deliveries of the old episode match neither the debt nor the job.

With another payload (H11) the decision rests on a ledger without any call that may have happened. A call is entered
under a lock on the running job, so none can be entered after this arrow has looked: `ledger` is compared in the guard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from psycopg2.extensions import connection as PgConnection

from app.candidate import LEDGER, Candidate
from app.edit import Edited
from app.job_types import JobType
from app.json_text import to_json
from db.session import one

REPLAY = f"""
WITH job AS (
    UPDATE jobs SET state = 'queued', not_before = NULL, last_delay_s = NULL, parked_at = NULL,
                    cancel_requested = false,
                    max_failures = greatest(max_failures, failures + %(max_failures)s),
                    max_crashes = greatest(max_crashes, crashes + %(max_crashes)s),
                    max_stalls = greatest(max_stalls, stalls + %(max_stalls)s),
                    payload = coalesce(%(payload)s::jsonb, payload),
                    payload_digest = coalesce(decode(%(digest)s, 'hex'), payload_digest),
                    replayed_at = clock_timestamp(), changed_at = clock_timestamp()
     WHERE job_id = %(job_id)s AND state = 'quarantined' AND episode = %(episode)s
       AND (expires_at IS NULL OR expires_at > clock_timestamp())
       AND %(ledger)s = {LEDGER}
    RETURNING jobs.*
), closed AS (
    UPDATE quarantine_entries entry SET closed_at = clock_timestamp()
      FROM job WHERE entry.job_id = job.job_id AND entry.episode = job.episode
    RETURNING entry.job_id
), debt AS (
    INSERT INTO outbox (job_id, queue, type, schema_version, priority, correlation_id, trace_context, episode)
    SELECT job_id, queue, type, schema_version, priority, correlation_id, trace_context, job.episode + 1
      FROM job LEFT JOIN closed USING (job_id)
    ON CONFLICT (job_id) DO UPDATE
       SET kind = 'wake', episode = excluded.episode, due_at = excluded.due_at, sends = 0, sent_at = NULL,
           returned_at = NULL, returned_reason = NULL
), forgotten AS (
    DELETE FROM effects USING job
     WHERE effects.job_id = job.job_id AND status = 'started' AND name = ANY (%(forget)s)
), action AS (
    INSERT INTO quarantine_actions (job_id, episode, action, author, reason, old_payload, new_payload, accepted, run_id)
    SELECT job_id, episode, 'replay', %(author)s, %(reason)s, %(old)s::jsonb, %(payload)s::jsonb,
           to_jsonb(nullif(%(forget)s::text[], '{{}}')), %(run_id)s::uuid
      FROM job
), ran AS (
    UPDATE replay_run_jobs SET outcome = 'replayed', stage = %(stage)s
      FROM job WHERE run_id = %(run_id)s::uuid AND replay_run_jobs.job_id = job.job_id AND outcome IS NULL
), journal AS (
    INSERT INTO job_events (job_id, event, attempt, reason) SELECT job_id, 'replay', attempt, %(note)s FROM job
)
SELECT EXISTS (SELECT FROM job)
"""


@dataclass(frozen=True)
class Decider:
    """Who decides, and why; `run_id` and `stage` when it is part of a replay run."""

    author: str
    reason: str
    run_id: UUID | None = None
    stage: int | None = None


def replay(
    connection: PgConnection,
    job_type: JobType,
    candidate: Candidate,
    decider: Decider,
    edited: Edited | None = None,
    forget: Sequence[str] = (),
) -> bool:
    """Put the job back into its queue; False when somebody else decided or the ledger changed: nothing was written.

    `forget`: started calls of which nobody knows whether they took effect, and that may be made again.
    """
    note = f"{decider.author}: {decider.reason}"
    if forget:
        note += f"; accepted that it may be done already: {', '.join(forget)}"
    if edited is not None:
        note += "; with another payload"
    values = {
        "job_id": str(candidate.job_id),
        "episode": candidate.episode,
        "ledger": candidate.ledger,
        "max_failures": job_type.retry.limit,
        "max_crashes": job_type.max_crashes,
        "max_stalls": job_type.max_stalls,
        "payload": edited.text if edited else None,
        "digest": edited.digest if edited else None,
        "old": to_json(edited.old) if edited else None,
        "forget": list(forget),
        "author": decider.author,
        "reason": decider.reason,
        "run_id": str(decider.run_id) if decider.run_id else None,
        "stage": decider.stage,
        "note": note,
    }
    row = one(connection, REPLAY, values)
    return bool(row and row[0])
