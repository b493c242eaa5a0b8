"""The cluster behind the queues: alarms, members, versions, and how long it lets a delivery wait."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from app.checks.finding import Finding, error, info, ok, warning
from tasks.checks.broker_look import BrokerLook
from tasks.topology import QUARANTINE_QUEUE

MEMBERS = 3  # a quorum queue with fewer members survives the loss of none
AT_LEAST_ONCE_SINCE = (3, 10)
LOCAL = ("localhost", "127.0.0.1", "::1")
DEFAULT_CONSUMER_TIMEOUT_S = 1800.0
CONSUMER_TIMEOUT = re.compile(r"^\s*consumer_timeout\s*=\s*(\d+)\s*$", re.MULTILINE)


def version(look: BrokerLook) -> Iterator[Finding]:
    """Whether the broker can do what the queues ask for, as it says itself when we connect."""
    properties = look.broker.connection.server_properties
    found = str(properties.get("version", ""))
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:2])
    if not properties.get("capabilities", {}).get("publisher_confirms"):
        yield error("broker.confirms", "the broker gives no publisher confirms: sent is not kept", "use RabbitMQ")
    if properties.get("product") == "RabbitMQ" and numbers < AT_LEAST_ONCE_SINCE:
        yield error(
            "broker.version", f"RabbitMQ {found} cannot dead-letter at least once", "upgrade to RabbitMQ 3.10 or later"
        )
    else:
        yield ok("broker.version", f"{properties.get('product')} {found}, publisher confirms")


def alarms(look: BrokerLook) -> Iterator[Finding]:
    """An alarm blocks everybody who publishes; a node that is away takes its queue members with it."""
    if look.management is None:
        return
    alarmed = False
    for node in look.management.nodes():
        raised = [word for word in ("mem_alarm", "disk_free_alarm") if node.get(word)]
        alarmed = alarmed or bool(raised) or not node["running"] or bool(node.get("partitions"))
        for word in raised:
            what = "memory" if word == "mem_alarm" else "disk"
            yield error(
                f"broker.{what}_alarm",
                f"node {node['name']} has raised its {what} alarm: it takes no messages, jobs wait in the database",
                f"give it more {what}, or find who uses it (rabbitmq-diagnostics alarms)",
            )
        if not node["running"]:
            yield warning("broker.node_down", f"node {node['name']} does not run", "start it again")
        if node.get("partitions"):
            away = ", ".join(node["partitions"])
            yield error("broker.partition", f"node {node['name']} is cut off from {away}", "heal the network")
    if not alarmed:
        yield ok("broker.alarms", "no node has raised an alarm")


def members(look: BrokerLook) -> Iterator[Finding]:
    """Where the quorum queues are kept."""
    if look.management is None:
        return
    few: dict[int, list[str]] = {}
    for name in (*look.work_queues, QUARANTINE_QUEUE):
        found: dict[str, Any] = look.management.queue(name) if look.queues[name] is not None else {}
        everywhere, online = found.get("members"), found.get("online")
        if everywhere is None or online is None:
            continue
        if 2 * len(online) <= len(everywhere):
            yield error(
                "queue.no_quorum",
                f"queue {name} has {len(online)} of {len(everywhere)} members online: it stands still",
                "start the nodes again that hold the others",
            )
        elif len(online) < len(everywhere):
            what = f"queue {name} has {len(online)} of {len(everywhere)} members online"
            yield warning("queue.members_offline", what, "start the nodes again that hold the others")
        if len(everywhere) < MEMBERS:
            few.setdefault(len(everywhere), []).append(name)
    for count, names in few.items():
        yield info(
            "queue.few_members",
            f"{', '.join(names)}: {count} member{'s' if count > 1 else ''} each; the loss of a node stops them "
            "(the jobs are in the database)",
            f"run {MEMBERS} nodes, then rabbitmq-queues grow NODE all",
        )


def consumer_timeout(look: BrokerLook) -> Iterator[Finding]:
    """The broker closes the channel of whoever holds a delivery for longer (C13)."""
    if look.management is None:
        return
    timeout_s, source = known_timeout(look)
    longest = max(look.types.values(), key=lambda known: known.time_limit_s, default=None)
    limit_s = longest.time_limit_s if longest else 0.0
    held = f"consumer_timeout is {timeout_s:g} s ({source})"
    name = longest.name if longest else "no type"
    if timeout_s <= limit_s + look.settings.lease_s:
        yield warning(
            "broker.consumer_timeout",
            f"{held}, and {name} may run for {limit_s:g} s (time_limit_s) plus a lease of {look.settings.lease_s:g} s: "
            "the broker closes the channel under it; the job still finishes once, but all that its worker holds is "
            "sent again",
            f"set consumer_timeout = {round(1000 * 2 * (limit_s + look.settings.lease_s))} in rabbitmq.conf, or lower "
            f"time_limit_s of {name}",
        )
    else:
        yield ok("broker.consumer_timeout", f"{held}, the longest type is {name} with {limit_s:g} s")


def known_timeout(look: BrokerLook) -> tuple[float, str]:
    """consumer_timeout in seconds and how it is known: no API tells what rabbitmq.conf says."""
    assert look.management is not None
    by_policy = [
        policy["definition"]["consumer-timeout"] / 1000
        for name in look.work_queues
        for policy in look.management.policies_of(name, "quorum")
        if "consumer-timeout" in policy["definition"]
    ]
    if by_policy:
        return min(by_policy), "by a policy"
    local = urlsplit(look.settings.broker_url).hostname in LOCAL
    for path in (path for node in look.management.nodes() if local for path in node.get("config_files", ())):
        with suppress(OSError, UnicodeDecodeError):
            found = CONSUMER_TIMEOUT.findall(Path(path).read_text())
            if found:
                return int(found[-1]) / 1000, f"as {Path(path).name} says"
    if look.settings.consumer_timeout_s != DEFAULT_CONSUMER_TIMEOUT_S:
        return look.settings.consumer_timeout_s, "as DEADSURE_CONSUMER_TIMEOUT_S says"
    return DEFAULT_CONSUMER_TIMEOUT_S, "RabbitMQ's default; the broker does not tell, DEADSURE_CONSUMER_TIMEOUT_S can"


CHECKS = (version, alarms, members, consumer_timeout)
