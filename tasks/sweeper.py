"""The sweeper's thread: every `sweep_s` one look for lost workers and ended batches, on a session of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable

import psycopg2

from app.clock import boottime_s, pause_s
from app.completion import Completer
from app.journal import log
from app.metrics import counts
from app.repair import repair
from app.settings import Settings
from app.sweep import Sweeper, Swept
from db.session import connect

FIRST_REPAIR_S, REPAIR_S = 5.0, 300.0  # it looks at every waiting job, so not every second


class SweeperThread(threading.Thread):
    """Every worker runs one; two looks at once are harmless."""

    def __init__(self, settings: Settings, on_lost: Callable[[Swept], None]) -> None:
        super().__init__(name="deadsure-sweeper", daemon=True)
        self._settings, self._on_lost = settings, on_lost
        self.succeeded_at = boottime_s()
        self._stopped = threading.Event()

    def stop(self) -> None:
        """End after the look at hand."""
        self._stopped.set()
        if self.is_alive():
            self.join(timeout=10)

    def run(self) -> None:
        """Look until stopped; pause and connect again when the database is away."""
        repair_at = boottime_s() + FIRST_REPAIR_S
        sweeper, completer, connection, tries = Sweeper(self._settings.lease_s), Completer(), None, 0
        while not self._stopped.is_set():
            try:
                if connection is None or connection.closed:
                    connection = connect(self._settings.need_database(), "deadsure sweeper", statement_timeout_s=30)
                swept = sweeper.look(connection)
                count(swept)
                if swept.lost:
                    log.info("sweep.done", workers_lost=swept.lost, jobs_expired=swept.expired)
                    self._on_lost(swept)
                completer.look(connection)
                if boottime_s() >= repair_at:
                    repair_at = boottime_s() + REPAIR_S
                    for job_id in repair(connection, self._settings.resend_first_s):
                        log.warning("job.repaired", job_id=job_id)
                        counts.REPAIRED.inc()
                self.succeeded_at = boottime_s()
                tries = 0
                wait_s = self._settings.sweep_s
            except psycopg2.Error as error:
                log.info("sweep.interrupted", error=type(error).__name__)
                if connection is not None:
                    connection.close()
                wait_s = pause_s(tries, 0.2, 5.0)
                tries += 1
            self._stopped.wait(wait_s)
        if connection is not None:
            connection.close()


def count(swept: Swept) -> None:
    """Tell the metrics what one look found."""
    for name, cause, state in swept.jobs:
        counts.of_type(name).note_crash(cause, state)
    for cause, lost in (("stalled", swept.silent), ("killed", swept.lost - swept.silent)):
        counts.WORKERS_LOST.labels(cause).inc(lost)
