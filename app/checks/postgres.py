"""PostgreSQL as this system needs it: commits that last, a vacuum that keeps up, sessions for everybody."""

from __future__ import annotations

from collections.abc import Iterator

from app.checks.finding import Finding, Look, error, info, lasted, ok, warning
from app.checks.jobs import first
from db.session import rows

HOT_TABLES = ("jobs", "outbox", "job_events", "workers")
LONG_S, IDLE_S, LAG_S = 300.0, 30.0, 30.0
SETTINGS = """
SELECT current_setting('synchronous_commit'), current_setting('fsync'), current_setting('full_page_writes'),
       current_setting('autovacuum'), pg_is_in_recovery(), pg_backend_pid()
"""
HOT = """
SELECT coalesce(string_agg(relname, ', ' ORDER BY relname), '') FROM pg_class
 WHERE oid = ANY (%(tables)s::regclass[])
   AND reloptions && ARRAY['autovacuum_enabled=false', 'autovacuum_enabled=off', 'autovacuum_enabled=no',
                           'autovacuum_enabled=0']
"""
# A handler may hold a transaction open for as long as its type may run; it still holds back vacuum.
LONG = """
SELECT pid, application_name, extract(epoch FROM clock_timestamp() - xact_start), state FROM pg_stat_activity
 WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'
   AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL)
   AND xact_start < clock_timestamp() - make_interval(secs => %(long_s)s)
 ORDER BY xact_start
"""
PREPARED = """
SELECT count(*), min(gid) FROM pg_prepared_xacts
 WHERE database = current_database() AND prepared < clock_timestamp() - make_interval(secs => %(long_s)s)
"""
IDLE = """
SELECT pid, application_name, extract(epoch FROM clock_timestamp() - state_change) FROM pg_stat_activity
 WHERE datname = current_database() AND pid <> pg_backend_pid() AND application_name LIKE 'deadsure %%'
   AND application_name NOT LIKE 'deadsure job %%' AND state LIKE 'idle in transaction%%'
   AND state_change < clock_timestamp() - make_interval(secs => %(idle_s)s)
 ORDER BY state_change
"""
SESSIONS = """
SELECT count(*), count(*) FILTER (WHERE datname = current_database() AND application_name LIKE 'deadsure %'),
       current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int,
       (SELECT count(*) FROM workers
         WHERE stopped_at IS NULL AND lost_at IS NULL AND lease_until > clock_timestamp())
  FROM pg_stat_activity WHERE backend_type = 'client backend'
"""
MAY_SEE = "SELECT pg_has_role('pg_read_all_stats', 'MEMBER')"
STANDBYS = """
SELECT application_name, sync_state, extract(epoch FROM replay_lag)::float8, state FROM pg_stat_replication
"""
POOLED_WORKERS = """
SELECT count(*) FILTER (WHERE pooled), count(*) FROM workers
 WHERE stopped_at IS NULL AND lost_at IS NULL AND lease_until > clock_timestamp()
"""
ON = "ALTER SYSTEM SET {0} = on; SELECT pg_reload_conf()"


def durability(look: Look) -> Iterator[Finding]:
    """Whether a commit survives a crash of the server: the database holds the truth."""
    commit, fsync, pages, _, standby, _ = first(look, SETTINGS)
    if commit == "off":
        yield error(
            "postgres.synchronous_commit",
            "synchronous_commit is off for this role and database: a crash of the server loses commits that were "
            "answered, and their effects happen twice",
            "ALTER ROLE … RESET synchronous_commit, ALTER DATABASE … RESET synchronous_commit, or "
            + ON.format("synchronous_commit"),
        )
    if fsync == "off":
        yield error("postgres.fsync", "fsync is off: a power cut may ruin the whole database", ON.format("fsync"))
    if pages == "off":
        yield error(
            "postgres.full_page_writes",
            "full_page_writes is off: a power cut may leave torn pages",
            ON.format("full_page_writes"),
        )
    if standby:
        yield error(
            "postgres.standby",
            "DATABASE_URL names a standby, which takes no writes",
            "name the primary in DATABASE_URL",
        )
    if (commit != "off", fsync, pages, standby) == (True, "on", "on", False):
        yield ok("postgres.durability", "a commit survives a crash of the database server")


