"""What a worker that is started here would do: how much it holds, and whether it waits for confirms."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.checks.finding import Finding, ok, warning
from app.settings import Settings

CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
SHARE = 0.25
MIB = 1 << 20


@dataclass(frozen=True)
class WorkerLook:
    """The configuration; `options` are Celery's `broker_transport_options`, `concurrency` is None for one per core."""

    settings: Settings
    options: Mapping[str, Any]
    concurrency: int | None


def prefetch(look: WorkerLook) -> Iterator[Finding]:
    """A worker holds `prefetch` deliveries for each child; those of foreign clients carry their payload."""
    settings, concurrency = look.settings, look.concurrency or os.cpu_count() or 1
    held = settings.prefetch * concurrency * settings.payload_limit
    memory = memory_bytes()
    sizes = (
        f"prefetch {settings.prefetch} x {concurrency} processes x {settings.payload_limit} bytes (payload limit) = "
        f"{held / MIB:.1f} MiB"
    )
    if held > memory * SHARE:
        yield warning(
            "worker.prefetch_memory",
            f"{sizes}, more than a quarter of this host's {memory / MIB:.0f} MiB",
            "lower DEADSURE_PREFETCH or DEADSURE_PAYLOAD_LIMIT",
        )
    else:
        yield ok("worker.prefetch_memory", f"{sizes}, of this host's {memory / MIB:.0f} MiB")


def confirms(look: WorkerLook) -> Iterator[Finding]:
    """The relay always waits for confirms; plain Celery tasks do so by this setting."""
    if look.settings.broker_is_amqp and not look.options.get("confirm_publish"):
        yield warning(
            "worker.confirm_publish",
            "confirm_publish is off: a plain Celery task may be lost on its way to the broker",
            'broker_transport_options = {"confirm_publish": True} in celeryconfig.py',
        )


def memory_bytes() -> int:
    """Memory of this host or container."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in CGROUP_LIMITS:
        with suppress(OSError, ValueError):  # "max" is no number
            total = min(total, int(Path(path).read_text()))
    return total


CHECKS = (prefetch, confirms)
