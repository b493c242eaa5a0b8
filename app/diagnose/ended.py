"""What is to be said of a job that has ended, and of an id that is no job. The first rule counts."""

from __future__ import annotations

from app.diagnose.attempts import acknowledged, later_deliveries, taken_over, winner
from app.diagnose.facts import Facts, JobRow
from app.diagnose.words import Said, many, moment, span

ACK_S = 1.0  # the journal's notes are written behind the acknowledgement


def batch_waits_for_children(facts: Facts, job: JobRow) -> Said | None:
    """A coordinator that has done its part, and whose batch has not ended."""
    batch = facts.batch
    if batch is None or batch.coordinator_id != job.job_id or not batch.open:
        return None
    ended = sum(batch.states.get(state, 0) for state in ("succeeded", "cancelled"))
    stuck = batch.states.get("quarantined", 0)
    blocked = f"; {stuck} are quarantined and block it, {batch.blocking[0]} among them" if batch.blocking else ""
    return Said(
        f"The coordinator has succeeded; its batch {batch.batch_id} waits for its children: {ended} of "
        f"{sum(batch.states.values())} have ended{blocked}.",
        f"deadsure batch show {batch.batch_id}",
        wrong=bool(stuck),
    )


def succeeded_not_acked(facts: Facts, job: JobRow) -> Said | None:
    """Result, but no acknowledgement: the message comes back, the effect does not."""
    end = winner(facts.events)
    if end is None or end.delivery_tag is None or facts.age_s(end.at) < ACK_S:
        return None
    if acknowledged(facts.events, end) or later_deliveries(facts.events, end):
        return None
    gone = facts.owner_gone
    holder = "its worker is gone, so the broker gives it out again" if gone else "its worker may still hold it"
    if facts.broker and facts.broker.ready == 0 == facts.broker.unacknowledged:
        holder = "the broker holds no message any more, so only the note was lost"
    return Said(
        f"It succeeded at {moment(end.at)} and its effect stands ({job.result_key}); the journal has no "
        f"acknowledgement of copy {end.copy}, delivery {end.delivery_tag}: {holder}. Whoever gets it finds "
        "`succeeded`, acknowledges, and runs nothing.",
        f"deadsure show {job.job_id}",
        wrong=False,
    )


def two_attempts_one_effect(facts: Facts, job: JobRow) -> Said | None:
    """An attempt was taken over, and may have written beside the one that counts."""
    end, lost = winner(facts.events), taken_over(facts.events)
    if end is None or not lost:
        return None
    numbers = ", ".join(str(one.number) for one in lost)
    return Said(
        f"Attempt {end.attempt} counts: its result ({job.result_key}) was committed at {moment(end.at)} under its "
        f"fencing token. Attempt {numbers} began too and was taken over ({lost[-1].reason}); its transaction was "
        "rolled back and later writes are refused, so a temporary file or a second copy of it is no business effect.",
        f"deadsure show {job.job_id}",
        wrong=False,
    )


def succeeded_redelivered(facts: Facts, job: JobRow) -> Said | None:
    """The message came again after the end, and nothing ran."""
    end = winner(facts.events)
    later = later_deliveries(facts.events, end) if end else []
    if not later:
        return None
    return Said(
        f"It succeeded once ({job.result_key}); its message came {many(len(later), 'time')} more, found `succeeded` "
        "and was acknowledged without running.",
        f"deadsure show {job.job_id}",
        wrong=False,
    )


def settled(facts: Facts, job: JobRow) -> Said | None:
    """A person has closed it as done."""
    by = next((action for action in reversed(facts.actions) if action.action == "settle"), None)
    if by is None or winner(facts.events) is not None:
        return None
    return Said(
        f"{by.author} settled it at {moment(by.at)}: {by.reason} ({job.result_key}).",
        f"deadsure quarantine show {job.job_id}",
        wrong=False,
    )


def succeeded(facts: Facts, job: JobRow) -> Said | None:
    """All is well."""
    took_s = facts.age_s(job.created_at) - facts.age_s(job.finished_at)
    return Said(
        f"It succeeded at {moment(job.finished_at)}, {span(took_s)} after its submit, in "
        f"{many(job.attempt, 'attempt')} ({job.result_key}).",
        f"deadsure show {job.job_id}",
        wrong=False,
    )


def expired(facts: Facts, job: JobRow) -> Said | None:
    """It was not done in time."""
    if job.cause != "expired":
        return None
    return Said(
        f"It was to start before {moment(job.expires_at)} and could not, so it was cancelled at "
        f"{moment(job.finished_at)} without running to its end: look at why jobs waited then.",
        f"deadsure jobs list --type {job.type}",
    )


def cancelled(facts: Facts, job: JobRow) -> Said | None:
    """Somebody wanted it so."""
    return Said(
        f"It was cancelled at {moment(job.finished_at)} ({job.reason or 'no reason noted'}) after "
        f"{many(job.attempt, 'attempt')}; late messages of it are acknowledged and run nothing.",
        f"deadsure show {job.job_id}",
        wrong=False,
    )


SUCCEEDED = (
    batch_waits_for_children,
    succeeded_not_acked,
    two_attempts_one_effect,
    succeeded_redelivered,
    settled,
    succeeded,
)
CANCELLED = (expired, cancelled)
