"""The systems that are compared."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class System:
    """One system: the module of its Celery app, the key of its tasks there, and what it has beside plain Celery."""

    name: str
    module: str
    tasks: str
    durable: bool
    settings: str


BASELINE = "celery-rabbitmq"
SYSTEMS = {
    system.name: system
    for system in (
        System(
            BASELINE,
            "bench.celery_app",
            "celery",
            durable=False,
            settings="acks_late, reject_on_worker_lost, prefetch 4, quorum queue, confirm_publish, ignore_result",
        ),
        System(
            "deadsure-atomic",
            "bench.deadsure_app",
            "deadsure-atomic",
            durable=True,
            settings="defaults; claim, effect and success in one commit; under backlog many jobs to a delivery",
        ),
        System(
            "deadsure-atomic-alone",
            "bench.deadsure_app",
            "deadsure-atomic-alone",
            durable=True,
            settings="coalesce=1: one job to a delivery",
        ),
        System(
            "deadsure-leased",
            "bench.deadsure_app",
            "deadsure-leased",
            durable=True,
            settings="defaults; the claim is committed before the effect",
        ),
    )
}
