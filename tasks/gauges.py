"""The present state of a process at scrape time: its loops, its lease, its consumer. Read from memory, never asked for.

An age is how long ago something last went well; it starts with the process, so that what never went well shows too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from celery.worker import state
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from app.clock import boottime_s
from tasks.intake import Intake
from tasks.relay import Relay
from tasks.sweeper import SweeperThread

if TYPE_CHECKING:
    from tasks.services import Services

Loop = Relay | Intake | SweeperThread


class LoopGauges(Collector):
    """How long ago relay, intake and sweeper last finished a round; a loop that this process does not run is absent."""

    def __init__(self, **loops: Loop | None) -> None:
        self._loops: Mapping[str, Loop | None] = loops

    def describe(self) -> Iterable[Metric]:
        """Nothing before the first scrape."""
        return []

    def collect(self) -> Iterable[Metric]:
        """One age for each loop."""
        for name, loop in self._loops.items():
            if loop is not None:
                yield GaugeMetricFamily(
                    f"deadsure_{name}_last_success_age_seconds",
                    f"Since the {name} last finished a round without an error.",
                    boottime_s() - loop.succeeded_at,
                )


class WorkerGauges(Collector):
    """What only a worker has."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def describe(self) -> Iterable[Metric]:
        """Nothing before the first scrape."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Consumer, pool, lease and drain."""
        services, now = self._services, boottime_s()
        consumed = GaugeMetricFamily(
            "deadsure_worker_last_message_age_seconds",
            "Since this worker last took a message from the queue, or began to consume it.",
            labels=["queue"],
        )
        for queue, at in services.consumed_at.items():
            consumed.add_metric([queue], now - at)
        yield consumed
        for name, documentation, value in (
            ("processes", "Processes of the pool.", services.processes()),
            ("active_jobs", "Deliveries that the pool works on.", len(state.active_requests)),
            ("held_deliveries", "Deliveries that wait for the database to be settled.", services.settler.waiting()),
            (
                "draining",
                "1 once the worker was asked to stop: it only finishes what runs.",
                services.leaving,
            ),
            (
                "lease_remaining_seconds",
                "How long the worker may trust its lease without another renewal.",
                max(0.0, services.keeper.shared.read()[1] - now),
            ),
        ):
            yield GaugeMetricFamily(f"deadsure_worker_{name}", documentation, value)
