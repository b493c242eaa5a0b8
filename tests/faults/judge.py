"""The judge: reads every job of a database with its journal and says what must never be so.

Rules. Arrows: each journaled arrow starts from a state in which the job can have been (`app.states.ARROWS`), and the
row's state is one in which its journal can have ended. Attempts: each claim is one more than the last, every arrow
of an attempt names it, the row's number is the last one. Success: at most once, after its `result_saved`, and
nothing after it. Counters: each expiry counted once, as the crash or the stall that its reason names; each release,
failure and quarantine counted once. Debts: whoever waits has one to be woken up, a quarantined job owes its dead letter
until that is stored, everybody else has none. Traces: one entry for each episode, open while the job is in it; stamped
when, and only when, a dead letter of the episode is stored. Words: the journal knows no others.
Effects: one for each succeeded job, none for any other.

All is read in one snapshot, so a judgement may be passed at any moment, also while workers run.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Engine, text

from app.states import ARROWS, Arrow, State

JOBS = """
SELECT jobs.job_id, type, state::text, attempt, failures, crashes, stalls, releases, result_key,
       (SELECT kind || ' ' || debt.episode FROM outbox debt WHERE debt.job_id = jobs.job_id), episode,
       (SELECT count(*) FROM quarantine_entries entry WHERE entry.job_id = jobs.job_id),
       (SELECT count(*) FROM quarantine_entries entry WHERE entry.job_id = jobs.job_id AND closed_at IS NULL),
       (SELECT count(*) FROM quarantine_entries entry
         WHERE entry.job_id = jobs.job_id AND entry.episode = jobs.episode AND dead_lettered_at IS NOT NULL),
       (SELECT count(*) FROM dead_letters letter
         WHERE letter.job_id = jobs.job_id AND letter.episode = jobs.episode)
  FROM jobs
"""
# Arrows of one job wait for each other at its row, so their numbers are in order; those of late notes are not.
JOURNAL = """
SELECT job_id, event, attempt, copy, delivery_tag, redelivered, worker_id, reason, at
  FROM job_events ORDER BY event_id
"""
# Where the job types that make effects record them, append-only.
EFFECTS = {
    "SELECT job_id, count(*) FROM test_effects WHERE kind = 'effect' GROUP BY 1": (
        "tests.slow",
        "tests.leased_effect",
        "tests.atomic",
        "tests.parent",
        "tests.call_when_lost",
    ),
    "SELECT job_id, count(*) FROM report_exports GROUP BY 1": ("reports.export",),
    "SELECT job_id, count(*) FROM ledger_entries GROUP BY 1": ("ledger.post",),
    "SELECT job_id, count(*) FROM sent_mails GROUP BY 1": ("emails.welcome",),
    "SELECT job_id, count(*) FROM charges GROUP BY 1": ("payments.charge",),
    "SELECT job_id, count(*) FROM monthly_summaries GROUP BY 1": ("reports.monthly_summary",),
}
# A batch has one completion job when it has ended, and none before; it has ended only with all its children.
BATCHES = """
SELECT batch_id, finished_at IS NOT NULL, cancelled_at IS NOT NULL, completion_id IS NOT NULL,
       (SELECT count(*) FROM jobs WHERE parent_id = batches.batch_id AND batch_id IS NULL AND job_id = completion_id),
       (SELECT count(*) FROM jobs WHERE batch_id = batches.batch_id AND state NOT IN ('succeeded', 'cancelled'))
  FROM batches
