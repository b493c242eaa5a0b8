"""What the journal tells about attempts and deliveries: who began, how it ended, which cause returns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from uuid import UUID

from app.diagnose.facts import Event
from app.states import Arrow

ENDS = frozenset({Arrow.SUCCEED, Arrow.RETRY, Arrow.QUARANTINE, Arrow.EXPIRE, Arrow.RELEASE})
DELAY = re.compile(r"; in [0-9.]+ s$")
ALIKE = 2  # so many attempts that end alike are no accident


@dataclass(frozen=True)
class Attempt:
    """One committed attempt; `end` is the arrow that ended it, None when there is none yet."""

    number: int
    worker_id: UUID | None
    began_at: datetime
    end: str | None = None
    ended_at: datetime | None = None
    reason: str = ""


def attempts(events: Sequence[Event]) -> list[Attempt]:
    """The attempts that were claimed, oldest first."""
    found: dict[int, Attempt] = {}
    for event in events:
        if event.attempt is None:
            continue
        if event.event == Arrow.CLAIM:
            found[event.attempt] = Attempt(event.attempt, event.worker_id, event.at)
        elif event.event in ENDS and event.attempt in found and found[event.attempt].end is None:
            reason = DELAY.sub("", event.reason or "")
            found[event.attempt] = replace(found[event.attempt], end=event.event, ended_at=event.at, reason=reason)
    return list(found.values())


def alike(events: Sequence[Event]) -> tuple[int, str]:
    """(how many, reason) of the newest failed attempts that ended for the same reason."""
    ended = [one for one in attempts(events) if one.end in (Arrow.RETRY, Arrow.QUARANTINE)]
    if not ended:
        return 0, ""
    reason, count = ended[-1].reason, 0
    for one in reversed(ended):
        if one.reason != reason:
            break
        count += 1
    return count, reason


def taken_over(events: Sequence[Event]) -> list[Attempt]:
    """Attempts that were taken from their worker: they may have written after that, or left a file behind."""
    return [one for one in attempts(events) if one.end == Arrow.EXPIRE]


def winner(events: Sequence[Event]) -> Event | None:
    """The event of the attempt whose result counts; None when a person settled the job."""
    return next((event for event in reversed(events) if event.event == Arrow.SUCCEED), None)


def acknowledged(events: Sequence[Event], delivery: Event) -> bool:
    """Whether the journal knows that this delivery was settled with the broker."""
    return any(
        event.event in ("ack_sent", "reject_sent")
        and (event.copy, event.delivery_tag) == (delivery.copy, delivery.delivery_tag)
        for event in events
    )


def later_deliveries(events: Sequence[Event], than: Event) -> list[Event]:
    """Deliveries that came after the job had ended."""
    return [event for event in events if event.event == "received" and event.at > than.at]
