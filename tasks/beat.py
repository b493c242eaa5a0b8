"""`celery -A tasks beat`: durable entries by the database's clock, plain ones as in Celery, in one process.

Durable entries have a thread of their own: they need the database and no broker, plain ones need the broker and no
database, and neither outage may hold up the other. Any number of beats may run; the table `periodic_ticks` is what they
agree on, so there is no schedule file.
"""

from __future__ import annotations

import sys
from typing import Any

import click
import psycopg2
from celery.beat import ScheduleEntry, Scheduler

from app.errors import ConfigurationError
from app.journal import log
from app.settings import settings
from db.migrate import SchemaError, check
from db.session import connect
from tasks.schedule import Schedule, read
from tasks.ticker import LOOK_S, Ticker

EX_CONFIG = 78  # a supervisor's restart does not help


class DurableScheduler(Scheduler):
    """Celery's scheduler for the plain entries, beside the ticker of the durable ones."""

    _ticker: Ticker | None = None

    def setup_schedule(self) -> None:
        """Read the schedule and start the ticker; exits when nothing of it can be used."""
        found = read(self.app)
        for name, why in found.wrong.items():
            log.error("periodic.refused", entry=name, reason=why, consequence="it is left out, the others run")
        if found.wrong and not found.durable and not found.plain:
            refuse("no entry of beat_schedule can be used; the log names each and what is wrong with it")
        self.install_default_entries(self.data)
        self.merge_inplace(found.plain)
        self._ticker = started(found)
        for name, last in self._ticker.plain_runs(list(found.plain)).items():
            self.schedule[name].last_run_at = last

    def reserve(self, entry: ScheduleEntry) -> ScheduleEntry:
        """As in Celery; the time of a plain run is kept in the database instead of a file."""
        reserved = super().reserve(entry)
        if self._ticker is not None:
            self._ticker.note_plain_run(entry.name)
        return reserved

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Send what is due of the plain entries; seconds until the next look."""
        if self._ticker is not None and not self._ticker.is_alive():
            raise RuntimeError("the thread of the periodic jobs has ended")  # the supervisor starts beat again
        wait_s: float = super().tick(*args, **kwargs)
        return min(wait_s, LOOK_S)

    def close(self) -> None:
        """Stop the ticker after the entry at hand."""
        if self._ticker is not None:
            self._ticker.stop()
        super().close()

    @property
    def info(self) -> str:
        """What the banner says of the place where the schedule is kept."""
        return "    . ticks -> table periodic_ticks"


def started(found: Schedule) -> Ticker:
    """The ticker, running; exits when the configuration or the schema is not what it needs."""
    try:
        url = settings().need_database()
        connection = connect(url, "deadsure start")
        check(connection)
        connection.close()
    except psycopg2.OperationalError as error:
        log.warning("database.away", error=type(error).__name__, consequence="beat waits for it; no tick is lost")
    except (ConfigurationError, SchemaError) as error:
        refuse(str(error))
    ticker = Ticker(url, found.durable)
    ticker.start()
    log.info("periodic.ready", entries={entry.name: entry.schedule for entry in found.durable}, plain=[*found.plain])
    return ticker


def refuse(why: str) -> None:
    """End beat with one line."""
    click.echo(f"deadsure: {why}", err=True)
    sys.exit(EX_CONFIG)
