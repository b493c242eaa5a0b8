"""How one delivery ended: a value, for the transport that settles it and for the metrics that count it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum

from app.failures import Failure


class Outcome(StrEnum):
    """How one delivery ended, as the metrics count it. SKIPPED: there was nothing to do for it here."""

    SUCCEEDED = "succeeded"
    RETRIED = "retried"
    QUARANTINED = "quarantined"
    RELEASED = "released"
    LOST = "lost"
    CRASHED = "crashed"
    SKIPPED = "skipped"


class Settlement(Enum):
    """What the transport does with the delivery. IGNORE acknowledges too: it did not run here."""

    SUCCEEDED = "succeeded"
    RETRIED = "retried"
    QUARANTINED = "quarantined"
    IGNORE = "ignore"


@dataclass(frozen=True)
class Ending:
    """How one delivery ended: to be settled by the transport, after everything durable is durable.

    What follows `delay_s` is for the metrics of the main process. `waited_s` (for the claim) and `ran_s` (the attempt,
    its arrow included) are None when nothing was claimed; `expired`: the delivery proved the job's former owner dead.
    """

    settlement: Settlement
    result_key: str = ""
    reason: str = ""
    delay_s: float = 0.0
    outcome: Outcome = Outcome.SKIPPED
    failure: Failure | None = None
    cause: str = ""
    waited_s: float | None = None
    ran_s: float | None = None
    expired: bool = False
