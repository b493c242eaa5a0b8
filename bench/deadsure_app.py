"""The same jobs as durable ones: `celery -A bench.deadsure_app worker`."""

from __future__ import annotations

import os
import time
from pathlib import Path

from psycopg2.extensions import connection as PgConnection
from pydantic import BaseModel

from app.job import Job
from app.settings import settings
from bench import effects
from db.session import connect
from tasks import app
from tasks.durable import durable

if path := os.environ.get("BENCH_ENDS"):
    effects.note_ends(Path(path))

_connections: dict[int, PgConnection] = {}


class Number(BaseModel):
    """Tells jobs apart."""

    n: int


def write(job: Job, n: int) -> None:
    """The effect, in the finishing transaction."""
    job.execute(effects.EFFECT, (n,))


def work(n: int) -> None:
    """Two seconds of it at the first start. The start is recorded on a connection of its own."""
    pid = os.getpid()
    if pid not in _connections:
        _connections[pid] = connect(settings().need_database(), "bench")
    if effects.first_start(_connections[pid], n):
        time.sleep(effects.SLEEP_S)


@durable("bench.atomic", payload=Number, mode="atomic", time_limit_s=30)
def atomic(job: Job, payload: Number) -> None:
    """One row, in one commit with the claim and the success."""
    write(job, payload.n)


@durable("bench.atomic_alone", payload=Number, mode="atomic", time_limit_s=30, coalesce=1)
def atomic_alone(job: Job, payload: Number) -> None:
    """`atomic`, one job to a delivery however many wait."""
    write(job, payload.n)


@durable("bench.leased", payload=Number, mode="leased")
def leased(job: Job, payload: Number) -> None:
    """One row, committed with the success; the claim was committed before."""
    write(job, payload.n)


@durable("bench.atomic_sleepy", payload=Number, mode="atomic", time_limit_s=30)
def atomic_sleepy(job: Job, payload: Number) -> None:
    """`atomic` after two seconds."""
    work(payload.n)
    write(job, payload.n)


@durable("bench.leased_sleepy", payload=Number, mode="leased")
def leased_sleepy(job: Job, payload: Number) -> None:
    """`leased` after two seconds."""
    work(payload.n)
    write(job, payload.n)


TASKS = {
    "deadsure-atomic": {"effect": atomic, "sleepy": atomic_sleepy},
    "deadsure-atomic-alone": {"effect": atomic_alone, "sleepy": atomic_sleepy},
    "deadsure-leased": {"effect": leased, "sleepy": leased_sleepy},
}
__all__ = ["TASKS", "app"]
