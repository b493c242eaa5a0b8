"""`deadsure diagnose`: from the facts about one job to one likely cause and one next command.

A pure function. Its rules are small functions, each named after the cause that it recognises; those of the job's state
are asked in order and the first answer counts. The names are stable: scripts and runbooks may rely on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from app.diagnose import ended, quarantined, running, unknown, waiting
from app.diagnose.facts import Facts, JobRow
from app.diagnose.timeline import timeline
from app.diagnose.words import Diagnosis, Said
from app.states import State

Rule = Callable[[Facts, JobRow], Said | None]
BY_STATE: dict[str, tuple[Rule, ...]] = {
    State.QUEUED: waiting.RULES,
    State.RETRY_WAIT: waiting.RULES,
    State.RUNNING: running.RULES,
    State.QUARANTINED: quarantined.RULES,
    State.SUCCEEDED: ended.SUCCEEDED,
    State.CANCELLED: ended.CANCELLED,
}
UNKNOWN = "unknown"


def diagnose(facts: Facts) -> Diagnosis:
    """The likely cause of the state that the job is in."""
    job = facts.job
    if job is None:
        cause, said = first((rule.__name__, rule(facts)) for rule in unknown.RULES)
        return conclude(facts, str(facts.asked), UNKNOWN, cause, said)
    rules = running.RULES if facts.held_since is not None else BY_STATE[job.state]
    cause, said = first((rule.__name__, rule(facts, job)) for rule in rules)
    return conclude(facts, str(job.job_id), job.state, cause, said)


def first(answers: Iterable[tuple[str, Said | None]]) -> tuple[str, Said]:
    """The first rule that had something to say; the last one of each state always has."""
    return next((cause, said) for cause, said in answers if said is not None)


def conclude(facts: Facts, job_id: str, state: str, cause: str, said: Said) -> Diagnosis:
    """The diagnosis, with the story it was drawn from."""
    alias = f"{facts.asked} is an alias of this job. " if facts.job and facts.asked != facts.job.job_id else ""
    explanation = f"{alias}{said.explanation}{batch_note(facts, cause)}".strip()
    return Diagnosis(job_id, state, cause, explanation, said.next, said.wrong, timeline(facts))


def batch_note(facts: Facts, cause: str) -> str:
    """That a batch waits for this job, where the cause does not say so already."""
    batch, job = facts.batch, facts.job
    if batch is None or not batch.open or job is None or job.finished_at is not None or "batch" in cause:
        return ""
    return "" if batch.coordinator_id == job.job_id else f" Batch {batch.batch_id} waits for it."