"""
# What the journal tells beside the arrows.
NOTES = (
    *("published", "returned", "received", "result_saved", "retry_scheduled", "quarantined", "ack_sent", "reject_sent"),
    *("dead_lettered", "repaired", "cancel_requested"),
)
OUT_OF_RUNNING = (Arrow.SUCCEED, Arrow.RETRY, Arrow.QUARANTINE, Arrow.EXPIRE, Arrow.RELEASE)


@dataclass(frozen=True)
class Event:
    """One row of the journal."""

    event: str
    attempt: int | None
    copy: int | None
    delivery_tag: str | None
    redelivered: bool | None
    worker_id: UUID | None
    reason: str | None
    at: Any


@dataclass
class Case:
    """One job: its row, debt and traces, its journal in the order of the arrows, its effects.

    `debt`: kind and episode, as "wake 1". `stamped` and `letters` count those of the present episode.
    """

    job_id: UUID
    type: str
    state: State
    attempt: int
    failures: int
    crashes: int
    stalls: int
    releases: int
    result_key: str | None
    debt: str | None
    episode: int = 0
    entries: int = 0
    open_entries: int = 0
    stamped: int = 0
    letters: int = 0
    journal: list[Event] = field(default_factory=list)
    effects: int | None = None

    @property
    def has_debt(self) -> bool:
        """Whether anything of the job is owed: a wake-up, or a dead letter."""
        return self.debt is not None

    def events(self, *words: str) -> list[Event]:
        """The events of these kinds."""
        return [event for event in self.journal if event.event in words]

    def count(self, word: str) -> int:
        """How often an event is in the journal."""
        return len(self.events(word))


def cases(engine: Engine) -> dict[UUID, Case]:
    """Every job of the database, in one snapshot."""
    with engine.connect().execution_options(isolation_level="REPEATABLE READ") as connection:
        found = {row[0]: Case(row[0], row[1], State(row[2]), *row[3:]) for row in connection.execute(text(JOBS))}
        for job_id, *event in connection.execute(text(JOURNAL)):
            if job_id in found:
                found[job_id].journal.append(Event(*event))
        counted = count_effects(connection)
    for case in found.values():
        if case.type in counted:
            case.effects = counted[case.type][case.job_id]
    return found


def count_effects(connection: Connection) -> dict[str, Counter[UUID]]:
    """Number of effects of each job, by job type."""
    counted: dict[str, Counter[UUID]] = defaultdict(Counter)
    for statement, types in EFFECTS.items():
        effects = Counter(dict(map(tuple, connection.execute(text(statement)))))
        counted.update(dict.fromkeys(types, effects))
    return counted


def judge(engine: Engine) -> dict[UUID, Case]:
    """Judge every job; returns the cases. Raises AssertionError with each breach and the journal it was found in."""
    found = cases(engine)
    verdicts = [
        f"{case.type} {case.job_id} ({case.state}): {breach}\n    {story(case)}"
        for case in found.values()
        for breach in breaches(case)
    ]
    with engine.connect() as connection:
        verdicts += [breach for row in connection.execute(text(BATCHES)) for breach in wrong_batch(*row)]
    assert not verdicts, "\n".join(["the judge found:", *verdicts])
    return found


def wrong_batch(batch_id: UUID, finished: bool, cancelled: bool, wants: bool, completions: int, left: int) -> list[str]:
    """An end too early, or a completion that is missing or too many."""
    wrong = []
    if finished and left:
        wrong.append(f"batch {batch_id} has finished, {left} children have not")
    if finished and cancelled:
        wrong.append(f"batch {batch_id} is finished and cancelled")
    if completions != (finished and wants):
        wrong.append(f"batch {batch_id}: finished is {finished}, {completions} completion jobs")
    return wrong


def story(case: Case) -> str:
    """The journal in one line."""
    return ", ".join(f"{event.event}/{event.attempt}" if event.attempt else event.event for event in case.journal)


def breaches(case: Case) -> list[str]:
    """What is wrong with one job; empty when nothing is."""
    return [
        *wrong_arrows(case),
        *wrong_attempts(case),
        *wrong_success(case),
        *wrong_counters(case),
        *wrong_debt(case),
        *wrong_traces(case),
        *wrong_rest(case),
    ]


def wrong_arrows(case: Case) -> list[str]:
    """Arrows from a state in which the job cannot have been; some arrows lead to one of several states."""
    possible: frozenset[State | None] = frozenset({None})
    for event in case.journal:
        if event.event not in list(Arrow):
            continue
        sources, targets = ARROWS[Arrow(event.event)]
        if not possible & sources:
            return [f"{event.event} from {sorted(map(str, possible))}"]
        possible = frozenset(targets)
    return [] if case.state in possible else [f"the journal ends in {sorted(map(str, possible))}"]


def wrong_attempts(case: Case) -> list[str]:
    """Attempts that fall, jump, or belong to another claim."""
    current = 0
    for event in case.events(*Arrow):
        if event.event == Arrow.CLAIM:
            if event.attempt != current + 1:
                return [f"claim of attempt {event.attempt} after attempt {current}"]
            current += 1
        elif event.event in OUT_OF_RUNNING and event.attempt != current:
            return [f"{event.event} by attempt {event.attempt} while attempt {current} was the last"]
    return [] if case.attempt == current else [f"attempt is {case.attempt}, the journal says {current}"]


def wrong_success(case: Case) -> list[str]:
    """More than one success, one without its proof, or anything after the end."""
    wrong = []
    arrows = [event.event for event in case.events(*Arrow)]
    if case.count("succeed") > 1:
        wrong.append("succeeded twice")
    if case.count("result_saved") != case.count("succeed"):
        wrong.append("result_saved and succeed do not belong together")
    ends = [place for place, arrow in enumerate(arrows) if arrow in ("succeed", "settle", "cancel")]
    if ends and ends[0] != len(arrows) - 1:
        wrong.append(f"{arrows[ends[0] + 1]} after {arrows[ends[0]]}")
    if (case.state is State.SUCCEEDED) != (case.result_key is not None):
        wrong.append(f"result_key is {case.result_key}")
    return wrong


def wrong_counters(case: Case) -> list[str]:
    """Counters that the journal does not bear out."""
    wrong = []
    for counter, proof in ((case.crashes, "killed"), (case.stalls, "stalled")):
        proven = sum((event.reason or "").startswith(f"{proof}:") for event in case.events("expire"))
        if counter != proven:
            wrong.append(f"{counter} counted as {proof}, {proven} in the journal")
    if case.crashes + case.stalls != case.count("expire"):
        wrong.append(f"{case.crashes} crashes + {case.stalls} stalls, {case.count('expire')} expiries")
    if case.releases != case.count("release"):
        wrong.append(f"{case.releases} releases, {case.count('release')} in the journal")
    if not case.count("retry") <= case.failures <= case.count("retry") + case.count("quarantine"):
        wrong.append(f"{case.failures} failures, {case.count('retry')} retries")
    return wrong


def wrong_debt(case: Case) -> list[str]:
    """A debt that does not fit the state, or a missing one."""
    due = None
    if case.state in (State.QUEUED, State.RETRY_WAIT):
        due = f"wake {case.episode + 1}"
    elif case.state is State.QUARANTINED and not case.stamped:
        due = f"trace {case.episode}"
    return [] if case.debt == due else [f"the debt is {case.debt}, it should be {due}"]


def wrong_traces(case: Case) -> list[str]:
    """Entries and dead letters that do not belong together."""
    wrong = []
    if not case.episode == case.entries == case.count("quarantined"):
        wrong.append(f"episode {case.episode}, {case.entries} entries, {case.count('quarantined')} in the journal")
    if case.open_entries != (case.state is State.QUARANTINED):
        wrong.append(f"{case.open_entries} open entries")
    if case.stamped and not case.letters:
        wrong.append("stamped without a dead letter")
    if case.stamped and not case.count("dead_lettered"):
        wrong.append("stamped, but the journal does not say so")
    return wrong


def wrong_rest(case: Case) -> list[str]:
    """Words that the journal does not have, and effects that do not fit the state."""
    wrong = [f"unknown event {word}" for word in sorted({e.event for e in case.journal} - {*Arrow, *NOTES})]
    if case.effects is not None and case.effects != (case.state is State.SUCCEEDED):
        wrong.append(f"{case.effects} effects")
    return wrong
