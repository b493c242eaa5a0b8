"""`deadsure prune` as a program, killed in the middle; its answers; and the periodic job that does the same."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from celery.result import AsyncResult
from click.testing import CliRunner, Result

from app.errors import JobCancelled
from db.session import rows
from tests.faults.inject import VARIABLE, Fault, dump
from tests.integration.scene import Scene

ROOT = Path(__file__).parents[2]
Run = Callable[..., Result]
# Ended 60 days ago; the state and the age from the outside.
END = """
UPDATE jobs SET state = %(state)s::job_state, result_key = CASE %(state)s WHEN 'succeeded' THEN 'entry:7' END,
       result = '"secret"', created_at = now() - %(ago)s::interval, finished_at = now() - %(ago)s::interval
 WHERE job_id = %(job_id)s
"""


@pytest.fixture
def cli(jobs: Any) -> Run:
    """The console script's group in this process."""
    assert jobs
    from tasks.commands import deadsure  # noqa: PLC0415  reads the environment when it is imported

    def run(*arguments: str, **more: Any) -> Result:
        return CliRunner().invoke(deadsure, arguments, prog_name="deadsure", **more)

    return run


@pytest.fixture
def ended(scene: Scene, jobs: Any) -> Callable[..., AsyncResult]:
    """A job of `tests.leased_effect` that ended long ago."""

    def made(n: int = 0, state: str = "succeeded", ago: str = "60 days", key: str | None = None) -> AsyncResult:
        result: AsyncResult = jobs.leased_effect.apply_async(kwargs={"n": n}, idempotency_key=key)
        rows(scene.eyes, "DELETE FROM outbox WHERE job_id = %s", (result.id,))
        rows(scene.eyes, END, {"state": state, "ago": ago, "job_id": result.id})
        return result

    return made


