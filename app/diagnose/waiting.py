"""Why a job that waits (queued or retry_wait) is not claimed. Each rule is named after its cause; the first one counts.

What stops every job of the queue comes before what is this job's own, and that before what is no fault at all.
"""

from __future__ import annotations

from app.diagnose.attempts import ALIKE, alike
from app.diagnose.facts import Facts, JobRow
from app.diagnose.words import Said, many, moment, span

RESENT = 3  # a message that was sent so often and never claimed is no queueing


def debt_missing(facts: Facts, job: JobRow) -> Said | None:
    """Nobody owes the job a message: a restored backup, or a hand in the tables."""
    if facts.debt is not None or facts.age_s(job.changed_at) < facts.slow_s:
        return None
    return Said(
        f"It is {job.state} without a debt in the outbox, so nobody will send its message. A sweeper mends this within "
        "five minutes, and a few seconds after it starts.",
        "deadsure relay",
    )


def waiting_expired(facts: Facts, job: JobRow) -> Said | None:
    """Too late to start."""
    if job.expires_at is None or facts.age_s(job.expires_at) < 0:
        return None
    return Said(
        f"It was to start before {moment(job.expires_at)} and did not; the next delivery cancels it as expired.",
        f"deadsure show {job.job_id}",
    )


def parked_unknown_version(facts: Facts, job: JobRow) -> Said | None:
    """Workers live, and none knows the type in this version."""
    if job.parked_at is None or facts.fleet.knowing or not facts.fleet.live:
        return None
    known = ", ".join(facts.fleet.versions) or "no version of it"
    left_s = facts.settings.park_grace_s - facts.age_s(job.parked_at)
    then = f"in {span(left_s)}" if left_s > 0 else "at the next delivery"
    return Said(
        f"Of {many(facts.fleet.consuming, 'live consumer')} of the queue {job.queue!r} none knows {job.versioned} "
        f"(live workers know {known}); parked since {moment(job.parked_at)}, quarantined as unknown_type {then}. Start "
        "a worker whose code knows it.",
        "deadsure doctor --pre-deploy",
    )


def unroutable(facts: Facts, job: JobRow) -> Said | None:
    """The broker found no queue for the message and gave it back."""
    debt = facts.debt
    if debt is None or debt.returned_at is None or not debt.sends:
        return None
    bound = "; the queue is there, its binding is not" if facts.broker and facts.broker.bound is False else ""
    return Said(
        f"The broker returned copy {debt.sends} {span(facts.age_s(debt.returned_at))} ago ({debt.returned_reason})"
        f"{bound}. A relay declares queue and binding anew and sends it again at {moment(debt.due_at)}.",
        "deadsure doctor",
    )


def broker_down(facts: Facts, job: JobRow) -> Said | None:
    """It needs the broker, and the broker does not answer."""
    if not facts.due or facts.broker is None or facts.broker.reachable:
        return None
    return Said(
        f"The broker of BROKER_URL cannot be used: {'; '.join(facts.broker.notes)}. The debt is safe in the database "
        "and is sent when the broker is back.",
        "deadsure doctor",
    )


def waiting_no_worker(facts: Facts, job: JobRow) -> Said | None:
    """Nobody could claim it."""
    if not facts.due or facts.fleet.live:
        return None
    return Said(
        f"No live worker holds a lease, so nothing is claimed; this job waits for {span(facts.age_s(job.changed_at))}.",
        f"celery -A tasks worker -Q {job.queue}",
    )


def waiting_no_consumer(facts: Facts, job: JobRow) -> Said | None:
    """Workers live, and none takes messages from this queue."""
    broker = facts.broker
    if not facts.due or broker is None or (broker.consumers != 0 and facts.fleet.consuming):
        return None
    missing = " The queue is not declared." if broker.exists is False else ""
    return Said(
        f"Live workers: {facts.fleet.live}, but none consumes the queue {job.queue!r} with its "
        f"{many(broker.ready or 0, 'message')}.{missing} Workers started with -Q take only the queues named.",
        f"celery -A tasks worker -Q {job.queue}",
    )


def consumers_take_nothing(facts: Facts, job: JobRow) -> Said | None:
    """Workers are connected and alive by their lease, and do not take messages."""
    if not facts.due or not facts.broker or not facts.untouched:
        return None
    return Said(
        f"The queue {job.queue!r} has {many(facts.broker.consumers or facts.fleet.consuming, 'consumer')} and "
        f"{many(facts.broker.ready or 0, 'message')}, and nothing runs: a worker is frozen, or holds its deliveries "
        "while it cannot reach the database.",
        "celery -A tasks inspect ping",
    )


def relay_stopped(facts: Facts, job: JobRow) -> Said | None:
    """The debt is due and no relay looks at the outbox."""
    relays, debt = facts.fleet.relays, facts.debt
    if not late(facts) or relays is None or relays[1] or debt is None:
        return None
    there = f"{many(relays[0], 'relay session')} stand still" if relays[0] else "no relay runs"
    ever = "was never sent" if not debt.sends else f"is to be sent again (copy {debt.sends + 1})"
    return Said(
        f"Its debt is due for {span(facts.overdue_s)} and {ever}: {there}. Workers run a relay unless they were "
        "started with --without-relay.",
        "deadsure relay",
    )


