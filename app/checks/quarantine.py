"""Quarantined jobs and dead letters: each of the two traces has the other."""

from __future__ import annotations

from collections.abc import Iterator

from app.checks.finding import Finding, Look, error, info, lasted, ok, warning
from app.checks.jobs import FIX, first

TRACE_AGE_S = 120.0
TRACES = """
SELECT count(*) FILTER (WHERE debt.job_id IS NOT NULL AND due_at < 'infinity'),
       count(*) FILTER (WHERE debt.job_id IS NOT NULL AND due_at = 'infinity'),
       count(*) FILTER (WHERE debt.job_id IS NULL), min(jobs.job_id::text),
       extract(epoch FROM clock_timestamp() - min(quarantined_at))
  FROM quarantine_entries entry JOIN jobs USING (job_id, episode) LEFT JOIN outbox debt USING (job_id)
 WHERE state = 'quarantined' AND dead_lettered_at IS NULL AND closed_at IS NULL
   AND (quarantined_at < clock_timestamp() - make_interval(secs => %(age_s)s) OR debt.job_id IS NULL)
"""
ENTRIES = """
SELECT count(*), min(job_id::text) FROM jobs
 WHERE state = 'quarantined' AND NOT EXISTS (
       SELECT FROM quarantine_entries entry
        WHERE entry.job_id = jobs.job_id AND entry.episode = jobs.episode AND closed_at IS NULL)
"""
OPEN = """
SELECT count(*), count(DISTINCT fingerprint), extract(epoch FROM clock_timestamp() - min(quarantined_at))
  FROM quarantine_entries WHERE closed_at IS NULL
"""
LETTERS = """
SELECT count(*) FILTER (WHERE job_id IS NOT NULL), min(job_id::text),
       count(*) FILTER (WHERE job_id IS NULL AND received_at > clock_timestamp() - interval '1 day')
  FROM dead_letters letter
 WHERE NOT EXISTS (SELECT FROM jobs WHERE jobs.job_id = letter.job_id)
   AND NOT EXISTS (SELECT FROM job_tombstones old WHERE old.job_id = letter.job_id)
"""


def dead_letters_of_the_quarantined(look: Look) -> Iterator[Finding]:
    """Quarantined jobs whose dead letter did not arrive, by whether it is still offered."""
    offered, given_up, unowed, sample, age_s = first(look, TRACES, age_s=TRACE_AGE_S)
    if offered or given_up:
        yield error(
            "quarantine.trace_missing",
            f"{offered + given_up} quarantined jobs lack their dead letter, for up to {lasted(age_s)}; "
            f"{offered} of them are still offered (one is {sample})",
            "is a worker or `deadsure relay` running, and the dead-letter exchange bound to the queue quarantine?",
        )
    if unowed:
        yield error(
            "quarantine.trace_unowed",
            f"{unowed} quarantined jobs lack their dead letter, and nobody owes it (one is {sample})",
            FIX,
        )
    if not offered + given_up + unowed:
        yield ok("quarantine.trace_missing", "every quarantined job has its dead letter")


def entries_of_the_quarantined(look: Look) -> Iterator[Finding]:
    """Quarantined jobs that no worklist would show."""
    count, sample = first(look, ENTRIES)
    if count:
        yield error(
            "quarantine.without_entry",
            f"{count} jobs are quarantined without an open entry (one is {sample}): no worklist shows them",
            f"deadsure diagnose {sample}; no arrow leaves this behind: was a backup restored in part?",
        )


def worklist(look: Look) -> Iterator[Finding]:
    """What waits for a decision."""
    count, causes, age_s = first(look, OPEN)
    if count:
        what = f"{count} quarantined jobs of {causes} causes wait for a decision, the oldest for {lasted(age_s)}"
        yield info("quarantine.waiting", what, "deadsure quarantine list")


def dead_letters_without_job(look: Look) -> Iterator[Finding]:
    """Messages of ours whose job this database does not know, and what nobody could read."""
    lost, sample, unreadable = first(look, LETTERS)
    if lost:
        yield warning(
            "dead_letters.without_job",
            f"{lost} dead letters carry our headers and name jobs that this database does not know (one is {sample})",
            "was an old backup restored, or do two databases share one virtual host of the broker?",
        )
    else:
        yield ok("dead_letters.without_job", "every dead letter of ours belongs to a job")
    if unreadable:
        yield info(
            "dead_letters.unreadable",
            f"{unreadable} foreign or unreadable messages were kept as dead letters in the last day",
            "deadsure quarantine list --unreadable",
        )


CHECKS = (dead_letters_of_the_quarantined, entries_of_the_quarantined, worklist, dead_letters_without_job)
