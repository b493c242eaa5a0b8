"""Fixtures of the fault tests: the job types to submit, and the judge that has the last word."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine

from app.states import State
from tests.faults.judge import Case, cases, judge
from tests.nodes.programs import Programs
from tests.nodes.waiting import wait_for

DONE_TIMEOUT_S = 90


@pytest.fixture
def jobs(settings: object) -> Any:
    """`tests.faults.jobs`, imported when the environment is there."""
    assert settings
    import tests.faults.jobs  # noqa: PLC0415

    return tests.faults.jobs


@pytest.fixture
def deadly(jobs: Any) -> Any:
    """`tests.faults.jobs_deaths`, imported when the environment is there."""
    assert jobs
    import tests.faults.jobs_deaths  # noqa: PLC0415

    return tests.faults.jobs_deaths


@pytest.fixture
def leaving(jobs: Any) -> Any:
    """`tests.faults.jobs_leaving`, imported when the environment is there."""
    assert jobs
    import tests.faults.jobs_leaving  # noqa: PLC0415

    return tests.faults.jobs_leaving


@dataclass(frozen=True)
class Court:
    """Looks at the jobs of the test, and waits for what is to be seen there."""

    engine: Engine

    def case(self, job_id: UUID | str) -> Case:
        """One job."""
        return cases(self.engine)[UUID(str(job_id))]

    def wait_case(self, job_id: UUID | str, condition: Callable[[Case], object], what: str) -> Case:
        """Wait until `condition` holds for a job; the job as it was then."""

        def holds() -> Case | None:
            case = self.case(job_id)
            return case if condition(case) else None

        found = wait_for(holds, DONE_TIMEOUT_S, f"{job_id}: {what}")
        assert found is not None
        return found

    def wait_succeeded(self, job_ids: Iterable[UUID | str], timeout_s: float = DONE_TIMEOUT_S) -> dict[UUID, Case]:
        """Wait until these jobs have succeeded, then judge all; a failure names the states seen last."""
        wanted = {UUID(str(job_id)) for job_id in job_ids}
        last: dict[UUID, Case] = {}

        def succeeded() -> bool:
            last.update(cases(self.engine))
            return all(last[job_id].state is State.SUCCEEDED for job_id in wanted)

        try:
            wait_for(succeeded, timeout_s, f"{len(wanted)} jobs succeed")
        except AssertionError as error:
            seen = [f"{last[job_id].type} {job_id}: {last[job_id].state}" for job_id in wanted]
            raise AssertionError("\n".join([str(error), *seen])) from None
        return judge(self.engine)


@pytest.fixture
def court(engine: Engine, programs: Programs) -> Iterator[Court]:  # noqa: ARG001  it ends before them
    """Judges at the end of the test, while its programs still run."""
    yield Court(engine)
    judge(engine)
