"""Policies that change what this release declares: a queue's arguments are not the last word."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from app.checks.finding import Finding, Severity, ok
from tasks.checks.broker_look import BrokerLook
from tasks.topology import QUARANTINE_QUEUE, WORK_ARGUMENTS

MIRRORS = ("ha-mode", "ha-params", "ha-sync-mode", "ha-promote-on-shutdown")
LIMITS = ("max-length", "max-length-bytes", "max-in-memory-length", "max-in-memory-bytes")


def policies(look: BrokerLook) -> Iterator[Finding]:
    """Every key of a policy in force for one of our queues that bends a promise."""
    if look.management is None:
        return
    bent = False
    for name in (*look.work_queues, QUARANTINE_QUEUE):
        if look.queues[name] is None:
            continue
        kind = look.management.queue(name).get("type", "classic")
        for policy in look.management.policies_of(name, kind):
            for key, value in policy["definition"].items():
                found = judge(look, name, key, value, policy)
                bent = bent or found is not None
                if found is not None:
                    yield found
    if not bent:
        yield ok("policy.none", "no policy changes what the queues were declared with")


def judge(look: BrokerLook, queue: str, key: str, value: Any, policy: dict[str, Any]) -> Finding | None:
    """What one key of a policy does to one of our queues; None when it does no harm."""
    kind = "operator policy" if policy.get("operator") else "policy"
    consequence = effect(look, queue, key, value)
    if consequence is None:
        return None
    severity, does = consequence
    clear = "clear_operator_policy" if policy.get("operator") else "clear_policy"
    return Finding(
        severity,
        f"policy.{'mirrored' if key in MIRRORS else key.replace('-', '_')}",
        f"{kind} {policy['name']} sets {key} = {value} on queue {queue}: {does}",
        f"rabbitmqctl {clear} -p {policy['vhost']} {policy['name']}, or make its pattern leave {queue} out",
    )


def effect(look: BrokerLook, queue: str, key: str, value: Any) -> tuple[Severity, str] | None:  # noqa: PLR0911  # one per key
    """How bad a key is on a queue, and why. What the queue's own arguments override is left out."""
    quarantine = queue == QUARANTINE_QUEUE
    if key in MIRRORS:
        return Severity.WARNING, "a leftover of classic mirrored queues; quorum queues ignore it, RabbitMQ 4 refuses it"
    if quarantine and key in ("message-ttl", "expires", *LIMITS):
        return Severity.ERROR, "dead letters, the second trace of a quarantined job, would be lost or refused"
    if key == "message-ttl":
        return Severity.ERROR, "wake-up calls that wait go to the quarantine queue, and are sent again for ever"
    if key == "expires":
        return Severity.WARNING, "the broker deletes the queue when no worker runs for a while"
    if key == "max-length" and value < look.settings.window:
        return Severity.ERROR, f"the relay keeps up to {look.settings.window} messages there (DEADSURE_WINDOW)"
    if key in LIMITS:
        return Severity.WARNING, "a full queue refuses what the relay sends"
    if key == "delivery-limit":
        return limit(look, value)
    if quarantine and key == "dead-letter-exchange":
        return Severity.WARNING, "dead letters that the intake cannot take would move on"
    return None


def limit(look: BrokerLook, value: int) -> tuple[Severity, str] | None:
    """A delivery limit below our own crash limit ends a job's deliveries before its budget is spent."""
    crashes = max((known.max_crashes for known in look.types.values()), default=0)
    if 0 <= value < min(WORK_ARGUMENTS["x-delivery-limit"], crashes + 1):
        return Severity.WARNING, f"the broker gives messages up before a job has crashed {crashes} times (max_crashes)"
    return None


CHECKS = (policies,)
