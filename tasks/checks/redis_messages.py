"""Redis/Valkey's messages against the debts. Here every message can be seen, so a loss is no guess."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from uuid import UUID

from app.checks.finding import Finding, error, lasted, ok, warning
from db.session import Row, rows
from tasks.checks.redis_look import RedisLook
from tasks.headers import COPY
from tasks.topology import QUARANTINE_QUEUE

SETTLED_S = 5.0
LOOK_AGAIN_S = 1.0
SENT = """
SELECT outbox.job_id::text, extract(epoch FROM clock_timestamp() - sent_at),
       extract(epoch FROM due_at - clock_timestamp()), sends
  FROM outbox JOIN jobs USING (job_id)
 WHERE outbox.queue = %(queue)s AND sends > 0 AND kind = 'wake' AND due_at < 'infinity' AND parked_at IS NULL
   AND sent_at < clock_timestamp() - make_interval(secs => %(settled_s)s)
"""
KNOWN = "SELECT job_id::text FROM jobs WHERE job_id = ANY (%(job_ids)s::uuid[])"


def messages(look: RedisLook) -> Iterator[Finding]:
    """Messages without a job; jobs without a message, seen twice: one is in nobody's list while it changes hands."""
    if look.database is None:
        return
    for name in look.work_queues:
        held = held_jobs(look, name)
        known = {UUID(row[0]) for row in rows(look.database, KNOWN, {"job_ids": [str(job_id) for job_id in held]})}
        if held - known:
            yield warning(
                "messages.without_job",
                f"{len(held - known)} messages in queue {name} name jobs that this database does not know",
                "do two databases share this database number of the broker?",
            )
        yield from lost_messages(look, name)


def lost_messages(look: RedisLook, name: str) -> Iterator[Finding]:
    """Debts that were sent and whose message is nowhere. First copies may share one that names only one of them."""
    values = {"queue": name, "settled_s": SETTLED_S}

    def without_message() -> list[Row]:
        assert look.database is not None
        held = {str(job_id) for job_id in held_jobs(look, name)}
        return [row for row in rows(look.database, SENT, values) if row[0] not in held and (row[3] > 1 or not held)]

    suspects = {row[0] for row in without_message()}
    if suspects:
        time.sleep(LOOK_AGAIN_S)
        gone = [row for row in without_message() if row[0] in suspects]
        if gone:
            yield warning(
                "messages.lost",
                f"{len(gone)} jobs of queue {name} were sent and not claimed, and the broker has no message for them "
                f"(the oldest was sent {lasted(max(row[1] for row in gone))} ago)",
                f"nothing: they are sent again within {lasted(max(row[2] for row in gone))} if a relay runs "
                f"(deadsure diagnose {gone[0][0]})",
            )
            return
    yield ok("messages.lost", f"every job of queue {name} that was sent has its message")


def held_jobs(look: RedisLook, queue: str) -> set[UUID]:
    """Jobs with a message in the queue, or in the hands of a worker."""
    channel = look.channel
    entries: list[Any] = []
    # kombu keeps one list for each priority step and names it by this method alone.
    for step in channel.priority_steps:
        entries += channel.client.lrange(channel._q_for_pri(queue, step), 0, -1)  # noqa: SLF001
    unacknowledged = []
    for entry in channel.client.hvals(channel.unacked_key):
        with suppress(ValueError, IndexError, TypeError):
            unacknowledged.append(json.loads(entry)[0])
    found = set()
    for entry in [*(loaded(entry) for entry in entries), *unacknowledged]:
        with suppress(ValueError, KeyError, TypeError):
            if COPY in entry["headers"]:  # a wake-up call of ours; plain Celery tasks share the queue
                found.add(UUID(entry["headers"]["id"]))
    return found


def loaded(entry: Any) -> Any:
    """A message as JSON; None when it is none."""
    try:
        return json.loads(entry)
    except (ValueError, RecursionError):
        return None


def intake(look: RedisLook) -> Iterator[Finding]:
    """Dead letters that nobody stores, seen twice."""
    depth = int(look.channel.client.llen(QUARANTINE_QUEUE))
    if not depth:
        return
    time.sleep(LOOK_AGAIN_S)
    again = int(look.channel.client.llen(QUARANTINE_QUEUE))
    if again >= depth:
        yield error(
            "quarantine.intake_dead",
            f"{again} dead letters wait in the queue {QUARANTINE_QUEUE} and nobody takes them",
            "deadsure relay, or a worker without --without-relay",
        )


CHECKS = (messages, intake)
