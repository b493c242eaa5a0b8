"""The story of a job in one list: journal, ledger, quarantine, decisions; and what is missing between them."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from app.diagnose.attempts import attempts
from app.diagnose.facts import Facts
from app.diagnose.words import many

GAP_S = 5.0


def timeline(facts: Facts) -> list[dict[str, Any]]:
    """Events, oldest first, each with `at` and `event`; a pause of `GAP_S` or a missing end is an event `gap`."""
    told = sorted([*journal(facts), *ledger(facts), *decisions(facts)], key=lambda line: line["at"])
    found: list[dict[str, Any]] = []
    if facts.older_events:
        found.append(gap(told[0]["at"], "older events are left out"))
    for line in told:
        quiet_s = (line["at"] - found[-1]["at"]).total_seconds() if found else 0.0
        if quiet_s >= GAP_S:
            found.append(gap(found[-1]["at"], f"{quiet_s:.1f} s without an event"))
        found.append(line)
    return [*found, *missing(facts)]


def journal(facts: Facts) -> list[dict[str, Any]]:
    """The journal's events."""
    return [
        line(
            event.at,
            event.event,
            attempt=event.attempt,
            copy=event.copy,
            delivery_tag=event.delivery_tag,
            redelivered=event.redelivered,
            worker=str(event.worker_id)[:8] if event.worker_id else None,
            reason=event.reason,
        )
        for event in facts.events
    ]


def ledger(facts: Facts) -> list[dict[str, Any]]:
    """External calls, begun and ended."""
    begun = [line(call.started_at, "call_started", attempt=call.attempt, call=call.name) for call in facts.effects]
    ended = [
        line(call.finished_at, "call_finished", attempt=call.attempt, call=call.name)
        for call in facts.effects
        if call.finished_at is not None
    ]
    return begun + ended


def decisions(facts: Facts) -> list[dict[str, Any]]:
    """What people did about it."""
    return [
        line(action.at, f"person_{action.action}", episode=action.episode, author=action.author, reason=action.reason)
        for action in facts.actions
    ]


def missing(facts: Facts) -> list[dict[str, Any]]:
    """What should be there by now and is not, with the time of the question."""
    tried = attempts(facts.events)
    endless = [one.number for one in tried[:-1] if one.end is None]
    lines = [gap(facts.now, f"attempt {number} has no end in the journal") for number in endless]
    if facts.job is not None and facts.job.attempt > len(tried) and not facts.older_events:
        lost = facts.job.attempt - len(tried)
        lines.append(gap(facts.now, f"{many(lost, 'attempt')} left no claim in the journal"))
    quiet_s = facts.age_s(facts.events[-1].at) if facts.events else 0.0
    if facts.job is not None and facts.job.finished_at is None and quiet_s >= GAP_S:
        lines.append(gap(facts.now, f"{quiet_s:.1f} s without an event until now"))
    if facts.broker is not None:
        lines += [gap(facts.now, f"broker: {note}") for note in facts.broker.notes]
    return lines


def line(at: datetime, event: str, **details: Any) -> dict[str, Any]:
    """One event, without what is not known of it."""
    return {"at": at, "event": event, **{name: value for name, value in details.items() if value is not None}}


def gap(at: datetime, what: str) -> dict[str, Any]:
    """A hole in the story."""
    return {"at": at, "event": "gap", "reason": what}
