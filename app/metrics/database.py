"""The database's figures at scrape time, cached, read by a thread of their own.

Promise: an answer within `ANSWER_S`, whatever the database does, and one set of queries in `refresh_s` at most, however
often and by however many it is scraped. When the database is away or slow the figures are absent, not old, and
`deadsure_database_up` is 0. Without scrapes there are no queries.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import psycopg2
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from psycopg2.extensions import connection as PgConnection

from app.clock import boottime_s
from app.journal import log
from db.session import connect

ANSWER_S = 2.0
STATEMENT_S = 5.0
Read = Callable[[PgConnection], list[Metric]]


class DatabaseFigures(Collector):
    """Figures of the database, not older than `refresh_s` seconds."""

    def __init__(self, url: str, refresh_s: float, read: Read) -> None:
        self._url, self._refresh_s, self._read = url, refresh_s, read
        self._changed = threading.Condition()
        self._wanted, self._stopped = False, False
        self._figures: list[Metric] | None = None
        self._read_at: float | None = None
        self._thread: threading.Thread | None = None

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not ask the database."""
        return []

    def collect(self) -> Iterable[Metric]:
        """The figures, or that there are none."""
        figures = self._fresh()
        yield GaugeMetricFamily(
            "deadsure_database_up", "Whether the database answered this process in time.", figures is not None
        )
        yield from figures or ()

    def stop(self) -> None:
        """End the thread with the queries at hand."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _fresh(self) -> list[Metric] | None:
        with self._changed:
            if self._is_fresh():
                return self._figures
            self._wanted = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="deadsure-figures", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return self._figures if self._changed.wait_for(self._is_fresh, ANSWER_S) else None

    def _is_fresh(self) -> bool:
        return self._read_at is not None and boottime_s() - self._read_at < self._refresh_s

    def _run(self) -> None:
        connection: PgConnection | None = None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted or self._stopped)
                if self._stopped:
                    break
            figures = None
            try:
                if connection is None or connection.closed:
                    connection = connect(self._url, "deadsure metrics", statement_timeout_s=STATEMENT_S)
                figures = self._read(connection)
            except psycopg2.Error as error:
                log.warning("metrics.no_figures", error=type(error).__name__)
                if connection is not None:
                    connection.close()
            with self._changed:
                # Whoever asked meanwhile is answered too.
                self._figures, self._read_at, self._wanted = figures, boottime_s(), False
                self._changed.notify_all()
        if connection is not None:
            connection.close()
