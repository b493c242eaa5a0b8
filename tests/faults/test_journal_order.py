"""The journal of one known job: its result is saved before the first ack, and an ack that is lost changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.faults.conftest import Court
from tests.faults.effects import Effects
from tests.faults.inject import Fault
from tests.faults.judge import Case
from tests.faults.points import QUICK
from tests.nodes.marks import on_rabbitmq
from tests.nodes.waiting import stays_true

pytestmark = pytest.mark.usefixtures("settings")
MODES = pytest.mark.parametrize("mode", ["leased_effect", "atomic"])


def acknowledged(case: Case) -> bool:
    return case.count("ack_sent") == case.count("received") > 0


def assert_saved_before_ack(case: Case) -> None:
    """In time and in the order of the rows."""
    saved, ack = case.events("result_saved")[0], case.events("ack_sent")[0]
    assert saved.at < ack.at
    assert case.journal.index(saved) < case.journal.index(ack)


def test_result_is_saved_before_the_ack_of_the_same_delivery(jobs: Any, court: Court, start_worker: Any) -> None:
    start_worker(options=QUICK)
    submitted = [jobs.leased_effect.delay(n=1), jobs.atomic.delay(n=1)]
    for result in submitted:
        case = court.wait_case(result.id, acknowledged, "is acknowledged")
        assert_saved_before_ack(case)
        assert len({event.delivery_tag for event in case.events("received", "result_saved", "ack_sent")}) == 1
        words = [event.event for event in case.journal if event.event != "published"]
        assert words == ["submit", "received", "claim", "result_saved", "succeed", "ack_sent"]
        assert case.count("published") == 1


@MODES
@on_rabbitmq
@pytest.mark.environment(DEADSURE_RESEND_FIRST_S="1")
def test_killed_between_succeed_and_ack(
    mode: str, jobs: Any, court: Court, effects: Effects, start_worker: Any, tmp_path: Path
) -> None:
    job_id = uuid4()
    once = str(tmp_path / "killed")
    first = start_worker(
        faults=[Fault("after:app.finish.succeed", "kill", who="main", match=str(job_id), once_file=once)],
        options=QUICK,
    )
    getattr(jobs, mode).apply_async(kwargs={"n": 1}, task_id=str(job_id))
    assert first.wait(60) == 137
    case = court.case(job_id)
    assert (case.state, case.count("ack_sent"), case.effects) == ("succeeded", 0, 1)

    start_worker(options=QUICK)
    case = court.wait_case(job_id, lambda case: case.count("ack_sent"), "the second delivery is acknowledged")
    assert_saved_before_ack(case)
    first_time, again = case.events("received")
    assert (first_time.redelivered, again.redelivered, again.copy) == (False, True, first_time.copy)
    assert again.reason == "already finished"
    ack = case.events("ack_sent")[0]
    assert (ack.redelivered, ack.delivery_tag, ack.copy) == (True, again.delivery_tag, again.copy)
    assert again.at < ack.at
    assert effects.starts(job_id) == effects.count(job_id) == 1
    stays_true(lambda: court.case(job_id).count("received") == 2, 1.5, "no third delivery, a resend gap later")
