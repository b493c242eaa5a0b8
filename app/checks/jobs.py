"""Jobs against their debts: whoever waits has one, everybody else has none, and somebody pays them."""

from __future__ import annotations

import time
from collections.abc import Iterator

from app.checks.finding import Finding, Look, error, info, lasted, ok, warning
from db.session import Row, one, rows

FIX = "deadsure doctor --fix"
RELAY = "is a relay running? start a worker, or `deadsure relay`"
LOOK_AGAIN_S = 1.0
SENT_OFTEN = 3
FULL_WINDOW = 0.75  # from there on the relay waits before it sends more (app.outbox.TAKE)

STUCK = """
SELECT count(*), extract(epoch FROM clock_timestamp() - min(changed_at)), min(job_id::text) FROM jobs
 WHERE state IN ('queued', 'retry_wait') AND NOT EXISTS (SELECT FROM outbox WHERE outbox.job_id = jobs.job_id)
"""
MISPLACED = """
SELECT count(*) FILTER (WHERE state IS NULL), count(*) FILTER (WHERE state IS NOT NULL), min(outbox.job_id::text)
  FROM outbox LEFT JOIN jobs USING (job_id)
 WHERE state IS NULL OR state IN ('running', 'succeeded', 'cancelled') OR (kind = 'trace') <> (state = 'quarantined')
"""
UNSENT = """
SELECT queue, count(*), extract(epoch FROM clock_timestamp() - min(due_at)),
       (SELECT count(*) FROM outbox sent
         WHERE sent.queue = late.queue AND sends > 0 AND kind = 'wake' AND due_at < 'infinity')
  FROM outbox late
 WHERE sends = 0 AND kind = 'wake' AND due_at < clock_timestamp() - make_interval(secs => %(age_s)s)
 GROUP BY queue ORDER BY queue
"""
UNROUTABLE = """
SELECT count(*), min(returned_reason), extract(epoch FROM clock_timestamp() - min(returned_at))
  FROM outbox WHERE returned_at IS NOT NULL
"""
UNCLAIMED = """
SELECT count(*), extract(epoch FROM clock_timestamp() - min(outbox.created_at)), min(job_id::text),
       (SELECT count(*) FROM jobs WHERE state = 'running'),
       (SELECT count(*) FROM workers
         WHERE stopped_at IS NULL AND lost_at IS NULL AND lease_until > clock_timestamp())
  FROM outbox JOIN jobs USING (job_id)
 WHERE sends >= %(often)s AND kind = 'wake' AND due_at < 'infinity' AND parked_at IS NULL
"""
OVERLONG = """
SELECT count(*), min(job_id::text), extract(epoch FROM clock_timestamp() - min(jobs.changed_at)), min(jobs.type)
  FROM jobs JOIN workers USING (worker_id),
       unnest(%(types)s::text[], %(versions)s::int[], %(limits)s::float8[]) AS known (type, schema_version, limit_s)
 WHERE state = 'running' AND jobs.type = known.type AND jobs.schema_version = known.schema_version
   AND lost_at IS NULL AND stopped_at IS NULL AND lease_until > clock_timestamp()
   AND jobs.changed_at < clock_timestamp() - make_interval(secs => known.limit_s + %(grace_s)s)
"""
UNKNOWN_TYPES = """
SELECT type, schema_version, count(*) FROM jobs
 WHERE state IN ('queued', 'retry_wait', 'running')
 GROUP BY type, schema_version ORDER BY type, schema_version
"""


def known_types(look: Look) -> Iterator[Finding]:
    """Jobs that wait or run and that the installed code cannot handle: look before a deploy."""
    unknown = [row for row in rows(look.connection, UNKNOWN_TYPES) if (row[0], row[1]) not in look.types]
    for name, version, count in unknown:
        yield error(
            "jobs.unknown_type",
            f"{count} jobs of {name} version {version} wait, and this code does not know it",
            "deploy code that knows it beside this one, or let them finish first",
        )
    if not unknown:
        yield ok("jobs.unknown_type", "every waiting job is known to this code")


