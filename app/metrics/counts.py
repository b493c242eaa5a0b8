"""What this process has counted since its start. Only a main process counts: its pool's children report to it.

Labels are bounded: registered job types (any other is `unknown`), our own words for outcomes and causes. The children
of `labels` are looked up once for each type, since a lookup costs more than the count.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.metrics import MetricWrapperBase

from app.ending import Ending, Outcome
from app.failures import Failure
from app.job_types import REGISTRY

UNKNOWN = "unknown"
OTHER = "other"
QUARANTINE_CAUSES = (
    "permanent",
    "uncertain",
    "attempts_spent",
    "deadline",
    "killed_worker",
    "stalled",
    "unknown_type",
)
LOST_CAUSES = ("killed", "stalled")
MESSAGE_ENDINGS = ("parked", "adopted", "dead_lettered")
SENDS = ("first", "resend", "trace")
DURATION_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900)
WAIT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600)

COUNTS = CollectorRegistry()
ProcessCollector(registry=COUNTS)

PROCESSED = Counter(
    "deadsure_jobs_processed",
    "Jobs whose delivery ended here, by outcome; `skipped`: there was nothing to do for it here.",
    ["type", "outcome"],
    registry=COUNTS,
)
FAILED = Counter(
    "deadsure_jobs_failed",
    "Attempts that failed, by the class of the error; they were retried or quarantined.",
    ["type", "failure"],
    registry=COUNTS,
)
QUARANTINED = Counter(
    "deadsure_jobs_quarantined", "Jobs that went to quarantine, by cause.", ["type", "cause"], registry=COUNTS
)
CRASHED = Counter(
    "deadsure_jobs_crashed",
    "Attempts whose process or worker was lost (`killed`) or went silent (`stalled`), counted by whoever noticed.",
    ["type", "cause"],
    registry=COUNTS,
)
DELIVERED = Counter("deadsure_deliveries", "Deliveries of jobs, taken from the broker.", ["type"], registry=COUNTS)
REDELIVERED = Counter(
    "deadsure_redeliveries", "Those of them that the broker had delivered before.", ["type"], registry=COUNTS
)
DURATION = Histogram(
    "deadsure_job_duration_seconds",
    "One attempt in its process, to its durable result.",
    ["type"],
    buckets=DURATION_BUCKETS_S,
    registry=COUNTS,
)
WAIT = Histogram(
    "deadsure_job_wait_seconds",
    "From the moment a job could be started to its claim.",
    ["type"],
    buckets=WAIT_BUCKETS_S,
    registry=COUNTS,
)
MESSAGES = Counter(
    "deadsure_messages_intercepted",
    "Messages that were not for the pool: of a type unknown here, foreign, or unreadable.",
    ["ending"],
    registry=COUNTS,
)
SENT = Counter(
    "deadsure_relay_sends",
    "Messages that the broker confirmed: first sends, resends of unpaid debts, offers of missing traces.",
    ["kind"],
    registry=COUNTS,
)
INTERRUPTED = Counter(
    "deadsure_relay_interruptions", "Times the relay lost its database or its broker.", registry=COUNTS
)
STORED = Counter("deadsure_dead_letters_stored", "Dead letters that the intake has stored.", registry=COUNTS)
REPAIRED = Counter("deadsure_repairs", "Jobs found without the debt that somebody owes for them.", registry=COUNTS)
WORKERS_LOST = Counter(
    "deadsure_workers_lost", "Workers that this process has declared lost, by cause.", ["cause"], registry=COUNTS
)


SENT_AS = {kind: SENT.labels(kind) for kind in SENDS}


class OfType:
    """The counts of one job type, looked up once."""

    def __init__(self, name: str) -> None:
        self.processed = {outcome: PROCESSED.labels(name, outcome.value) for outcome in Outcome}
        self.failed = {failure: FAILED.labels(name, failure.value) for failure in Failure}
        self.crashed = {cause: CRASHED.labels(name, cause) for cause in LOST_CAUSES}
        self.quarantined = {cause: QUARANTINED.labels(name, cause) for cause in (*QUARANTINE_CAUSES, OTHER)}
        self.delivered, self.redelivered = DELIVERED.labels(name), REDELIVERED.labels(name)
        self.duration, self.wait = DURATION.labels(name), WAIT.labels(name)

    def note_quarantine(self, cause: str) -> None:
        """One more job in quarantine."""
        self.quarantined.get(cause, self.quarantined[OTHER]).inc()

    def note_ending(self, ending: Ending) -> None:
        """One delivery that ended with a value; a dead child's is noted by its crash."""
        self.processed[ending.outcome].inc()
        if ending.waited_s is not None:
            self.wait.observe(max(0.0, ending.waited_s))
        if ending.ran_s is not None:
            self.duration.observe(ending.ran_s)
        if ending.failure is not None:
            self.failed[ending.failure].inc()
            if ending.outcome is Outcome.QUARANTINED:
                self.note_quarantine(ending.cause)
        if ending.expired:
            self.crashed["killed"].inc()

    def note_crash(self, cause: str, state: str) -> None:
        """One attempt whose owner is gone; `state`: what became of the job."""
        self.crashed[cause].inc()
        if state == "quarantined":
            self.note_quarantine("killed_worker" if cause == "killed" else cause)


_types: dict[str, OfType] = {}


def of_type(name: str) -> OfType:
    """The counts of a type; of `unknown` when this program does not know it."""
    found = _types.get(name)
    if found is None:
        known = name if any(name == registered for registered, _ in REGISTRY) else UNKNOWN
        found = _types.setdefault(known, OfType(known)) if known not in _types else _types[known]
    return found


def begin() -> None:
    """Let every series be there with zero, so that the first event is an increase and not a beginning."""
    for name, _ in REGISTRY:
        of_type(name)
    of_type(UNKNOWN)
    label(MESSAGES, MESSAGE_ENDINGS)
    label(WORKERS_LOST, LOST_CAUSES)


def label(metric: MetricWrapperBase, values: Iterable[str]) -> None:
    """Make the series of a metric with one label."""
    for value in values:
        metric.labels(value)
