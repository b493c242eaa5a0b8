"""RabbitMQ's messages against the database's debts, and whether anybody takes them.

A queue cannot be read without consuming it, so messages are counted. A count proves a loss only when it covers what
workers hold (H1): the management API's total does, up to five seconds late; the number of ready messages does only
where there is neither a consumer nor a worker with a lease. First copies may share a message, later ones never do: so
fewer messages than second copies prove a loss, and no message at all proves the loss of every one.
"""

from __future__ import annotations

from collections.abc import Iterator

from app.checks.finding import Finding, error, lasted, ok, warning
from db.session import one
from tasks.checks.broker_look import BrokerLook, seen
from tasks.topology import QUARANTINE_QUEUE

SETTLED_S = 15.0  # what was sent longer ago is in every number that the broker gives
LIVE = """
SELECT count(*) FROM workers WHERE stopped_at IS NULL AND lost_at IS NULL AND lease_until > clock_timestamp()
"""
# A parked job's message was let go on purpose.
UNPAID = """
SELECT count(*), count(*) FILTER (WHERE sends > 1), extract(epoch FROM clock_timestamp() - min(sent_at)),
       min(outbox.job_id::text), extract(epoch FROM max(due_at) - clock_timestamp())
  FROM outbox JOIN jobs USING (job_id)
 WHERE outbox.queue = %(queue)s AND sends > 0 AND kind = 'wake' AND due_at < 'infinity' AND parked_at IS NULL
   AND sent_at < clock_timestamp() - make_interval(secs => %(settled_s)s)
"""
# A worker that died leaves the message of its job, whose debt was paid: one for each attempt at most.
COPIES = """
SELECT coalesce(sum(sends), 0) + (SELECT coalesce(sum(attempt), 0) FROM jobs
                                   WHERE queue = %(queue)s AND state IN ('queued', 'running', 'retry_wait')),
       count(*) FILTER (WHERE kind = 'wake' AND due_at <= clock_timestamp() OR sends > 0 AND due_at < 'infinity')
  FROM outbox WHERE queue = %(queue)s
"""


def lost_messages(look: BrokerLook) -> Iterator[Finding]:
    """Debts whose message the broker provably does not hold. They are sent again by themselves; nothing is repaired."""
    fine = True
    for name in look.work_queues:
        # The broker is asked first: a debt that is still unpaid afterwards had its message then, or had lost it.
        held = messages_held(look, name)
        if held is None or look.database is None:
            continue
        row = one(look.database, UNPAID, {"queue": name, "settled_s": SETTLED_S})
        count, again, age_s, sample, due_s = row or (0, 0, None, None, None)
        lost = again - held if held else count
        if lost > 0:
            fine = False
            yield warning(
                "messages.lost",
                f"{count} jobs of queue {name} were sent and not claimed, the broker holds {held} messages: at least "
                f"{lost} have none (the oldest was sent {lasted(age_s)} ago)",
                f"nothing: they are sent again within {lasted(due_s)} if a relay runs (deadsure diagnose {sample})",
            )
    if fine:
        yield ok("messages.lost", "no message is known to be lost")


def messages_held(look: BrokerLook, name: str) -> int | None:
    """At most how many messages the broker has for a queue, those that workers hold among them; None: not known."""
    there = look.queues[name]
    if there is None:
        return 0
    if look.management is not None:
        found = look.management.queue(name)
        total = found.get("messages")
        return None if total is None else max(total + found.get("messages_dlx", 0), there.ready)
    return there.ready if not there.consumers and not live_workers(look) else None


def messages_without_job(look: BrokerLook) -> Iterator[Finding]:
    """Messages that nobody takes and that no debt accounts for."""
    for name in look.work_queues:
        there = look.queues[name]
        if there is None or there.consumers or look.database is None:
            continue
        row = one(look.database, COPIES, {"queue": name})
        surplus = there.ready - int(row[0] if row else 0)
        if surplus > 0:
            yield warning(
                "messages.without_job",
                f"queue {name} holds {there.ready} messages, {surplus} more than this database has ever sent for jobs "
                "that still wait",
                "do two databases share this virtual host? plain Celery tasks, and copies of finished jobs, do no harm",
            )


def consumers(look: BrokerLook) -> Iterator[Finding]:
    """Queues with work and without anybody who takes it."""
    for name in look.work_queues:
        there = look.queues[name]
        if there is None or there.consumers or look.database is None:
            continue
        row = one(look.database, COPIES, {"queue": name})
        waiting = int(row[1] if row else 0)
        if waiting:
            live = live_workers(look)
            tell = error if live else warning
            yield tell(
                "queue.no_consumer",
                f"{waiting} jobs wait in queue {name} and nobody consumes it ({live} workers hold a lease)",
                f"celery -A tasks worker -Q {name}",
            )


def intake(look: BrokerLook) -> Iterator[Finding]:
    """Dead letters that nobody stores."""
    there = look.queues[QUARANTINE_QUEUE]
    if there is None:
        return
    if there.ready and not there.consumers:
        yield error(
            "quarantine.intake_dead",
            f"{there.ready} dead letters wait in the queue {QUARANTINE_QUEUE} and nobody takes them",
            "deadsure relay, or a worker without --without-relay",
        )
    elif not there.consumers and look.database is not None and live_workers(look):
        yield warning(
            "quarantine.no_intake",
            f"workers hold a lease, and nobody reads the queue {QUARANTINE_QUEUE}",
            "deadsure relay, or a worker without --without-relay; does it have another BROKER_URL?",
        )
    elif there.ready:
        again = seen(look.broker, QUARANTINE_QUEUE)
        if again is not None and again.ready >= there.ready:
            yield warning(
                "quarantine.intake_slow",
                f"{again.ready} dead letters wait in the queue {QUARANTINE_QUEUE} beside {again.consumers} readers",
                "look at the log of the intake for intake.interrupted; is the database slow?",
            )


def stuck_dead_letters(look: BrokerLook) -> Iterator[Finding]:
    """Rejected messages that the broker holds because their way into the quarantine is cut."""
    if look.management is None:
        return
    for name in look.work_queues:
        held = look.management.queue(name).get("messages_dlx", 0) if look.queues[name] is not None else 0
        if held:
            yield warning(
                "dlx.held",
                f"queue {name} holds {held} rejected messages that did not reach the queue {QUARANTINE_QUEUE}",
                "is it there and bound? RabbitMQ tries again every three minutes",
            )


def live_workers(look: BrokerLook) -> int:
    """Workers with a lease; 0 when the database is away."""
    row = one(look.database, LIVE) if look.database is not None else None
    return int(row[0]) if row else 0


CHECKS = (lost_messages, messages_without_job, consumers, intake, stuck_dead_letters)