def vacuum(look: Look) -> Iterator[Finding]:
    """Dead rows of the hot tables must go, or every look at them slows down."""
    autovacuum = first(look, SETTINGS)[3]
    (tables,) = first(look, HOT, tables=list(HOT_TABLES))
    if autovacuum == "off":
        yield warning(
            "postgres.autovacuum", "autovacuum is off: the queue's tables bloat without end", ON.format("autovacuum")
        )
    if tables:
        yield warning(
            "postgres.autovacuum_table",
            f"autovacuum is off for {tables}: dead rows pile up, and every look at the queue slows down",
            "; ".join(f"ALTER TABLE {table} RESET (autovacuum_enabled)" for table in tables.split(", ")),
        )
    if autovacuum == "on" and not tables:
        yield ok("postgres.autovacuum", "autovacuum takes care of the hot tables")


def long_transactions(look: Look) -> Iterator[Finding]:
    """Open transactions that hold back vacuum, whoever's they are."""
    found = rows(look.connection, LONG, {"long_s": LONG_S})
    for pid, name, age_s, state in found:
        yield warning(
            "postgres.long_transaction",
            f"session {pid} ({name or 'no name'}, {state}) has had its transaction open for {lasted(age_s)}: dead rows "
            "of the queue cannot be vacuumed meanwhile",
            f"end it: SELECT pg_terminate_backend({pid})",
        )
    count, sample = first(look, PREPARED, long_s=LONG_S)
    if count:
        yield warning(
            "postgres.prepared_transaction",
            f"{count} prepared transactions are neither committed nor rolled back; they hold back vacuum",
            f"COMMIT PREPARED or ROLLBACK PREPARED, for instance {sample!r}",
        )
    if not found and not count:
        yield ok("postgres.long_transaction", f"no transaction is open for more than {lasted(LONG_S)}")
    if not first(look, MAY_SEE)[0]:
        yield info(
            "postgres.not_all_seen",
            "this role sees its own sessions only: transactions of others were not looked at",
            "GRANT pg_read_all_stats TO the role of DATABASE_URL",
        )


def own_idle_transactions(look: Look) -> Iterator[Finding]:
    """Our own threads never wait inside a transaction; only a handler may (`deadsure job …`)."""
    for pid, name, age_s in rows(look.connection, IDLE, {"idle_s": IDLE_S}):
        yield warning(
            "postgres.idle_in_transaction",
            f"our own session {pid} ({name}) has been idle inside a transaction for {lasted(age_s)}",
            f"SELECT pg_terminate_backend({pid}); it connects again by itself",
        )


def sessions(look: Look) -> Iterator[Finding]:
    """Whether every worker could start a second time beside itself, as a rolling deploy does."""
    used, ours, allowed, live = first(look, SESSIONS)
    what = f"{used} of {allowed} sessions are used, {ours} by Deadsure with {live} live workers"
    if used + ours > allowed:
        yield warning(
            "postgres.sessions",
            f"{what}: a rolling deploy that starts new workers beside the old ones would find none left",
            "raise max_connections, lower --concurrency, or put PgBouncer in between",
        )
    else:
        yield ok("postgres.sessions", what)


def replication(look: Look) -> Iterator[Finding]:
    """Standbys that are far behind would lose that much in a failover."""
    for name, kind, lag_s, state in rows(look.connection, STANDBYS):
        what = f"standby {name} ({kind}, {state}) is {lasted(lag_s)} behind"
        if (lag_s or 0) > LAG_S or state != "streaming":
            yield warning("postgres.replication", f"{what}; a failover would lose that much", "look at its log")
        else:
            yield info("postgres.replication", what)


def pooler(look: Look) -> Iterator[Finding]:
    """Whether sessions go through a pooler, and everybody knows."""
    own = first(look, SETTINGS)[5] != look.connection.info.backend_pid
    pooled, live = first(look, POOLED_WORKERS)
    if own or pooled or look.settings.pooled:
        yield info(
            "postgres.pooled",
            f"sessions go through a pooler ({pooled} of {live} live workers say so): a dead worker is noticed when its "
            f"lease of {look.settings.lease_s:g} s is over",
        )


CHECKS = (durability, vacuum, long_transactions, own_idle_transactions, sessions, replication, pooler)
