"""A believable business of any size, made inside PostgreSQL: the same numbers give the same rows.

Randomness is `hashint8extended(row, seed + stream)`: hash partitioning stores data by it, so its values stay
the same from one PostgreSQL release to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, text

from app.domain import vocabulary
from app.domain.months import before, bounds

MONTHS = 12
ORDERS_PER_STATEMENT = 100_000
STREAMS = 64  # draws per row that a seed has for itself
SEED_LOCK = 0x7365_6564  # two seeds at once would both find the tables empty

COUNT = "SELECT (SELECT count(*) FROM accounts), (SELECT count(*) FROM orders)"

MONTHS_PRESENT = """
SELECT to_char(month, 'YYYY-MM') FROM (
    SELECT DISTINCT date_trunc('month', ordered_at AT TIME ZONE 'UTC') AS month FROM orders
) AS present ORDER BY month
"""

# Row i draws at most i as part of the address, and account numbers only grow: addresses never collide.
ADD_ACCOUNTS = """
INSERT INTO accounts (name, email, currency, active, created_at)
SELECT CASE WHEN kind < 75 THEN given[g] || ' ' || family[f]
            WHEN kind < 82 THEN family[f] || ', ' || given[g]
            ELSE replace(companies[1 + c % cardinality(companies)], '{}', family[f]) END,
       given_ascii[g] || '.' || family_ascii[f] || i || '@' || domains[1 + d % cardinality(domains)],
       currencies[1 + m % cardinality(currencies)],
       a % 100 < 92,
       to_timestamp(:oldest - 1 - age % 94608000)
  FROM (SELECT i,
               1 + (hashint8extended(i, :seed) & 2147483647) % cardinality(CAST(:given AS text[])) AS g,
               1 + (hashint8extended(i, :seed + 1) & 2147483647) % cardinality(CAST(:family AS text[])) AS f,
               (hashint8extended(i, :seed + 2) & 2147483647) % 100 AS kind,
               (hashint8extended(i, :seed + 3) & 2147483647) AS c,
               (hashint8extended(i, :seed + 4) & 2147483647) AS d,
               (hashint8extended(i, :seed + 5) & 2147483647) AS m,
               (hashint8extended(i, :seed + 6) & 2147483647) AS a,
               (hashint8extended(i, :seed + 7) & 2147483647) AS age
          FROM (SELECT coalesce(max(account_id), 0) AS base FROM accounts) AS present,
               LATERAL generate_series(base + 1, base + :missing) AS i) AS drawn,
       (SELECT CAST(:given AS text[]) AS given, CAST(:given_ascii AS text[]) AS given_ascii,
               CAST(:family AS text[]) AS family, CAST(:family_ascii AS text[]) AS family_ascii,
               CAST(:companies AS text[]) AS companies, CAST(:domains AS text[]) AS domains,
               CAST(:currencies AS text[]) AS currencies) AS words
 ORDER BY i
"""

# A few accounts order a lot (u^2), order numbers grow with time, three of four orders carry no note.
ADD_ORDERS = """
INSERT INTO orders (account_id, ordered_at, status, sku, quantity, unit_price_cents, total_cents, note)
SELECT account_id, to_timestamp(starts[month] + floor(within * (ends[month] - starts[month]))),
       CASE WHEN s < 78 THEN 'delivered' WHEN s < 86 THEN 'shipped' WHEN s < 90 THEN 'paid'
            WHEN s < 92 THEN 'placed' WHEN s < 96 THEN 'returned' ELSE 'cancelled' END,
       skus[product], quantity, prices[product], quantity * prices[product],
       CASE WHEN n % 4 = 0 THEN notes[1 + n / 4 % cardinality(notes)] ELSE '' END
  FROM (SELECT i, 1 + floor(place)::int AS month, place - floor(place) AS within,
               floor(accounts * u * u)::bigint AS owner, s, product, n,
               CASE WHEN q < 85 THEN 1 WHEN q < 98 THEN 2 + q % 5 ELSE 10 * (q - 96) END AS quantity
          FROM (SELECT i, :accounts AS accounts,
                       (i - 1 + (hashint8extended(:base + i, :seed + 16) & 2147483647) / 2147483648.0::float8)
                       / :missing * cardinality(CAST(:starts AS float8[])) AS place,
                       (hashint8extended(:base + i, :seed + 17) & 2147483647) / 2147483648.0::float8 AS u,
                       (hashint8extended(:base + i, :seed + 18) & 2147483647) % 100 AS s,
                       1 + (hashint8extended(:base + i, :seed + 19) & 2147483647)
                           % cardinality(CAST(:skus AS text[])) AS product,
                       (hashint8extended(:base + i, :seed + 20) & 2147483647) % 100 AS q,
                       (hashint8extended(:base + i, :seed + 21) & 2147483647) AS n
                  FROM generate_series(CAST(:first AS bigint), :last) AS i) AS uniform) AS drawn
  JOIN (SELECT account_id, row_number() OVER (ORDER BY account_id) - 1 AS owner FROM accounts) AS numbered
       USING (owner),
       (SELECT CAST(:starts AS float8[]) AS starts, CAST(:ends AS float8[]) AS ends,
               CAST(:skus AS text[]) AS skus, CAST(:prices AS bigint[]) AS prices,
               CAST(:notes AS text[]) AS notes) AS words
 ORDER BY i
