"""The HTTP endpoint that Prometheus scrapes: `/metrics` on `DEADSURE_METRICS_PORT`, on loopback unless told otherwise.

It has no authentication, as Prometheus' own exporters have none. It shows names of job types and queues, and numbers.
What is wrong with it never ends a worker.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from contextlib import suppress
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, disable_created_metrics, start_http_server
from prometheus_client.registry import Collector

from app.journal import log
from app.metrics import counts
from app.metrics.database import DatabaseFigures
from app.metrics.figures import read
from app.settings import Settings


class Endpoint:
    """One process' endpoint; without a port set, none."""

    def __init__(self, settings: Settings, queues: list[str], collectors: Iterable[Collector]) -> None:
        self._settings = settings
        self._server: WSGIServer | None = None
        self._figures = DatabaseFigures(
            settings.need_database(),
            settings.metrics_refresh_s,
            lambda connection: read(connection, queues, settings.window, 2 * settings.resend_first_s),
        )
        self._collectors = [counts.COUNTS, self._figures, *collectors]

    def start(self) -> int | None:
        """Serve from threads of its own; the port, or None when none was wanted or it cannot be had."""
        host, port = self._settings.metrics_host, self._settings.metrics_port
        if port is None:
            return None
        disable_created_metrics()  # a second series beside each counter, which no rule of ours reads
        counts.begin()
        registry = CollectorRegistry()
        for collector in self._collectors:
            registry.register(collector)
        try:
            self._server, _ = start_http_server(port, host, registry)
        except (OSError, OverflowError) as error:
            taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            log.error(
                "metrics.port_taken" if taken else "metrics.not_served",
                host=host,
                port=port,
                error=str(error),
                consequence="this process works on and is not scraped",
                next_step="give each process on this host a DEADSURE_METRICS_PORT of its own (0 takes a free one and "
                "logs it)"
                if taken
                else "look at DEADSURE_METRICS_HOST and DEADSURE_METRICS_PORT",
            )
            return None
        bound: int = self._server.server_port
        log.info("metrics.serving", host=host, port=bound, url=f"http://{host}:{bound}/metrics")
        return bound

    def stop(self) -> None:
        """Close the port; a scrape at hand is answered."""
        self._figures.stop()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def disown(self) -> None:
        """In a forked child: a process that outlives the worker must not hold its port."""
        if self._server is not None:
            with suppress(OSError):
                os.close(self._server.socket.detach())
