"""Workers: who is alive by lease, what they know, and whether the clocks agree."""

from __future__ import annotations

import time
from collections.abc import Iterator

from app.checks.finding import Finding, Look, error, info, lasted, ok, warning
from app.checks.jobs import first
from db.session import rows

LATE_LEASES = 2  # a sweeper looks every second: after two leases there is none
CLOCK_S = 5.0
WORKERS = """
SELECT count(*) FILTER (WHERE open AND lost_at IS NULL AND lease_until > clock_timestamp()),
       count(*) FILTER (WHERE open AND lost_at IS NULL AND over_s > %(late_s)s),
       count(*) FILTER (WHERE open AND lost_at IS NOT NULL AND over_s > %(late_s)s),
       count(*) FILTER (WHERE open AND lease_until > clock_timestamp() + make_interval(secs => %(far_s)s)),
       count(*), max(over_s) FILTER (WHERE open)
  FROM (SELECT *, stopped_at IS NULL AS open, extract(epoch FROM clock_timestamp() - lease_until) AS over_s
          FROM workers) AS workers
"""
LEFT_RUNNING = """
SELECT count(*), min(job_id::text) FROM jobs JOIN workers USING (worker_id)
 WHERE state = 'running' AND (stopped_at IS NOT NULL OR lost_at IS NOT NULL OR lease_until < clock_timestamp())
   AND lease_until < clock_timestamp() - make_interval(secs => %(late_s)s)
"""
UNKNOWN_TO_THE_LIVE = """
WITH live AS (
    SELECT knows, queues FROM workers WHERE stopped_at IS NULL AND lost_at IS NULL AND lease_until > clock_timestamp()
), waiting AS (
    SELECT type, schema_version, queue, count(*) AS jobs, min(parked_at) AS parked_at FROM jobs
     WHERE state IN ('queued', 'retry_wait') GROUP BY type, schema_version, queue
)
SELECT type, schema_version, queue, jobs, extract(epoch FROM clock_timestamp() - parked_at),
       (SELECT count(*) FROM live WHERE knows @> to_jsonb(type || '@' || schema_version)
                                    AND (queues IS NULL OR queues @> to_jsonb(queue))),
       (SELECT count(*) FROM live WHERE queues IS NULL OR queues @> to_jsonb(queue)), (SELECT count(*) FROM live)
  FROM waiting ORDER BY type, schema_version, queue
"""
AHEAD = """
SELECT (SELECT count(*) FROM workers WHERE started_at > clock_timestamp() + interval '5 s')
     + (SELECT count(*) FROM outbox WHERE sent_at > clock_timestamp() + interval '5 s')
"""
NOW = "SELECT extract(epoch FROM clock_timestamp())::float8"


def leases(look: Look) -> Iterator[Finding]:
    """Whether anybody works, and leases that are over with nobody to sweep them."""
    lease_s = look.settings.lease_s
    live, silent, lost, ahead, ever, over_s = first(look, WORKERS, late_s=LATE_LEASES * lease_s, far_s=10 * lease_s)
    if live:
        yield ok("workers.live", f"{live} workers hold a lease")
    elif ever:
        yield warning("workers.none", "0 workers hold a lease", "celery -A tasks worker")
    else:
        yield info("workers.never", "no worker has ever started on this database", "celery -A tasks worker")
    if silent + lost:
        what = f"{silent + lost} workers went away {lasted(over_s)} ago or later, and nobody has swept after them"
        yield warning("workers.lease_over", what, "start a worker, or `deadsure relay`: both sweep")
    if ahead:
        yield warning(
            "workers.lease_ahead",
            f"{ahead} leases end more than {lasted(10 * lease_s)} from now: the database's clock went back",
            "set the database server's clock by NTP; jobs of dead workers wait until it has caught up",
        )


def jobs_of_lost_workers(look: Look) -> Iterator[Finding]:
    """Running jobs whose owner is gone."""
    count, sample = first(look, LEFT_RUNNING, late_s=LATE_LEASES * look.settings.lease_s)
    if count:
        yield error(
            "workers.left_running",
            f"{count} jobs run under owners whose lease is over, and nobody takes them (one is {sample})",
            "start a worker, or `deadsure relay`: both sweep",
        )
    else:
        yield ok("workers.left_running", "every running job has a living owner")


def types_of_the_live(look: Look) -> Iterator[Finding]:
    """Waiting types against what the live workers know and consume: a deploy that is half done, a forgotten queue."""
    for name, version, queue, jobs, parked_s, knowing, consuming, live in rows(look.connection, UNKNOWN_TO_THE_LIVE):
        which = f"{name} version {version}"
        if live and not consuming:
            what = f"{jobs} jobs of {which} wait in queue {queue}, and none of {live} live workers consumes it"
            yield error("workers.queue_forgotten", what, f"celery -A tasks worker -Q {queue}")
        elif live and not knowing:
            parked = f", parked for {lasted(parked_s)}" if parked_s is not None else ""
            yield error(
                "workers.type_unknown",
                f"{jobs} jobs of {which} wait and none of {consuming} live workers of queue {queue} knows it{parked}; "
                f"they are quarantined {lasted(look.settings.park_grace_s)} after they were parked",
                "start workers whose code knows it",
            )
        elif knowing < consuming:
            yield info(
                "workers.type_in_part",
                f"{knowing} of {consuming} live workers of queue {queue} know {which}: a deploy is under way",
                "deadsure doctor --pre-deploy, with the code of the others",
            )


def clocks(look: Look) -> Iterator[Finding]:
    """This host's clock against the database's, which alone decides."""
    asked = time.time()
    (theirs,) = first(look, NOW)
    # The answer was made at some moment in between, so only what is beyond both ends is a difference.
    ahead_s, behind_s = asked - theirs, theirs - time.time()
    if max(ahead_s, behind_s) > CLOCK_S:
        way = f"{ahead_s:.0f} s ahead of" if ahead_s > behind_s else f"{behind_s:.0f} s behind"
        yield warning(
            "clock.difference",
            f"this host's clock is {way} the database's; the database's decides, but logs and `eta` are this host's",
            "synchronize both by NTP",
        )
    else:
        yield ok("clock.difference", f"this host's clock and the database's differ by less than {CLOCK_S:g} s")
    (future,) = first(look, AHEAD)
    if future:
        yield warning(
            "clock.went_back",
            f"{future} rows were written at times that are still to come: the database's clock went back",
            "set the database server's clock by NTP; resends wait until it has caught up",
        )


CHECKS = (leases, jobs_of_lost_workers, types_of_the_live, clocks)
