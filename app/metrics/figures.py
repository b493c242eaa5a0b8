"""What only the database knows: backlog, debts, leases, quarantine. A bounded set of queries, each by an index.

Counts stop at `MOST`: who needs to tell 5,000 waiting jobs from 200,000 asks the database once, not each worker every
few seconds. Ages are exact: they come from the ends of indexes. Every endpoint shows the same figures: take their
maximum, never their sum.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client.core import GaugeMetricFamily, Metric
from psycopg2.extensions import connection as PgConnection

from app.metrics.counts import OTHER, QUARANTINE_CAUSES
from db.session import rows

MOST = 5_000
BOUND = f"at most {MOST}: then it stands for that many or more"
OPEN_STATES = ("queued", "running", "retry_wait", "quarantined")
# One part for each state, by name: with the state as a value the planner would walk all jobs by age.
JOBS = "UNION ALL".join(
    f"""
SELECT '{state}', count(*) FROM (
       SELECT FROM jobs WHERE state = '{state}' AND state NOT IN ('succeeded', 'cancelled')
        ORDER BY created_at LIMIT %(most)s) AS found
"""
    for state in OPEN_STATES
)
CAUSES = """
SELECT cause, count(*) FROM (
       SELECT cause FROM jobs WHERE state = 'quarantined' AND state NOT IN ('succeeded', 'cancelled')
        ORDER BY created_at LIMIT %(most)s) AS found
 GROUP BY cause
"""
# Sent messages are few (the relay's window); what they wait for is the claim, so their jobs tell since when. Each count
# is ordered, and each job looked up by itself: a planner that thinks of a LIMIT or a join here reads the whole table.
DEBTS = """
SELECT wanted.queue,
       (SELECT count(*) FROM (SELECT FROM generate_series(0, 9) AS level (priority), LATERAL (
               SELECT FROM outbox WHERE outbox.queue = wanted.queue AND priority = level.priority AND sends = 0
                  AND due_at <= statement_timestamp() ORDER BY due_at LIMIT %(most)s) AS due LIMIT %(most)s) AS found),
       (SELECT count(*) FROM (SELECT FROM outbox WHERE outbox.queue = wanted.queue AND sends > 0
                                 AND due_at < 'infinity' ORDER BY due_at LIMIT %(most)s) AS sent),
       (SELECT count(*) FROM (SELECT FROM outbox WHERE outbox.queue = wanted.queue AND sends > 0
                                 AND due_at = 'infinity' LIMIT %(most)s) AS given_up),
       extract(epoch FROM statement_timestamp() - least(unsent.due_at, again.due_at))::float8,
       extract(epoch FROM statement_timestamp() - least(unsent.due_at, sent.ready_at))::float8
  FROM unnest(%(queues)s::text[]) AS wanted (queue),
       LATERAL (SELECT min(due.due_at) AS due_at FROM generate_series(0, 9) AS level (priority), LATERAL (
                SELECT due_at FROM outbox WHERE outbox.queue = wanted.queue AND priority = level.priority AND sends = 0
                   AND due_at <= statement_timestamp() ORDER BY due_at LIMIT 1) AS due) AS unsent,
       LATERAL (SELECT min(due.due_at) AS due_at FROM (
                SELECT due_at FROM outbox WHERE outbox.queue = wanted.queue AND sends > 0
                   AND due_at <= statement_timestamp() ORDER BY due_at LIMIT 1) AS due) AS again,
       LATERAL (SELECT min((SELECT greatest(changed_at, not_before) FROM jobs
                             WHERE jobs.job_id = debt.job_id AND state IN ('queued', 'retry_wait'))) AS ready_at
                  FROM (SELECT job_id FROM outbox WHERE outbox.queue = wanted.queue AND sends > 0 AND kind = 'wake'
                         ORDER BY due_at LIMIT %(window)s) AS debt) AS sent
"""
WORKERS = """
SELECT count(*) FILTER (WHERE lost_at IS NULL AND lease_until > statement_timestamp()),
       count(*) FILTER (WHERE lost_at IS NULL AND lease_until <= statement_timestamp()),
       count(*) FILTER (WHERE lost_at IS NOT NULL)
  FROM workers WHERE stopped_at IS NULL
"""
MISSING_TRACES = """
SELECT count(*) FROM (
    SELECT FROM quarantine_entries entry JOIN jobs USING (job_id, episode)
     WHERE closed_at IS NULL AND dead_lettered_at IS NULL AND state = 'quarantined'
       AND quarantined_at < statement_timestamp() - make_interval(secs => %(trace_s)s)
     LIMIT %(most)s) AS missing
"""
PARKED = "SELECT count(*) FROM (SELECT FROM parked_messages LIMIT %(most)s) AS parked"
LEASES = ("live", "over", "lost")


def read(connection: PgConnection, queues: Sequence[str], window: int, trace_s: float) -> list[Metric]:
    """All figures; `trace_s` is how old a quarantine may be without its dead letter. Raises psycopg2.Error."""
    values = {"most": MOST, "queues": list(queues), "window": window, "trace_s": trace_s}
    jobs = gauge("deadsure_jobs", f"Jobs that have not ended, by state; {BOUND}.", "state")
    for state, count in rows(connection, JOBS, values):
        jobs.add_metric([state], count)
    causes = gauge("deadsure_quarantined_jobs", f"Jobs in quarantine by cause; {BOUND}.", "cause")
    found = dict.fromkeys((*QUARANTINE_CAUSES, OTHER), 0)
    for cause, count in rows(connection, CAUSES, values):
        found[cause if cause in found else OTHER] += count
    for cause, count in found.items():
        causes.add_metric([cause], count)
    leases = gauge("deadsure_workers", "Leases: live, over but not swept, or lost with jobs to free.", "lease")
    for lease, count in zip(LEASES, rows(connection, WORKERS)[0], strict=True):
        leases.add_metric([lease], count)
    missing = GaugeMetricFamily(
        "deadsure_missing_traces",
        f"Quarantined jobs whose dead letter has not arrived in time; {BOUND}.",
        rows(connection, MISSING_TRACES, values)[0][0],
    )
    parked = GaugeMetricFamily(
        "deadsure_parked_messages",
        f"Foreign messages that wait for a release that can read them; {BOUND}.",
        rows(connection, PARKED, values)[0][0],
    )
    return [jobs, causes, leases, missing, parked, *debts(rows(connection, DEBTS, values))]


def debts(found: Sequence[tuple[str, int, int, int, float | None, float | None]]) -> list[Metric]:
    """The outbox by queue: how much is owed, and for how long."""
    owed = gauge(
        "deadsure_outbox_debts",
        f"Unpaid debts: due and never sent, sent and not claimed, or offered in vain; {BOUND}.",
        "queue",
        "debt",
    )
    lag = gauge("deadsure_outbox_lag_seconds", "How long the oldest due debt waits for a relay; 0 when none.", "queue")
    oldest = gauge(
        "deadsure_oldest_waiting_age_seconds",
        "How long the job that waits longest could have been started; 0 when none.",
        "queue",
    )
    for queue, unsent, sent, given_up, lag_s, oldest_s in found:
        for debt, count in (("unsent", unsent), ("sent", sent), ("given_up", given_up)):
            owed.add_metric([queue, debt], count)
        lag.add_metric([queue], max(0.0, lag_s or 0.0))
        oldest.add_metric([queue], max(0.0, oldest_s or 0.0))
    return [owed, lag, oldest]


def gauge(name: str, documentation: str, *labels: str) -> GaugeMetricFamily:
    """A family of gauges with labels, still empty."""
    return GaugeMetricFamily(name, documentation, labels=labels)
