"""What runs beside Celery in a worker: lease, journal, settler, sweeper, relay, intake. In its main process.

Order at start: the schema is checked and the lease registered before the pool forks, so that every child knows its
worker; threads start after the fork. Order at the end: the pool has stopped before the lease is given back.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import billiard
import click
import psycopg2
from amqp.exceptions import AccessRefused, NotAllowed, PreconditionFailed
from celery import bootsteps, signals
from celery.apps.worker import safe_say
from celery.worker import state

from app.clock import pause_s
from app.errors import ConfigurationError
from app.job_types import REGISTRY, queues
from app.journal import configure_logging, log
from app.lease import Keeper
from app.settings import settings
from db.migrate import SchemaError, check
from db.session import connect, disown_inherited
from tasks.application import app
from tasks.consumer import NoteSettlements
from tasks.endings import Briefly
from tasks.leaver import Leaver
from tasks.limits import count_the_handler_alone
from tasks.progress import TellProgress
from tasks.publisher import Publisher
from tasks.services import begin_services, end_services, services

leavers: list[Leaver] = []


@signals.setup_logging.connect
def set_up_logging(loglevel: int | str | None = None, **_: Any) -> None:
    """Celery's and our log lines in one form; the level is the command line's."""
    configure_logging(settings().log, loglevel or settings().log_level)
    logging.getLogger("celery.app.trace").addFilter(Briefly())


@signals.worker_init.connect
def register_worker(sender: Any = None, instance: Any = None, **_: Any) -> None:
    """Check the configuration and the schema, then register the lease; wait for a database that is away."""
    configure_logging(settings().log, settings().log_level)
    try:
        settings().need_broker()
        url = settings().need_database()
        knows = sorted(f"{name}@{version}" for name, version in REGISTRY)
        keeper = Keeper(settings(), getattr(instance, "hostname", None) or str(sender), knows, accepts())
        tries = 0
        while True:
            try:
                connection = connect(url, "deadsure start")
                check(connection)
                connection.close()
                check_topology()
                keeper.start_lease()
                break
            except psycopg2.OperationalError as error:
                log.warning(
                    "database.away",
                    error=type(error).__name__,
                    detail=str(error).strip().splitlines()[0],  # libpq's words: host, port, and what is wrong
                    consequence="the worker waits for it before it takes jobs",
                )
                time.sleep(pause_s(tries, 0.5, 5.0))
                tries += 1
    except (ConfigurationError, SchemaError) as error:
        click.echo(f"deadsure: {error}", err=True)
        sys.exit(78)  # EX_CONFIG: a supervisor's restart does not help
    begin_services(keeper)


def accepts() -> list[str]:
    """What messages without a job this worker can read: foreign ones of job types, and those of plain tasks."""
    foreign = [f"{name}@{version}" for (name, version), job_type in REGISTRY.items() if job_type.foreign]
    durable = {name for name, _ in REGISTRY}
    return sorted(foreign + [name for name in app.tasks if name not in durable])


def check_topology() -> None:
    """Raise ConfigurationError when a queue exists with other arguments; a broker that is away is waited for later."""
    publisher = Publisher(settings().need_broker(), queues(), settings().confirm_timeout_s)
    try:
        publisher.open()
    except PreconditionFailed as error:
        raise ConfigurationError(
            f"the broker has a queue with other arguments than this release declares ({error.reply_text}); stop the "
            "workers and delete it (rabbitmqctl delete_queue NAME): its jobs are in the database and are sent again"
        ) from error
    except (AccessRefused, NotAllowed) as error:
        raise ConfigurationError(f"the broker refuses the user or virtual host of BROKER_URL ({error.code})") from None
    except publisher.errors:
        log.warning("broker.away", consequence="the worker starts, and connects when the broker is back")
    finally:
        publisher.close()


@signals.worker_process_init.connect
def enter_child(**_: Any) -> None:
    """In a child: let go of what is the main process' own: database sockets, port, its look at dead children."""
    disown_inherited()
    if (endpoint := services().endpoint) is not None:
        endpoint.disown()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


@signals.worker_shutting_down.connect
def begin_to_leave(**_: Any) -> None:
    """On SIGTERM or SIGINT, in the signal's handler: tell the children, and start the grace."""
    present = services()
    if present.leaving:
        leavers[0].hurry()
        return
    present.leaving = True
    present.keeper.shared.leave()
    leavers.append(Leaver(settings().shutdown_grace_s))
    leavers[0].start()


def catch_signals() -> None:
    """Let SIGINT mean what SIGTERM means, and SIGQUIT or a second SIGINT end the grace: Celery's cold shutdown hangs.

    That one cancels the requests and then waits in the signal's handler for the children, who wait for their jobs.
    Celery puts it in place as soon as it has heard a first SIGINT, so that one must be ours too.
    """

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if billiard.current_process().name != "MainProcess":
            return
        begin_to_leave()
        if number == signal.SIGQUIT:
            leavers[0].hurry()
        safe_say("worker: Warm shutdown (MainProcess); Ctrl-C again takes running jobs back at once", sys.__stdout__)
        state.should_stop = state.should_stop or 0

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, on_signal)
        signal.signal(signal.SIGQUIT, on_signal)


@signals.worker_shutdown.connect
def leave(**_: Any) -> None:
    """After pool and consumer have stopped: write the last notes, give the lease back."""
    end_services()


def notice_dead_children(hub: Any, look: Callable[[], Any]) -> None:
    """Look at the pool as soon as a child ends.

    billiard watches a pipe whose other end the siblings hold open too, so it would notice only at its next round, up to
    five seconds later.
    """

    def on_child(_number: int, _frame: FrameType | None) -> None:
        # From another thread: only that wakes the event loop, which this very handler has interrupted in its sleep.
        threading.Thread(target=hub.call_soon, args=(look,), daemon=True).start()

    signal.signal(signal.SIGCHLD, on_child)


class DurableServices(bootsteps.StartStopStep):
    """Starts the threads after the pool has forked its children."""

    requires = ("celery.worker.components:Pool",)

    def __init__(self, parent: Any, without_relay: bool = False, **options: Any) -> None:
        super().__init__(parent, **options)
        self._with_relay = not without_relay

    def start(self, parent: Any) -> None:
        """Start the services' threads."""
        services().consume(app.amqp.queues.consume_from, lambda: parent.pool.num_processes)
        services().start(self._with_relay)
        catch_signals()
        hub = getattr(parent, "hub", None)
        if hub is not None and hasattr(parent.pool, "maintain_pool"):
            notice_dead_children(hub, parent.pool.maintain_pool)
        if hub is not None and hasattr(getattr(parent.pool, "_pool", None), "_on_hard_timeout"):
            prefork = parent.pool._pool  # noqa: SLF001  # Celery's name for billiard's pool
            count_the_handler_alone(prefork, hub, services().clocks, services().keeper.outages)


app.steps["worker"].add(DurableServices)
app.steps["consumer"].add(NoteSettlements)
app.steps["consumer"].add(TellProgress)
app.user_options["worker"].add(
    click.Option(
        ["--without-relay"],
        is_flag=True,
        help="Run neither relay nor intake in this worker; run `deadsure relay` elsewhere.",
    )
)
