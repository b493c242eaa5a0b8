"""The worklist with real processes: commands that are killed, workers that are frozen; nothing acts twice."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from tests.faults.effects import Effects
from tests.faults.inject import Fault
from tests.faults.outcomes import Outcomes
from tests.faults.points import QUICK
from tests.nodes.marks import on_rabbitmq
from tests.nodes.node import Node
from tests.nodes.programs import Programs
from tests.nodes.waiting import wait_for

JOBS = 500
pytestmark = [pytest.mark.usefixtures("settings"), on_rabbitmq]
OPTIONS = (*QUICK, "-I", "tests.faults.jobs_replay")
COMMAND = "import tests.faults.jobs_replay; from tasks.commands import deadsure; deadsure()"
RUNS = "SELECT sum(attempt) FROM jobs"
BY = ("--author", "ann", "--reason", "the provider is back", "--yes", "--json")


@pytest.fixture
def outcomes(engine: Engine) -> Outcomes:
    return Outcomes(engine)


@pytest.fixture
def kinds(jobs: Any) -> Any:
    """`tests.faults.jobs_replay`, imported when the environment is there."""
    assert jobs
    import tests.faults.jobs_replay  # noqa: PLC0415

    return tests.faults.jobs_replay


def replay(programs: Programs, *arguments: str, faults: tuple[Fault, ...] = ()) -> Node:
    """`deadsure quarantine replay …` as a process."""
    return programs.producer(COMMAND, "quarantine", "replay", *arguments, *BY, faults=faults)


def told(command: Node, code: int) -> dict[str, Any]:
    """What the command printed, once it has ended with this exit code."""
    assert command.wait(90) == code, command.logs()
    found: dict[str, Any] = json.loads([line for line in command.logs().splitlines() if line.startswith("{")][-1])
    return found


def test_500_with_one_cause_fixed_for_half_of_them(
    kinds: Any, programs: Programs, outcomes: Outcomes, effects: Effects, engine: Engine, tmp_path: Path
) -> None:
    """It stops in the second stage; then the command is killed in the middle, and resumed: nothing runs twice."""
    gate = tmp_path / "gate"
    gate.write_text(" ".join(map(str, range(JOBS))))
    programs.worker(options=OPTIONS)
    with Session(engine) as session:
        kinds.gated.submit_many(session, [{"n": n, "gate": str(gate)} for n in range(JOBS)])
        session.commit()
    wait_for(lambda: outcomes.states()["quarantined"] == JOBS, 90, "all are quarantined")
    (group,) = outcomes.rows("SELECT fingerprint, count(*) FROM quarantine_entries GROUP BY 1")
    assert outcomes.value(RUNS) == JOBS

    in_order = outcomes.rows(
        "SELECT payload->>'n' AS n FROM jobs JOIN quarantine_entries USING (job_id) ORDER BY quarantined_at, job_id"
    )
    gate.write_text(" ".join(row.n for row in in_order[1::2]))  # every second one stays broken
    stopped = told(replay(programs, "--fingerprint", group.fingerprint), 4)
    assert stopped["stopped"] == "returned"
    assert stopped["counts"].keys() == {"succeeded", "returned", "to come"}, "it waited for those that were out"
    tried = JOBS - stopped["counts"]["to come"]
    assert 2 <= tried <= 11, "the first stage, and not more than the second"
    assert outcomes.value(RUNS) == JOBS + tried

    gate.write_text("")
    run = stopped["run_id"]
    killed = replay(programs, "--resume", run, faults=(Fault("after:app.replay.replay", "kill", when=100),))
    assert killed.wait(90) == -9 or killed.exit_code() in (137, -9)
    assert outcomes.states()["quarantined"] > 0, "it was killed in the middle"
    both = [replay(programs, "--resume", run) for _ in range(2)]
    ended = [told(one, 3)["counts"] for one in both]
    returned = ended[0]["returned"]
    assert ended[0] == ended[1] == {"returned": returned, "succeeded": JOBS - returned}
    assert outcomes.states() == Counter(succeeded=JOBS - returned, quarantined=returned)

    rest = told(replay(programs, "--fingerprint", group.fingerprint), 0)
    assert rest["counts"] == {"succeeded": returned}
    replays = outcomes.rows("SELECT job_id, episode, count(*) FROM quarantine_actions GROUP BY 1, 2")
    assert {row.count for row in replays} == {1}
    assert (effects.count(), effects.doubled()) == (JOBS, {})
    assert outcomes.value(RUNS) == JOBS + len(replays) == 2 * JOBS + returned


@pytest.mark.environment(DEADSURE_PREFETCH="1", DEADSURE_RESEND_MAX_S="2")
def test_c27_a_frozen_worker_and_another_payload(
    kinds: Any, programs: Programs, outcomes: Outcomes, effects: Effects, tmp_path: Path
) -> None:
    """One job is frozen before its call, one in it. Only the first may be edited; then the old payload never acts."""
    go = tmp_path / "go"
    first = programs.worker(options=OPTIONS)
    before, within = (kinds.calling.delay(n=0, where=where, go=str(go)).id for where in ("before", "in"))
    wait_for(lambda: effects.starts() == 2 and outcomes.rows("SELECT FROM effects"), 30, "both are where they wait")
    first.sigstop()
    programs.worker(options=OPTIONS)
    wait_for(lambda: outcomes.states()["quarantined"] == 2, 60, "their owner's lease is over")

    edit = ("--patch", json.dumps({"n": 1, "where": "nowhere"}))
    commands = [replay(programs, job_id, *edit, "--wait") for job_id in (before, within)]
    assert told(commands[0], 0)["counts"] == {"succeeded": 1}
    (left,) = told(commands[1], 3)["left"]
    assert (left["job_id"], "may still act" in left["outcome"]) == (within, True)
    go.touch()
    first.sigcont()
    wait_for(lambda: outcomes.rows("SELECT FROM effects WHERE status = 'finished' AND attempt = 1"), 60, "it woke up")
    assert told(replay(programs, within, "--settle-done"), 0)["counts"] == {"settled": 1}
    first.wait_for_log("lease.lost")
    assert (effects.count(before, "act 0"), effects.count(before, "act 1")) == (0, 1)
    assert (effects.count(within, "act 0"), effects.count(within, "act 1")) == (1, 0)
    assert [row.result for row in outcomes.rows("SELECT result FROM jobs WHERE job_id = :id", id=within)] == [{"n": 0}]