def program(*arguments: str, faults: list[Fault]) -> int:
    """`deadsure prune` as a process of its own, with faults from outside; how it ended."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.run_with_faults", "tasks.cli", "prune", *arguments],
        cwd=ROOT,
        env={**os.environ, VARIABLE: dump(faults)},
        capture_output=True,
        timeout=60,
        check=False,
    )
    return done.returncode


@pytest.mark.parametrize("name", ["pruned.jsonl", "pruned.jsonl.gz"])
def test_killed_between_export_and_delete(scene: Scene, ended: Any, tmp_path: Path, name: str) -> None:
    """The file is durable, the delete is not committed: nothing is lost, and the next run writes those again."""
    ids = {ended(n).id for n in range(7)}
    path = tmp_path / name
    options = ("--yes", "--rows", "3", "--pause", "0", "--export", str(path))
    assert program(*options, faults=[Fault("after:app.retention.archive.Archive.write", "kill", when=2)]) == -9
    assert scene.ask("SELECT count(*) FROM jobs") == 4
    assert scene.ask("SELECT count(*) FROM job_tombstones") == 3
    with path.open("ab") as torn:
        torn.write(b'{"job_id": "cut off')
    assert program(*options, faults=[]) == 0
    assert scene.ask("SELECT count(*) FROM jobs") == 0
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    written = Counter(json.loads(line)["job_id"] for line in text.splitlines())
    assert set(written) == ids
    assert sorted(written.values()) == [1, 1, 1, 1, 2, 2, 2]


def test_it_asks_before_it_deletes(cli: Run, scene: Scene, ended: Any) -> None:
    ended()
    refused = cli("prune", input="n\n")
    assert "succeeded older than 30d, cancelled older than 30d" in refused.output
    assert refused.exit_code == 1
    assert cli("prune", "--json").exit_code != 0
    assert scene.ask("SELECT count(*) FROM jobs") == 1
    assert cli("prune", input="y\n").exit_code == 0
    assert scene.ask("SELECT count(*) FROM jobs") == 0


def test_a_dry_run_counts_by_state_and_type(cli: Run, scene: Scene, ended: Any) -> None:
    for n in range(3):
        ended(n, "cancelled" if n == 2 else "succeeded")
    ended(9, ago="10 days")
    found = json.loads(cli("prune", "--dry-run", "--json").output)
    assert found["jobs"] == [
        {"state": "cancelled", "type": "tests.leased_effect", "count": 1},
        {"state": "succeeded", "type": "tests.leased_effect", "count": 2},
    ]
    assert (found["dry_run"], found["complete"]) == (True, True)
    assert "3 jobs would go" in cli("prune", "--dry-run").output
    assert json.loads(cli("prune", "--dry-run", "--json", "--succeeded", "5d").output)["jobs"][1]["count"] == 3
    assert scene.ask("SELECT count(*) FROM jobs") == 4


def test_what_is_kept_and_why_is_told(cli: Run, scene: Scene, ended: Any) -> None:
    job_id = ended().id
    rows(
        scene.eyes,
        "INSERT INTO dead_letters (job_id, body, reason) VALUES (%s, '', 'r')",
        (job_id,),
    )
    assert json.loads(cli("prune", "--yes", "--json").output)["kept"] == {"a dead letter": 1}
    assert "kept, because of: 1 a dead letter" in cli("prune", "--yes").output


def test_a_bounded_run_says_that_it_did_not_finish(cli: Run, ended: Any) -> None:
    ended()
    found = json.loads(cli("prune", "--yes", "--json", "--for", "0").output)
    assert (found["complete"], found["jobs"]) == (False, [])
    assert "run it again" in cli("prune", "--yes", "--for", "0").output


@pytest.mark.parametrize("arguments", [["--succeeded", "30"], ["--succeeded", "0s"], ["--rows", "0"], ["--for", "nan"]])
def test_it_refuses(cli: Run, arguments: list[str]) -> None:
    result = cli("prune", "--yes", *arguments)
    assert result.exit_code == 2
    assert arguments[0] in result.output


def test_a_pruned_job_still_answers(cli: Run, ended: Any) -> None:
    done, gone = ended(1, key="k"), ended(2, "cancelled", key="c")
    assert cli("prune", "--yes").exit_code == 0
    assert (done.state, done.get(timeout=1)) == ("SUCCESS", None)
    assert gone.state == "REVOKED"
    with pytest.raises(JobCancelled):
        gone.get(timeout=1)
    shown = cli("show", done.id)
    assert shown.exit_code == 0
    for said in ("pruned on 20", "tests.leased_effect", "succeeded", "entry:7"):
        assert said in shown.output
    told = json.loads(cli("show", done.id, "--json").output)
    assert (told["state"], told["debt"], told["journal"]) == ("succeeded", None, [])
    assert told["pruned_at"]


def test_the_periodic_job_does_the_same(scene: Scene, ended: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks.schedule import read  # noqa: PLC0415  reads the environment
    from tasks.upkeep import prune_jobs  # noqa: PLC0415

    for n in range(3):
        ended(n)
    monkeypatch.setitem(prune_jobs.app.conf.changes, "task_always_eager", True)
    result = prune_jobs.delay().get(timeout=1)
    assert (result["jobs"], result["complete"]) == (3, True)
    assert scene.ask("SELECT count(*) FROM jobs WHERE type = 'tests.leased_effect'") == 0
    (entry,) = [entry for entry in read(prune_jobs.app).durable if entry.job_type.name == "deadsure.prune"]
    assert entry.schedule == "crontab 17 3 * * * UTC"


def test_the_periodic_job_gives_its_place_to_others_and_goes_on(
    scene: Scene, ended: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tasks import eager  # noqa: PLC0415  reads the environment
    from tasks.upkeep import prune_jobs  # noqa: PLC0415

    for n in range(3):
        ended(n)
    monkeypatch.setitem(prune_jobs.app.conf.changes, "task_always_eager", True)
    result = prune_jobs.delay(run_s=1e-9)
    job_id = UUID(result.id)
    row = scene.row(job_id)
    assert (row["state"], row["releases"], row["checkpoint"]["jobs"]) == ("queued", 1, 0)
    scene.change(job_id, payload='{"run_s": 60}', checkpoint=json.dumps({**row["checkpoint"], "jobs": 5}))
    eager.run(prune_jobs.prepare({}, job_id=job_id))
    assert result.get(timeout=1)["jobs"] == 8