def waiting_behind_window(facts: Facts, job: JobRow) -> Said | None:
    """The relay keeps a bounded number of unclaimed messages in the broker; the rest waits in the database."""
    if not facts.due or facts.debt is None or facts.debt.sends or not facts.window_full:
        return None
    return Said(
        f"The window of queue {job.queue!r} ({facts.settings.window}) is full with "
        f"{many(facts.line.unpaid, 'unclaimed message')}, and {many(facts.line.ahead, 'due job')} stand before this "
        "one. It is sent when those are claimed: more workers make it sooner.",
        f"celery -A tasks worker -Q {job.queue}",
        wrong=False,
    )


def relay_not_sending(facts: Facts, job: JobRow) -> Said | None:
    """A relay is at work and this debt stays."""
    if not late(facts) or facts.debt is None:
        return None
    return Said(
        f"Its debt is due for {span(facts.overdue_s)}, and the relays at work do not send it: the broker refuses "
        f"(full queue, alarm, other arguments of the queue), no code at work routes a type to {job.queue!r}, or their "
        f"DEADSURE_WINDOW is smaller than here and full ({many(facts.line.unpaid, 'unclaimed message')}).",
        "deadsure doctor",
    )


def crashes_growing(facts: Facts, job: JobRow) -> Said | None:
    """Its handler ends worker processes, or hangs."""
    if job.crashes < ALIKE and job.stalls < ALIKE:
        return None
    count, limit, what = (
        (job.crashes, job.max_crashes, "ended its worker process")
        if job.crashes >= ALIKE
        else (job.stalls, job.max_stalls, "outlived its worker's lease")
    )
    return Said(
        f"{many(count, 'attempt')} {what} ({job.reason or 'no reason noted'}); at {limit} it is quarantined. Look at "
        "its memory, its time limit and what it calls.",
        f"deadsure show {job.job_id}",
    )


def failing_repeatedly(facts: Facts, job: JobRow) -> Said | None:
    """Attempt after attempt ends for the same reason."""
    count, reason = alike(facts.events)
    if count < ALIKE:
        return None
    when = f"; the next attempt is at {moment(job.not_before)}" if facts.age_s(job.not_before) < 0 else ""
    return Said(
        f"{many(count, 'attempt')} in a row failed for one reason ({reason}): {job.failures} of {job.max_failures} "
        f"failures are spent, then it is quarantined{when}.",
        f"deadsure show {job.job_id}",
    )


def waiting_not_before(facts: Facts, job: JobRow) -> Said | None:
    """Its time has not come."""
    debt_due = facts.debt.due_at if facts.debt and not facts.debt.sends else None
    until = max((at for at in (job.not_before, debt_due) if at is not None), default=None)
    if until is None or facts.age_s(until) >= 0:
        return None
    why = f"failed {job.failures} times and is tried again" if job.failures else "was submitted for later, and starts"
    return Said(
        f"It {why} at {moment(until)}, in {span(facts.age_s(until))}.", f"deadsure show {job.job_id}", wrong=False
    )


def waiting_backlog(facts: Facts, job: JobRow) -> Said | None:
    """Its message stands in the queue behind others."""
    if not facts.due or facts.debt is None or not facts.debt.sends or not (facts.broker and facts.broker.ready):
        return None
    return Said(
        f"Its message was sent {span(facts.age_s(facts.debt.sent_at))} ago and waits its turn: "
        f"{many(facts.broker.ready, 'message')} in the queue {job.queue!r}, {many(facts.line.running, 'job')} running.",
        f"celery -A tasks worker -Q {job.queue}",
        wrong=False,
    )


def waiting_in_worker(facts: Facts, job: JobRow) -> Said | None:
    """The message has left the queue and nobody has claimed the job."""
    debt = facts.debt
    if not facts.due or debt is None or not debt.sends or facts.broker is None or facts.broker.ready != 0:
        return None
    again = debt.sends >= RESENT
    lost = " It was sent again and again: look whether workers lose messages." if again else ""
    return Said(
        f"Copy {debt.sends} of its message was sent {span(facts.age_s(debt.sent_at))} ago and is in the queue no more: "
        f"a worker holds it behind its {many(facts.line.running, 'running job')} (prefetch), or it was lost; it is "
        f"sent again at {moment(debt.due_at)}.{lost}",
        "celery -A tasks inspect reserved",
        wrong=again,
    )


def waiting_for_delivery(facts: Facts, job: JobRow) -> Said | None:
    """Nothing stands in its way as far as can be seen."""
    return Said(
        f"Nothing stands in its way: {job.state} since {span(facts.age_s(job.changed_at))}, and about to be delivered.",
        f"deadsure diagnose {job.job_id}",
        wrong=False,
    )


def late(facts: Facts) -> bool:
    """Whether somebody should have sent the message by now: a first send, or one that is not in the queue any more."""
    debt = facts.debt
    if debt is None or not facts.due or facts.overdue_s <= facts.slow_s:
        return False
    return not debt.sends or not (facts.broker and facts.broker.ready)


RULES = (
    debt_missing,
    waiting_expired,
    unroutable,
    parked_unknown_version,
    broker_down,
    waiting_no_worker,
    waiting_behind_window,
    waiting_no_consumer,
    consumers_take_nothing,
    relay_stopped,
    relay_not_sending,
    crashes_growing,
    failing_repeatedly,
    waiting_not_before,
    waiting_backlog,
    waiting_in_worker,
    waiting_for_delivery,
)
