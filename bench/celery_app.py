"""Plain Celery as one sets it up to lose nothing: late acks, quorum queue, publisher confirms."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psycopg2
from celery import Celery
from kombu import Exchange, Queue
from psycopg2.extensions import connection as PgConnection

from bench import effects
from db.session import dsn

app = Celery("bench")
app.conf.update(
    broker_url=os.environ["BROKER_URL"],
    broker_transport_options={"confirm_publish": True},
    broker_connection_retry_on_startup=True,
    task_queues=[Queue("bench", Exchange("bench"), "bench", queue_arguments={"x-queue-type": "quorum"})],
    task_default_queue="bench",
    task_default_exchange="bench",
    task_default_routing_key="bench",
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    task_ignore_result=True,
    worker_prefetch_multiplier=4,
    worker_hijack_root_logger=False,
)
if path := os.environ.get("BENCH_ENDS"):
    effects.note_ends(Path(path))

_connections: dict[int, PgConnection] = {}


def connection() -> PgConnection:
    """This process' connection, in autocommit: one round trip writes and commits the effect."""
    pid = os.getpid()
    if pid not in _connections:
        _connections[pid] = psycopg2.connect(dsn(os.environ["DATABASE_URL"]))
        _connections[pid].autocommit = True
    return _connections[pid]


@app.task(name="bench.effect")
def effect(n: int) -> None:
    """One committed row."""
    with connection().cursor() as cursor:
        cursor.execute(effects.EFFECT, (n,))


@app.task(name="bench.sleepy")
def sleepy(n: int) -> None:
    """The same, after two seconds of work at the first start."""
    if effects.first_start(connection(), n):
        time.sleep(effects.SLEEP_S)
    effect(n)


TASKS = {"celery": {"effect": effect, "sleepy": sleepy}}
