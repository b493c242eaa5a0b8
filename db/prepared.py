"""Statements that PostgreSQL plans once per session: planning an arrow costs as much as running it.

A `Prepared` is the statement's text, to be run as it is anywhere. On a `PlanningConnection` that talks to the server
itself, `db.session.rows` prepares all statements of its `Plans` at their first use and sends EXECUTE instead. SQL-level
PREPARE, unlike the protocol's, fits into a message of several statements, so an arrow stays one round trip.

The trap: a plan that was made while a table was empty may read all of it, and is kept when the table has grown. So the
plans of a session are at most `PLAN_S` old: a table cannot grow much meanwhile.
"""

from __future__ import annotations

import hashlib
import re
import time
from typing import Any

from psycopg2.errors import DuplicatePreparedStatement
from psycopg2.extensions import TRANSACTION_STATUS_IDLE
from psycopg2.extensions import connection as PgConnection

PARAMETER = re.compile(r"%\((\w+)\)s")
PLAN_S = 1.0


class Prepared(str):
    """SQL text with named parameters; `executing` is what to send where its statements are prepared."""

    __slots__ = ("executing", "plans")
    executing: str
    plans: Plans

    @property
    def begins(self) -> bool:
        """Whether the message opens its own transaction, so that nothing is lost when it fails."""
        return self.lstrip().startswith("BEGIN")


class Plans:
    """The statements of one kind of session, prepared together at the first use of one of them."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._prepares: list[str] = []

    def statement(self, name: str, sql: str, **types: str) -> Prepared:
        """A statement with the PostgreSQL type of each parameter. Raises KeyError for one without a type."""
        places = {parameter: f"${place}" for place, parameter in enumerate(types, 1)}
        body = PARAMETER.sub(lambda found: places[found[1]], sql)
        # The name tells the text: two releases never mean different statements by one name.
        known_as = f"deadsure_{name}_{hashlib.sha256(body.encode()).hexdigest()[:12]}"
        self._prepares.append(f"PREPARE {known_as} ({', '.join(types.values())}) AS {body}")
        made = Prepared(sql)
        made.plans = self
        made.executing = f"EXECUTE {known_as} ({', '.join(f'%({parameter})s' for parameter in types)})"
        return made

    def message(self, template: str, **statements: Prepared) -> Prepared:
        """Several statements in one round trip; `{name}` stands for a statement."""
        made = Prepared(template.format(**statements))
        made.plans = self
        made.executing = template.format(**{name: found.executing for name, found in statements.items()})
        return made

    def prepare(self) -> str:
        """The SQL that prepares all statements of this kind of session."""
        return "; ".join(self._prepares)


class PlanningConnection(PgConnection):
    """A connection that knows what is prepared on it. Behind a pooler nothing is: its sessions are everybody's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._planned: set[str] = set()
        self._direct: bool | None = None
        self._planned_at = 0.0

    def text(self, sql: Prepared) -> str:
        """What to send for `sql`, once its statements are prepared; the plain text where they cannot be."""
        if sql.plans.kind not in self._planned:
            if self.info.transaction_status != TRANSACTION_STATUS_IDLE or not self.direct:
                return str(sql)
            try:
                with self.cursor() as cursor:
                    cursor.execute(sql.plans.prepare())
            except DuplicatePreparedStatement:  # a pooler that hands on the number of a server's process
                self.forget()
                return str(sql)
            self._planned.add(sql.plans.kind)
        if (now := time.monotonic()) - self._planned_at >= PLAN_S:
            self._planned_at = now
            return f"DISCARD PLANS; {sql.executing}"
        return sql.executing

    def plan_anew(self) -> None:
        """A column that a statement returns has another type by now: no prepared statement may change its result."""
        with self.cursor() as cursor:
            cursor.execute("DEALLOCATE ALL")
        self._planned.clear()

    def forget(self) -> None:
        """The server does not know a statement: somebody discarded them, or a pooler sits in between after all."""
        self._planned.clear()
        self._direct = False

    @property
    def direct(self) -> bool:
        """Whether the server's process is the one that answered at connect; a pooler makes up its own number."""
        if self._direct is None:
            with self.cursor() as cursor:
                cursor.execute("SELECT pg_backend_pid()")
                found = cursor.fetchone()
            self._direct = found is not None and found[0] == self.info.backend_pid
        return self._direct
