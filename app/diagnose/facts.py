"""What is known of one job at one moment: rows of the database, what the broker says, and who is alive.

Nothing here is read or judged: `app.diagnose.reading` fills it, the rules conclude from it. The names of fields are
those of the columns. Durations are seconds, by the database's clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from app.settings import Settings

WINDOW_FULL = 0.75  # of the window: see `app.outbox.TAKE`


@dataclass(frozen=True)
class JobRow:
    """The job's row, without payload, checkpoint and result."""

    job_id: UUID
    type: str
    schema_version: int
    state: str
    queue: str
    priority: int
    attempt: int
    failures: int
    crashes: int
    stalls: int
    releases: int
    max_failures: int
    max_crashes: int
    max_stalls: int
    episode: int
    worker_id: UUID | None
    child_pid: int | None
    expire_early: bool
    not_before: datetime | None
    expires_at: datetime | None
    parked_at: datetime | None
    cancel_requested: bool
    cause: str | None
    reason: str | None
    result_key: str | None
    batch_id: UUID | None
    progress_done: int | None
    progress_total: int | None
    created_at: datetime
    changed_at: datetime
    finished_at: datetime | None

    @property
    def versioned(self) -> str:
        """Type and version as `workers.knows` spells them."""
        return f"{self.type}@{self.schema_version}"


@dataclass(frozen=True)
class Debt:
    """The job's outbox row; `due_at` is None when it is offered no more."""

    kind: str
    episode: int
    sends: int
    due_at: datetime | None
    sent_at: datetime | None
    returned_at: datetime | None
    returned_reason: str | None
    created_at: datetime


@dataclass(frozen=True)
class Owner:
    """A worker that has, or had, the job.

    `session`: its advisory lock is held; None when that says nothing. `renewed_at`: when that session was last used,
    which a keeper does to renew and for nothing else; None where it cannot be seen.
    """

    worker_id: UUID
    name: str
    hostname: str
    pid: int
    lease_until: datetime
    lost_at: datetime | None
    lost_cause: str | None
    stopped_at: datetime | None
    session: bool | None
    renewed_at: datetime | None = None


@dataclass(frozen=True)
class Event:
    """One row of the journal."""

    at: datetime
    event: str
    attempt: int | None = None
    copy: int | None = None
    delivery_tag: str | None = None
    redelivered: bool | None = None
    worker_id: UUID | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Call:
    """One row of the ledger, without its result."""

    name: str
    status: str
    attempt: int
    idempotency_key: str
    started_at: datetime
    finished_at: datetime | None


@dataclass(frozen=True)
class Entry:
    """One quarantine of the job."""

    episode: int
    cause: str
    fingerprint: str
    reason: str
    attempt: int
    quarantined_at: datetime
    dead_lettered_at: datetime | None
    closed_at: datetime | None


@dataclass(frozen=True)
class Action:
    """What somebody did about one quarantine, without payloads."""

    episode: int
    action: str
    author: str
    reason: str
    at: datetime


@dataclass(frozen=True)
class Letter:
    """One dead letter, without its bytes; `episode` is None for a foreign or unreadable one."""

    episode: int | None
    copy: int | None
    reason: str
    source: str
    received_at: datetime


@dataclass(frozen=True)
class Batch:
    """The batch that the job belongs to, or coordinates. `blocking`: some of its quarantined children."""

    batch_id: UUID
    coordinator_id: UUID
    exhausted: bool
    finished_at: datetime | None
    cancelled_at: datetime | None
    states: dict[str, int]
    blocking: tuple[UUID, ...]

    @property
    def open(self) -> bool:
        """Whether it still waits for its children."""
        return self.finished_at is None and self.cancelled_at is None


@dataclass(frozen=True)
class Fleet:
    """Who is alive. `versions`: of the job's type, as known to live workers.

    `consuming`: those that take messages from the job's queue, or have not said yet what they take; `knowing`: those of
    them that know the job's type and version. `relays`, `sweepers`: (sessions, those that have looked lately). `busy`:
    sessions of handlers that were used lately. None where sessions cannot be seen (a pooler).
    """

    live: int
    consuming: int
    knowing: int
    versions: tuple[str, ...]
    relays: tuple[int, int] | None
    sweepers: tuple[int, int] | None
    busy: int | None = None


@dataclass(frozen=True)
class Line:
    """The job's queue as the database sees it: due jobs before this one, unpaid deliveries, running jobs."""

    ahead: int
    unpaid: int
    running: int


@dataclass(frozen=True)
class Broker:
    """What the broker says about the job's queue. None: it does not tell, or was not asked; `notes` say why."""

    kind: str
    reachable: bool
    exists: bool | None = None
    ready: int | None = None
    unacknowledged: int | None = None
    consumers: int | None = None
    bound: bool | None = None
    quarantine_exists: bool | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts:
    """Everything about one id. `asked` is not the job's own when it is an alias; `names` is what else it names."""

    asked: UUID
    now: datetime
    settings: Settings
    fleet: Fleet
    job: JobRow | None = None
    debt: Debt | None = None
    owner: Owner | None = None
    held_since: datetime | None = None
    events: tuple[Event, ...] = ()
    older_events: bool = False
    effects: tuple[Call, ...] = ()
    entries: tuple[Entry, ...] = ()
    actions: tuple[Action, ...] = ()
    letters: tuple[Letter, ...] = ()
    batch: Batch | None = None
    line: Line = field(default_factory=lambda: Line(0, 0, 0))
    broker: Broker | None = None
    tombstone: dict[str, Any] | None = None
    names: str | None = None

    def age_s(self, at: datetime | None) -> float:
        """Seconds since `at`; negative when it is still to come, 0 without a time."""
        return (self.now - at).total_seconds() if at else 0.0

    @property
    def slow_s(self) -> float:
        """After so long what should happen at the next look is late."""
        return 3 * self.settings.poll_s + 2

    @property
    def due(self) -> bool:
        """Whether the job's time has come, or a message for it is on its way already."""
        if self.job is None or self.debt is None or self.age_s(self.job.not_before) < 0:
            return False
        return self.debt.sends > 0 or self.age_s(self.debt.due_at) >= 0

    @property
    def overdue_s(self) -> float:
        """For how long the debt is due and nobody has sent it (again)."""
        return self.age_s(self.debt.due_at) if self.debt else 0.0

    @property
    def owner_gone(self) -> bool:
        """Whether the owner is declared lost, has left, or has no session any more."""
        owner = self.owner
        return owner is None or owner.lost_at is not None or owner.stopped_at is not None or owner.session is False

    @property
    def owner_silent(self) -> bool:
        """Whether the owner has let half of its lease pass: a third is the most that may lie between renewals."""
        owner = self.owner
        if owner is None or owner.renewed_at is None:
            return False
        return self.age_s(owner.renewed_at) > (owner.lease_until - owner.renewed_at).total_seconds() / 2

    @property
    def untouched(self) -> bool:
        """Whether messages stand in the queue and nobody works: no job of it runs, no handler's session is used."""
        if not (self.broker and self.broker.ready and self.debt and self.debt.sends):
            return False
        return self.fleet.busy == 0 == self.line.running and self.age_s(self.debt.sent_at) > self.slow_s

    @property
    def window_full(self) -> bool:
        """Whether the relay sends nothing new before something is claimed."""
        return self.line.unpaid > WINDOW_FULL * self.settings.window
