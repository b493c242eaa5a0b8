"""The thread of the periodic jobs: looks at each tick, at least every `LOOK_S` seconds, and submits what is due."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime

import psycopg2
from psycopg2.extensions import connection as PgConnection
from pydantic import ValidationError

from app.clock import boottime_s, pause_s
from app.errors import invalid
from app.failures import account
from app.journal import log
from app.periodic import Due, Entry, due, look, submit_due
from db.session import connect, rows

LOOK_S = 10.0  # the database's clock may be set: no wait is longer
PLAIN = "plain"  # the schedule of a plain task's row
PLAIN_RUNS = "SELECT name, last_tick FROM periodic_ticks WHERE schedule = %(plain)s AND name = ANY(%(names)s)"
PLAIN_RUN = """
INSERT INTO periodic_ticks (name, schedule, last_tick)
SELECT name, %(plain)s, clock_timestamp() FROM unnest(%(names)s::text[]) AS run (name)
ON CONFLICT (name, schedule) DO UPDATE SET last_tick = excluded.last_tick, changed_at = clock_timestamp()
"""


class Ticker(threading.Thread):
    """Every beat runs one; two that see the same tick submit one job."""

    def __init__(self, database_url: str, entries: Sequence[Entry]) -> None:
        super().__init__(name="deadsure-ticker", daemon=True)
        self._url, self._entries = database_url, entries
        self._stopped = threading.Event()
        self._told: dict[str, datetime] = {}
        self._plain_runs: set[str] = set()

    def stop(self) -> None:
        """End after the entry at hand."""
        self._stopped.set()
        if self.is_alive():
            self.join(timeout=10)

    def plain_runs(self, names: list[str]) -> dict[str, datetime]:
        """When plain entries were sent last, by any beat; empty when the database is away: they begin anew."""
        try:
            with closing(connect(self._url, "deadsure start", statement_timeout_s=5)) as connection:
                found = rows(connection, PLAIN_RUNS, {"plain": PLAIN, "names": names}) if names else []
        except psycopg2.Error:
            return {}
        return {name: last.astimezone(UTC) for name, last in found}

    def note_plain_run(self, name: str) -> None:
        """A plain entry is sent now: written with the next look."""
        self._plain_runs.add(name)

    def run(self) -> None:
        """Look until stopped; pause and connect again when the database is away. No tick is lost by that."""
        connection: PgConnection | None = None
        tries = 0
        while not self._stopped.is_set():
            try:
                if connection is None or connection.closed:
                    connection = connect(self._url, "deadsure beat", statement_timeout_s=30)
                wait_s = self._look(connection)
                tries = 0
            except Exception as error:  # noqa: BLE001  # whatever broke, the next look finds all that is due
                away = isinstance(error, psycopg2.OperationalError | psycopg2.InterfaceError)
                log.log(
                    30 if tries == 0 else 20,
                    "periodic.interrupted",
                    error=type(error).__name__,
                    reason="the database is away" if away else account(error)[0],
                    consequence="beat looks again; no tick is lost",
                )
                if connection is not None:
                    connection.close()
                wait_s = pause_s(tries, 0.2, 5.0)
                tries += 1
            self._stopped.wait(wait_s)
        if connection is not None:
            connection.close()

    def _look(self, connection: PgConnection) -> float:
        """Submit what is due; seconds until the next tick, at most `LOOK_S`."""
        self._write_plain_runs(connection)
        looked_at = boottime_s()
        seen = look(connection, self._entries)
        next_ticks = [tick for entry in self._entries if (tick := entry.ticks.after(seen.now)) is not None]
        for entry in self._entries:
            last = seen.last.get((entry.name, entry.schedule))
            what = due(entry, last, seen.now) if last is not None else None
            if last is not None and what is not None and not self._stopped.is_set():
                self._submit(connection, entry, last, what)
        soonest_s = min(((tick - seen.now).total_seconds() for tick in next_ticks), default=LOOK_S)
        return max(0.0, min(soonest_s, LOOK_S) - (boottime_s() - looked_at))

    def _submit(self, connection: PgConnection, entry: Entry, last: datetime, what: Due) -> None:
        told = {"entry": entry.name, "tick": what.reach.isoformat()}
        try:
            created = submit_due(connection, entry, last, what)
        except (psycopg2.OperationalError, psycopg2.InterfaceError):
            raise
        except Exception as error:  # noqa: BLE001  # one entry's payload must not stop the others
            if self._told.get(entry.name) != what.reach:
                reason = invalid(error) if isinstance(error, ValidationError) else account(error)[0]
                log.error("periodic.failed", **told, reason=reason, consequence="it is tried again, the others run")
            self._told[entry.name] = what.reach
            return
        if created is None:
            return
        if what.left_out:
            log.warning("periodic.left_out", **told, since=last.isoformat(), policy=entry.catch_up.value)
        if what.ticks:
            log.info("periodic.submitted", **told, ticks=len(what.ticks), new=created)

    def _write_plain_runs(self, connection: PgConnection) -> None:
        runs = sorted(self._plain_runs)
        if runs:
            rows(connection, PLAIN_RUN, {"plain": PLAIN, "names": runs})
            self._plain_runs.difference_update(runs)
