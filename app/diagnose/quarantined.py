"""What a quarantined job waits for: a decision, or its second trace. The first rule counts."""

from __future__ import annotations

from app.diagnose.facts import Call, Entry, Facts, JobRow
from app.diagnose.words import Said, many, moment, span
from app.outbox import TRACE_OFFERS

MEANING = {
    "permanent": "trying again cannot help: the payload or the code must change",
    "attempts_spent": "every attempt failed",
    "deadline": "its deadline came before an attempt succeeded",
    "uncertain": "a call was cut off, and nobody can tell whether it took effect",
    "killed_worker": "its handler ended worker processes (memory, a crash, the hard time limit)",
    "stalled": "its workers went silent while it ran",
    "unknown_type": "no live worker knew its type and version",
}


def effect_uncertain(facts: Facts, job: JobRow) -> Said | None:
    """The ledger holds a call of which nobody knows whether it took effect."""
    open_calls = [call for call in facts.effects if call.status == "started"]
    if not open_calls:
        return None
    call = open_calls[0]
    return Said(
        f"Quarantined as {job.cause}; attempt {call.attempt} started the call {call.name!r} at "
        f"{moment(call.started_at)} and its outcome is not in the ledger. Ask the other side by the key "
        f"{call.idempotency_key!r}: done -> settle, not done -> replay. {later(open_calls)}",
        f"deadsure quarantine show {job.job_id}",
    )


def quarantine_trace_missing(facts: Facts, job: JobRow) -> Said | None:
    """The row is there, the dead letter is not."""
    entry = present(facts, job)
    if entry is None or entry.dead_lettered_at is not None or entry.closed_at is not None:
        return None
    if facts.age_s(entry.quarantined_at) < facts.settings.resend_first_s + facts.slow_s:
        return None
    return Said(
        f"Quarantined as {job.cause} ({job.reason}) {span(facts.age_s(entry.quarantined_at))} ago, and its dead letter "
        f"has not come through the dead-letter exchange: {offers(facts)}. {way(facts)}",
        "deadsure doctor",
    )


def quarantined_blocks_batch(facts: Facts, job: JobRow) -> Said | None:
    """Its batch cannot end before somebody decides."""
    batch = facts.batch
    if batch is None or not batch.open or batch.coordinator_id == job.job_id:
        return None
    blocked = batch.states.get("quarantined", 0)
    return Said(
        f"Quarantined as {job.cause} ({job.reason}): {MEANING.get(job.cause or '', 'see its entry')}. Batch "
        f"{batch.batch_id} cannot finish before it is replayed, settled or cancelled ("
        f"{many(blocked, 'child', 'children')} of it quarantined).",
        f"deadsure quarantine show {job.job_id}",
    )


def quarantined(facts: Facts, job: JobRow) -> Said | None:
    """It waits for a decision."""
    entry = present(facts, job)
    print_ = f", fingerprint {entry.fingerprint}" if entry else ""
    alike = sum(other.fingerprint == entry.fingerprint for other in facts.entries) if entry else 0
    again = f" again ({alike} of {job.episode} times with this fingerprint)" if job.episode > 1 else ""
    if job.cause == "unknown_type" and facts.fleet.knowing:
        return Said(
            f"Quarantined as unknown_type{again}; by now {job.versioned} is known to "
            f"{many(facts.fleet.knowing, 'live worker')}.",
            f"deadsure quarantine replay {job.job_id} --reason 'its type is known now'",
        )
    return Said(
        f"Quarantined as {job.cause}{again} ({job.reason}{print_}) after {many(job.attempt, 'attempt')}: "
        f"{MEANING.get(job.cause or '', 'see its entry')}. It waits for a person: replay, settle or cancel.",
        f"deadsure quarantine show {job.job_id}",
    )


def present(facts: Facts, job: JobRow) -> Entry | None:
    """The entry of the present episode."""
    return next((entry for entry in facts.entries if entry.episode == job.episode), None)


def later(calls: list[Call]) -> str:
    """How many other calls are open."""
    return f"{many(len(calls) - 1, 'other call')} are open too." if len(calls) > 1 else ""


def offers(facts: Facts) -> str:
    """What becomes of the trace debt."""
    debt = facts.debt
    if debt is None or debt.kind != "trace":
        return "nobody owes it (a sweeper mends this)"
    if debt.due_at is None:
        return f"offered {TRACE_OFFERS} times, then given up"
    return f"offered {many(debt.sends, 'time')} so far, next at {moment(debt.due_at)}"


def way(facts: Facts) -> str:
    """What is known of the way that the letter has to take."""
    broker = facts.broker
    if broker is None:
        return ""
    if not broker.reachable:
        return "The broker does not answer."
    if broker.quarantine_exists is False:
        return "The queue `quarantine` is missing; a relay's start declares it."
    return "Look at the exchange jobs.dlx, its binding to `quarantine`, and whether an intake runs."


RULES = (effect_uncertain, quarantine_trace_missing, quarantined_blocks_batch, quarantined)
