"""The jobs of one demo run: exports of distinct accounts and months, and ledger posts, under a scope of their own."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from app import submit
from app.domain.seed import Seeded, seed
from app.job_types import find
from app.submit import NewJob, Submitted

EXPORT, POST = "reports.export", "ledger.post"
EXPORT_SHARE = 0.6
MONTHS = 12
LEAST_ACCOUNTS = 120
ORDERS_PER_ACCOUNT = 200
PAGES = 20

ACCOUNTS = "SELECT account_id, currency FROM accounts ORDER BY account_id LIMIT :count"


@dataclass(frozen=True)
class Load:
    """What one run submits. `run` is the scope of its jobs: no other run's job has the same identity."""

    run: str
    exports: list[NewJob]
    posts: list[NewJob]

    def pages(self) -> Iterator[list[NewJob]]:
        """The jobs in PAGES pages, each with its share of both types, so that both are under way at any time."""
        for n in range(PAGES):
            page = [
                job
                for jobs in (self.exports, self.posts)
                for job in jobs[len(jobs) * n // PAGES : len(jobs) * (n + 1) // PAGES]
            ]
            if page:
                yield page


def sizes(jobs: int) -> tuple[int, int]:
    """How many of `jobs` are exports and how many ledger posts."""
    exports = round(jobs * EXPORT_SHARE)
    return exports, jobs - exports


def prepare(engine: Engine, jobs: int) -> tuple[Seeded, Load]:
    """Make accounts and orders where they are missing, and validated jobs on them; submits nothing yet."""
    export_count, post_count = sizes(jobs)
    accounts = max(LEAST_ACCOUNTS, -(-export_count // MONTHS))
    with engine.begin() as connection:
        seeded = seed(connection, accounts, accounts * ORDERS_PER_ACCOUNT)
        known = connection.execute(text(ACCOUNTS), {"count": accounts}).all()
    run = f"demo-{secrets.token_hex(4)}"
    pairs = ((account_id, month) for month in reversed(seeded.months[-MONTHS:]) for account_id, _ in known)
    exports = [
        prepared(run, EXPORT, f"{account_id}/{month}", account_id=account_id, month=month)
        for account_id, month in islice(pairs, export_count)
    ]
    posts = [
        prepared(run, POST, f"post/{n}", account_id=account_id, amount_cents=100 + n, currency=currency, memo=run)
        for n, (account_id, currency) in ((n, known[n % len(known)]) for n in range(post_count))
    ]
    return seeded, Load(run, exports, posts)


def prepared(run: str, name: str, key: str, **payload: object) -> NewJob:
    """One validated job with an idempotency key of its own in the scope `run`."""
    job_type = find(name)
    return submit.prepare(job_type, job_type.parse(payload), idempotency_key=key, scope=run)


def submit_page(engine: Engine, page: list[NewJob]) -> list[Submitted]:
    """Submit one page in one transaction."""
    with Session(engine) as session, session.begin():
        return submit.in_session(session, page)
