"""What an id is that names no job: something that was one, something else, or nothing. The first rule counts."""

from __future__ import annotations

from app.diagnose.facts import Facts
from app.diagnose.words import Said, many, moment

LIST = "deadsure jobs list"


def pruned(facts: Facts) -> Said | None:
    """Retention took it."""
    stone = facts.tombstone
    if stone is None:
        return None
    return Said(
        f"It was a {stone['type']}, ended as {stone['state']} ({stone['result_key'] or 'no result'}) and was pruned at "
        f"{moment(stone['pruned_at'])}; its key stays taken.",
        f"deadsure jobs list --type {stone['type']}",
        wrong=stone["state"] not in ("succeeded", "cancelled"),
    )


def names_something_else(facts: Facts) -> Said | None:
    """An id of another table."""
    if facts.names is None:
        return None
    command = f"deadsure batch show {facts.asked}" if facts.names == "batch" else "deadsure doctor"
    return Said(f"There is no such job: {facts.asked} is the id of a {facts.names}.", command)


def dead_letter_without_job(facts: Facts) -> Said | None:
    """A message with this id was refused and kept, and no job was made of it."""
    if not facts.letters:
        return None
    newest = facts.letters[-1]
    return Said(
        f"There is no such job, but {many(len(facts.letters), 'dead letter')} with this id, the newest of "
        f"{moment(newest.received_at)}: {newest.reason}. Nothing was run.",
        "deadsure doctor",
    )


def job_missing_for_messages(facts: Facts) -> Said | None:
    """Workers have seen messages of it: another database, a restored backup, deleted rows."""
    if not facts.events:
        return None
    return Said(
        f"There is no such job, but the journal has {many(len(facts.events), 'event')} of it, the last at "
        f"{moment(facts.events[-1].at)}: its row was deleted, or DATABASE_URL names another database than its submit.",
        LIST,
    )


def unknown_job(facts: Facts) -> Said | None:
    """Nothing is known."""
    return Said(
        "There is no job, alias, tombstone, batch, worker, dead letter or journal entry with this id. Was its "
        "transaction committed, and is DATABASE_URL the one it was submitted to?",
        LIST,
    )


RULES = (pruned, names_something_else, dead_letter_without_job, job_missing_for_messages, unknown_job)
