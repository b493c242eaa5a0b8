"""What should exist by now and does not: the `expected` of each job type."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from app.checks.finding import Finding, Look, name_of, ok, unchecked, warning
from app.expected import ExpectedJob, Missing, missing
from app.job_types import JobType

SAMPLES = 3


def expected_jobs(look: Look) -> Iterator[Finding]:
    """One finding for each type that says what it expects."""
    newest = {name: look.types[name, version] for name, version in sorted(look.types)}
    for job_type in newest.values():
        if job_type.expected is None:
            continue
        try:
            yield of_type(look, job_type)
        except Exception as failed:  # noqa: BLE001  # the query is the user's, and the next type's may work
            what = f"could not count the expected {job_type.name} ({name_of(failed)})"
            yield unchecked("unchecked.expected", what, f"run the query of {job_type.name}'s expected= by hand")


def of_type(look: Look, job_type: JobType) -> Finding:
    """How many expected jobs of the type are missing, with a few of them."""
    seen, samples, count = Missing(), list[ExpectedJob](), 0
    for job in missing(look.connection, look.settings.need_database(), job_type, seen):
        count += 1
        if len(samples) < SAMPLES:
            samples.append(job)
    bound = f" (the first {seen.read} were looked at, there are more)" if seen.bounded else ""
    if not count:
        return ok("expected.missing", f"all {seen.read} expected {job_type.name} exist{bound}")
    keys = ", ".join(f"{job.key!r}" + (f" in {job.scope!r}" if job.scope else "") for job in samples)
    return warning(
        "expected.missing",
        f"{count} of {seen.read} expected {job_type.name} do not exist, for instance {keys}{bound}",
        command(job_type, samples[0]),
    )


def command(job_type: JobType, sample: ExpectedJob) -> str:
    """What submits them: all at once where the query gives the payloads, else one by one."""
    if sample.payload is not None:
        return f"deadsure submit {job_type.name} --missing"
    scope = f" --scope {shlex.quote(sample.scope)}" if sample.scope else ""
    return f"deadsure submit {job_type.name} --key {shlex.quote(sample.key)}{scope} --payload …"


CHECKS = (expected_jobs,)
