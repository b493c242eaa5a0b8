"""What becomes of a job that somebody works on, and whether its owner still can. The first rule counts.

A short job in the database's own transaction (`atomic`) is `queued` in the table until it commits: whoever holds its
row works on it.
"""

from __future__ import annotations

from app.diagnose.facts import Facts, JobRow, Owner
from app.diagnose.waiting import crashes_growing, failing_repeatedly
from app.diagnose.words import Said, moment, span
from app.job_types import REGISTRY

START_ONE = "celery -A tasks worker"


def owner_unknown(facts: Facts, job: JobRow) -> Said | None:
    """No row of `workers` stands behind it."""
    if facts.owner is not None:
        return None
    return Said(
        f"It is running for worker {job.worker_id}, which has no row in `workers`: no sweeper will free it. Rows were "
        "deleted, or a backup restored in part.",
        "deadsure doctor",
    )


def worker_lost_not_swept(facts: Facts, job: JobRow) -> Said | None:
    """The owner is gone and nobody is there to notice."""
    owner = facts.owner
    if owner is None or not facts.owner_gone or swept(facts):
        return None
    return Said(
        f"Its owner, {who(owner)}, is gone ({gone(owner)}) and no sweeper is alive to free the job: it stays running "
        "until a worker or `deadsure relay` starts.",
        START_ONE,
    )


def worker_lost(facts: Facts, job: JobRow) -> Said | None:
    """The owner is gone; a sweeper will take the job away from it."""
    owner = facts.owner
    if owner is None or not facts.owner_gone:
        return None
    when = (
        "within seconds"
        if job.expire_early
        else f"when its lease is over ({moment(owner.lease_until)}): its external effect must not be repeated early"
    )
    return Said(
        f"Its owner, {who(owner)}, is gone ({gone(owner)}); a sweeper frees the job {when}, and another worker takes "
        "over.",
        f"deadsure diagnose {job.job_id}",
    )


def owner_frozen(facts: Facts, job: JobRow) -> Said | None:
    """The owner's session is open, and it does not renew its lease."""
    owner = facts.owner
    if owner is None or not facts.owner_silent or owner.session is not True:
        return None
    return Said(
        f"Its owner, {who(owner)}, has not renewed its lease for {span(facts.age_s(owner.renewed_at))} though its "
        f"session is open: the process is frozen (stopped, a suspended machine, swapped out) or cut off. "
        f"{lease(facts, owner)} What it writes later is refused by the fencing token (attempt {job.attempt}).",
        f"ps -o pid,stat,etime,args -p {owner.pid}" if swept(facts) else START_ONE,
    )


def lease_over(facts: Facts, job: JobRow) -> Said | None:
    """The owner is silent, and behind a pooler nobody can tell more."""
    owner = facts.owner
    if owner is None or facts.age_s(owner.lease_until) < 0:
        return None
    return Said(
        f"Its owner, {who(owner)}, has not renewed its lease; whether it is dead or frozen cannot be seen. "
        f"{lease(facts, owner)}",
        f"ps -o pid,stat,etime,args -p {owner.pid}" if swept(facts) else START_ONE,
    )


def cancel_not_honoured(facts: Facts, job: JobRow) -> Said | None:
    """Somebody asked, and the handler does not."""
    owner = facts.owner
    if not job.cancel_requested or owner is None:
        return None
    kill = f"kill -9 {job.child_pid}" if job.child_pid else f"deadsure show {job.job_id}"
    return Said(
        "A cancel was asked for and the handler goes on: it does not ask job.should_stop. It is cancelled when it "
        f"retries, releases or is lost{limit(facts, job)}; if it succeeds first, it has succeeded. Killing its process "
        f"on {owner.hostname} rolls it back and cancels it at once.",
        kill,
    )


def running(facts: Facts, job: JobRow) -> Said | None:
    """Its owner is alive and at work."""
    owner = facts.owner
    if owner is None:
        return None
    since = facts.held_since or job.changed_at
    done = f", {job.progress_done} of {job.progress_total or '?'} done" if job.progress_done is not None else ""
    how = " in one commit with its effect" if facts.held_since else ""
    return Said(
        f"Attempt {job.attempt + bool(facts.held_since)} runs for {span(facts.age_s(since))}{how}{done}; its owner, "
        f"{who(owner)}, is alive (lease until {moment(owner.lease_until)}){limit(facts, job)}.",
        f"deadsure show {job.job_id}",
        wrong=False,
    )


def who(owner: Owner) -> str:
    """The worker, as a person finds it."""
    return f"worker {owner.name} (pid {owner.pid} on {owner.hostname})"


def gone(owner: Owner) -> str:
    """How it is known that the owner is gone."""
    if owner.lost_at is not None:
        return f"declared lost at {moment(owner.lost_at)}: {owner.lost_cause}"
    return f"stopped at {moment(owner.stopped_at)}" if owner.stopped_at else "its database session has ended"


def lease(facts: Facts, owner: Owner) -> str:
    """When the lease ends, and who acts then."""
    left_s = -facts.age_s(owner.lease_until)
    when = f"ends in {span(left_s)}" if left_s > 0 else f"is over for {span(left_s)}"
    if not swept(facts):
        return f"Its lease {when}, and no sweeper is alive to act on it."
    brake = " (one lease later when it holds most of the running jobs)"
    return f"Its lease {when}; then another worker takes over{brake}."


def limit(facts: Facts, job: JobRow) -> str:
    """When the hard time limit strikes; nothing for a type that this code does not know."""
    known = REGISTRY.get((job.type, job.schema_version))
    if known is None:
        return ""
    left_s = known.time_limit_s - facts.age_s(facts.held_since or job.changed_at)
    return f"; its hard time limit is {'in' if left_s > 0 else 'over for'} {span(left_s)}"


def swept(facts: Facts) -> bool:
    """Whether somebody alive looks for lost workers; assumed where sessions cannot be seen."""
    sweepers = facts.fleet.sweepers
    return bool(sweepers[1]) if sweepers is not None else facts.fleet.live > 0


RULES = (
    owner_unknown,
    worker_lost_not_swept,
    worker_lost,
    owner_frozen,
    lease_over,
    cancel_not_honoured,
    crashes_growing,
    failing_repeatedly,
    running,
)
