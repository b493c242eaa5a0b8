"""The allowlist of job types, keyed by (type, version): what may run at all, and on which terms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel
from sqlalchemy import Executable
from sqlalchemy.orm import Session

from app.effects import Check
from app.errors import ConfigurationError, UnknownJobType
from app.failures import Classifier
from app.retry_policy import RetryPolicy

Mode = Literal["leased", "atomic"]
Expected = Callable[[Session], Iterable[Any]] | Executable | str
ATOMIC_LIMIT_S = 30.0
COALESCE_LIMIT, COALESCE_ATOMIC = 200, 50


@dataclass(frozen=True)
class JobType:
    """The terms of one job type.

    `mode`: `leased` commits the claim before the effect; `atomic` has one commit for claim, effect and success.
    `time_limit_s`: hard limit of one attempt. `expire_early`: whether a missing session of the owner may end its
    lease early; set it to False for an external effect that has neither idempotency key nor status question.
    `soft_time_limit_s`: raises SoftTimeLimitExceeded in the handler, a transient failure. `classify` sorts errors that
    the defaults do not know. `check(name, key, payload)` asks the other side about a call that was cut off;
    `on_uncertain` decides when nobody can be asked and the other side takes no key. `whole_effect` names the call that
    is all a job of this type does: a quarantined job whose call is done is settled, not run again. `foreign`: messages
    of clients that have only the broker are adopted. `expected`: which jobs should exist by now, as a SELECT or a
    function of a session that yields (scope, key), or (scope, key, payload); `deadsure doctor` counts the missing ones.
    `coalesce`: under backlog one delivery carries up to so many jobs; default 50 for atomic types, whose jobs then
    share commits, and 1 for leased ones.
    """

    name: str
    payload: type[BaseModel]
    version: int = 1
    mode: Mode = "leased"
    queue: str = "jobs"
    priority: int = 0
    time_limit_s: float = 900.0
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    max_crashes: int = 3
    max_stalls: int = 3
    expire_early: bool = True
    key: Callable[[Any], str] | None = None
    soft_time_limit_s: float | None = None
    classify: Classifier | None = None
    check: Check | None = None
    on_uncertain: Literal["quarantine", "retry"] = "quarantine"
    whole_effect: str | None = None
    foreign: bool = False
    expected: Expected | None = None
    coalesce: int | None = None

    def __post_init__(self) -> None:
        if self.mode == "atomic" and self.time_limit_s > ATOMIC_LIMIT_S:
            raise ConfigurationError(
                f"{self.name}: an atomic job holds a row lock, so time_limit_s={self.time_limit_s:g} "
                f"must be at most {ATOMIC_LIMIT_S:g}; make it leased"
            )
        if self.coalesce is not None and not 1 <= self.coalesce <= COALESCE_LIMIT:
            raise ConfigurationError(f"{self.name}: coalesce={self.coalesce} is not in 1..{COALESCE_LIMIT}")

    @property
    def jobs_per_delivery(self) -> int:
        """How many jobs one delivery may carry."""
        return self.coalesce or (COALESCE_ATOMIC if self.mode == "atomic" else 1)

    def parse(self, payload: Mapping[str, Any]) -> BaseModel:
        """The validated payload; raises pydantic.ValidationError naming the fields."""
        return self.payload.model_validate(payload)


REGISTRY: dict[tuple[str, int], JobType] = {}


def register(job_type: JobType) -> JobType:
    """Put a type on the allowlist; raises ConfigurationError when the name and version are taken."""
    known = REGISTRY.setdefault((job_type.name, job_type.version), job_type)
    if known is not job_type:
        raise ConfigurationError(f"job type {job_type.name!r} version {job_type.version} is registered twice")
    return job_type


def find(name: str, version: int | None = None) -> JobType:
    """The type `name` (its newest version by default); raises UnknownJobType listing what exists."""
    versions = [v for (known, v) in REGISTRY if known == name]
    wanted = version if version is not None else max(versions, default=None)
    found = REGISTRY.get((name, wanted)) if wanted is not None else None
    if found is None:
        names = ", ".join(sorted({known for known, _ in REGISTRY})) or "none"
        raise UnknownJobType(
            f"no job type {name!r}" + (f" version {version}" if versions else "") + f"; known: {names}"
        )
    return found


def queues() -> list[str]:
    """Every queue that a known type is routed to; `jobs` is always one."""
    return sorted({"jobs", *(job_type.queue for job_type in REGISTRY.values())})
