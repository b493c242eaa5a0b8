"""Redis/Valkey itself: what it may throw away, what a restart loses, when it gives a delivery to somebody else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from redis.exceptions import ResponseError

from app.checks.finding import Finding, error, info, ok, warning
from tasks.checks.redis_look import RedisLook

FULL = 0.8


def server(look: RedisLook) -> Iterator[Finding]:
    """Eviction, persistence, a replica, a full memory."""
    told: dict[str, Any] = {}
    for section in ("server", "memory", "persistence", "replication"):
        told |= look.channel.client.info(section)
    policy, limit = told.get("maxmemory_policy", "noeviction"), int(told.get("maxmemory", 0))
    if policy != "noeviction":
        tell = error if limit else warning
        bound = f"maxmemory is {limit} bytes" if limit else "no maxmemory is set yet"
        what = f"maxmemory-policy is {policy} ({bound}): the server throws queues away when its memory is full"
        yield tell("redis.eviction", what, "CONFIG SET maxmemory-policy noeviction, and in its configuration file")
    else:
        yield ok("redis.eviction", "the server evicts nothing")
    if limit and int(told.get("used_memory", 0)) > FULL * limit:
        what = f"{told['used_memory']} of maxmemory {limit} bytes are used: a full server takes no messages"
        yield warning("redis.memory", what, "raise maxmemory")
    if told.get("role") not in (None, "master"):
        yield error("redis.replica", "BROKER_URL names a replica, which takes no messages", "name the primary")
    if told.get("rdb_last_bgsave_status") != "ok" or told.get("aof_last_write_status", "ok") != "ok":
        yield warning("redis.disk", "the server could not write to its disk, and may refuse writes", "look at its log")
    yield persistence(look, told)


def persistence(look: RedisLook, told: Mapping[str, Any]) -> Finding:
    """What a restart of the server loses; the debts bring it back after their resend gap."""
    if told.get("aof_enabled"):
        return ok("redis.persistence", "an append-only file keeps the messages over a restart")
    save = None
    with suppress(ResponseError):  # a managed server forbids CONFIG
        save = look.channel.client.config_get("save").get("save")
    kept = (
        f"snapshots only (save {save})" if save else "no append-only file" + ("" if save is None else ", no snapshots")
    )
    return info(
        "redis.persistence",
        f"{kept}: a restart loses messages, and their jobs start when the debts are sent again",
        "appendonly yes",
    )


def visibility_timeout(look: RedisLook) -> Iterator[Finding]:
    """Redis/Valkey gives a delivery to another worker after this time, whoever still works on it (C20)."""
    timeout_s = float(look.options.get("visibility_timeout", 3600))
    longest = max(look.types.values(), key=lambda known: known.time_limit_s, default=None)
    if longest is not None and timeout_s <= longest.time_limit_s:
        yield warning(
            "redis.visibility_timeout",
            f"visibility_timeout is {timeout_s:g} s and {longest.name} may run for {longest.time_limit_s:g} s: its "
            "message is delivered again meanwhile (and finds the job owned)",
            "raise visibility_timeout in broker_transport_options of celeryconfig.py",
        )
    else:
        limit_s = longest.time_limit_s if longest else 0
        what = f"visibility_timeout is {timeout_s:g} s, the longest type has {limit_s:g} s"
        yield ok("redis.visibility_timeout", what)


CHECKS = (server, visibility_timeout)