"""


@dataclass(frozen=True)
class Seeded:
    """Rows in the tables after a seed, how many of them it added, and the months (UTC) that have orders."""

    accounts: int
    orders: int
    accounts_added: int
    orders_added: int
    months: tuple[str, ...]


def seed(
    connection: Connection,
    accounts: int,
    orders: int,
    rng_seed: int = 1,
    *,
    months: Sequence[str] | None = None,
) -> Seeded:
    """Fill up to `accounts` accounts and `orders` orders, in the caller's transaction; what is there counts.

    Orders are spread evenly over `months` (`YYYY-MM`), by default the last 12 whole months before the
    database's date; name them for rows that do not depend on the day. Nothing is ever removed, and a repeat
    adds nothing.

    Raises ValueError for a negative size, no or malformed months, and orders without any account.
    """
    if accounts < 0 or orders < 0:
        raise ValueError(f"sizes must not be negative: {accounts} accounts, {orders} orders")
    chosen = sorted(set(default_months(connection) if months is None else months))
    if not chosen:
        raise ValueError("name at least one month, for instance 2026-10")
    starts, ends = zip(*((s.timestamp(), e.timestamp()) for s, e in map(bounds, chosen)), strict=True)
    base_seed = rng_seed * STREAMS

    connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": SEED_LOCK})
    accounts_there, orders_there = connection.execute(text(COUNT)).one()
    accounts_missing = max(accounts - accounts_there, 0)
    orders_missing = max(orders - orders_there, 0)
    if orders_missing and not accounts_there + accounts_missing:
        raise ValueError(f"{orders} orders need at least one account")
    if accounts_missing:
        add_accounts(connection, base_seed, accounts_missing, starts[0])
    if orders_missing:
        add_orders(
            connection,
            orders_missing,
            {
                "seed": base_seed,
                "accounts": accounts_there + accounts_missing,
                "base": orders_there,
                "starts": list(starts),
                "ends": list(ends),
            },
        )
    if accounts_missing or orders_missing:
        connection.execute(text("ANALYZE accounts, orders"))
    return Seeded(
        accounts_there + accounts_missing,
        orders_there + orders_missing,
        accounts_missing,
        orders_missing,
        tuple(connection.scalars(text(MONTHS_PRESENT))),
    )


def default_months(connection: Connection) -> tuple[str, ...]:
    """The last 12 whole months by the database's clock, in UTC."""
    today = connection.execute(text("SELECT clock_timestamp() AT TIME ZONE 'UTC'")).scalar_one()
    return before(today, MONTHS)


def add_accounts(connection: Connection, base_seed: int, missing: int, oldest: float) -> None:
    """Insert `missing` accounts, created in the three years before `oldest` (seconds since the epoch)."""
    connection.execute(
        text(ADD_ACCOUNTS),
        {
            "seed": base_seed,
            "missing": missing,
            "oldest": oldest,
            "given": [name for name, _ in vocabulary.GIVEN],
            "given_ascii": [ascii_ for _, ascii_ in vocabulary.GIVEN],
            "family": [name for name, _ in vocabulary.FAMILY],
            "family_ascii": [ascii_ for _, ascii_ in vocabulary.FAMILY],
            "companies": list(vocabulary.COMPANIES),
            "domains": list(vocabulary.DOMAINS),
            "currencies": list(vocabulary.CURRENCIES),
        },
    )


def add_orders(connection: Connection, missing: int, draw: dict[str, Any]) -> None:
    """Insert `missing` orders, ORDERS_PER_STATEMENT at once so that no statement runs for long."""
    fixed = draw | {
        "missing": missing,
        "skus": [sku for sku, _ in vocabulary.PRODUCTS],
        "prices": [price for _, price in vocabulary.PRODUCTS],
        "notes": list(vocabulary.NOTES),
    }
    for first in range(1, missing + 1, ORDERS_PER_STATEMENT):
        last = min(first + ORDERS_PER_STATEMENT - 1, missing)
        connection.execute(text(ADD_ORDERS), fixed | {"first": first, "last": last})