def stuck_jobs(look: Look) -> Iterator[Finding]:
    """Jobs that wait and that nobody would ever wake up. One snapshot: no arrow leaves such a job behind."""
    count, age_s, sample = first(look, STUCK)
    if count:
        yield error(
            "jobs.stuck",
            f"{count} jobs wait without a debt, for up to {lasted(age_s)}: nobody would wake them up (one is {sample})",
            FIX,
        )
    else:
        yield ok("jobs.stuck", "every waiting job has its debt")


def debts_of_nobody(look: Look) -> Iterator[Finding]:
    """Debts whose job is gone, has ended, or waits for something else."""
    orphans, misplaced, sample = first(look, MISPLACED)
    if orphans:
        yield error(
            "outbox.without_job", f"{orphans} debts belong to no job (one is {sample}); such a key stays taken", FIX
        )
    if misplaced:
        yield error(
            "outbox.misplaced",
            f"{misplaced} debts belong to jobs that wait for nothing of the kind (one is {sample})",
            f"{FIX} deletes those of finished jobs",
        )
    if not orphans and not misplaced:
        yield ok("outbox.without_job", "every debt has a job that waits for it")


def unsent_debts(look: Look) -> Iterator[Finding]:
    """Jobs that are due and were not sent: a backlog behind a full window, or nobody sends."""
    late = rows(look.connection, UNSENT, {"age_s": look.settings.resend_first_s})
    for queue, count, age_s, sent in late:
        what = f"{count} jobs of queue {queue} are due for up to {lasted(age_s)} and were not sent"
        if sent > FULL_WINDOW * look.settings.window:
            yield info("jobs.backlog", f"{what}: {sent} that are sent are not claimed yet", "more workers shorten it")
        else:
            yield warning("jobs.unsent", what, RELAY)
    if not late:
        yield ok("jobs.unsent", "what is due is sent")


def unroutable_debts(look: Look) -> Iterator[Finding]:
    """Messages for which the broker found no queue."""
    count, reason, age_s = first(look, UNROUTABLE)
    if count:
        yield error(
            "jobs.unroutable",
            f"the broker found no queue for the messages of {count} jobs, since {lasted(age_s)} ({reason})",
            "start a worker or `deadsure relay`: both declare the queue; may the user of BROKER_URL do that?",
        )


def unclaimed_jobs(look: Look) -> Iterator[Finding]:
    """Jobs that were sent again and again. Under a backlog that is so; with idle workers, none of them consumes."""
    count, age_s, sample, running, live = first(look, UNCLAIMED, often=SENT_OFTEN)
    if not count:
        return
    what = f"{count} jobs were sent {SENT_OFTEN} times or more and nobody has claimed them, for up to {lasted(age_s)}"
    if live and not running:
        time.sleep(LOOK_AGAIN_S)
        again, _, _, running, _ = first(look, UNCLAIMED, often=SENT_OFTEN)
        if again >= count and not running:
            yield warning(
                "workers.not_consuming",
                f"{what}; {live} workers hold a lease and run nothing: alive, but they do not consume",
                f"deadsure diagnose {sample}; then restart the workers (do they consume the queue? `-Q`)",
            )
            return
    yield info("jobs.unclaimed", f"{what}; {running} jobs run", f"deadsure diagnose {sample}")


def overlong_jobs(look: Look) -> Iterator[Finding]:
    """Jobs that run beyond the hard limit of their type beside a living owner: a pool that does not enforce it."""
    types = list(look.types.values())
    count, sample, age_s, name = first(
        look,
        OVERLONG,
        types=[known.name for known in types],
        versions=[known.version for known in types],
        limits=[known.time_limit_s for known in types],
        grace_s=look.settings.lease_s,
    )
    if count:
        yield warning(
            "jobs.overlong",
            f"{count} jobs run beyond the hard limit of their type, up to {lasted(age_s)} (one is {name} {sample})",
            f"deadsure diagnose {sample}; workers need the pool prefork, it alone enforces time_limit_s",
        )


def first(look: Look, sql: str, **values: object) -> Row:
    """The one row of an aggregate."""
    row = one(look.connection, sql, values or None)
    assert row is not None
    return row


CHECKS = (
    known_types,
    stuck_jobs,
    debts_of_nobody,
    unsent_debts,
    unroutable_debts,
    unclaimed_jobs,
    overlong_jobs,
)
