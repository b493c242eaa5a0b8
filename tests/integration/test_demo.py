"""`deadsure demo` as a newcomer runs it: real servers, a real kill, and a count that would notice."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from sqlalchemy import Engine, text

import tasks  # noqa: F401  fills the allowlist of job types
from app.demo import load
from app.demo.tally import Tally
from app.settings import Settings
from app.stack import Stack
from db.session import connect
from tests.nodes.marks import on_valkey

ROOT = Path(__file__).resolve().parents[2]
JOBS, EXPORTS = 60, 36
TIMEOUT_S = 180


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """The demo's directory; afterwards its servers' data is gone, wherever it was put."""
    made = tmp_path / "demo"
    yield made
    Stack(made / "stack").destroy()


def start_demo(root: Path, *options: str) -> subprocess.Popen[str]:
    """Start it in a shell's environment that names other servers, which must not be touched."""
    foreign = {
        "DATABASE_URL": "postgresql+psycopg2://nobody@127.0.0.1:1/other",
        "BROKER_URL": "redis://127.0.0.1:1/0",
        "REPORTS_DIR": "/nowhere",
        "PGSSLMODE": "require",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "tasks.cli", "demo", "--jobs", str(JOBS), "--root", str(root), *options],
        cwd=ROOT,
        env={**os.environ, **foreign},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def play(root: Path, *options: str) -> tuple[int, str, str]:
    """Run it to its end: exit code, standard output, standard error."""
    demo = start_demo(root, *options)
    try:
        output, errors = demo.communicate(timeout=TIMEOUT_S)
    finally:
        demo.kill()
    return demo.returncode, output, errors


def last_line(output: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def left_behind(root: Path) -> list[str]:
    """Command lines of living processes that belong to the demo in `root`."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        with process.oneshot():
            line = " ".join(process.info["cmdline"] or [])
            try:
                ours = str(root) in line or process.environ().get("REPORTS_DIR") == str(root / "reports")
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        if ours and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(line)
    return found


def assert_nothing_lost(found: dict[str, Any], errors: str) -> None:
    assert (found["jobs"], found["succeeded"]) == (JOBS, JOBS)
    assert (found["lost"], found["doubled"], found["bad_files"]) == (0, 0, 0)
    assert 0.3 * JOBS <= found["succeeded_when_killed"] < JOBS
    assert 0 < found["recovery_s"] <= found["last_effect_s"]
    assert found["redelivered"] > 0, "the killed worker held messages"
    assert not psutil.pid_exists(found["killed_pid"])
    assert f"kill -9 {found['killed_pid']}" in errors


@pytest.mark.slow
def test_on_rabbitmq(root: Path) -> None:
    code, output, errors = play(root, "--broker", "rabbitmq", "--json")
    assert code == 0, errors
    assert len(output.splitlines()) == 1
    found = last_line(output)
    assert found["broker"] == "rabbitmq"
    assert_nothing_lost(found, errors)
    assert len(list((root / "reports").glob("*.csv"))) == EXPORTS
    assert not list((root / "reports").glob(".*.tmp"))
    assert left_behind(root) == []


@pytest.mark.slow
def test_on_valkey_twice_with_jobs_of_its_own_each_time(root: Path) -> None:
    code, output, errors = play(root, "--json")
    assert code == 0, errors
    first = last_line(output)
    assert first["broker"] == "valkey"
    assert_nothing_lost(first, errors)
    code, output, errors = play(root)
    assert code == 0, errors
    second = last_line(output)
    assert_nothing_lost(second, errors)
    assert first["run"] != second["run"]
    assert len(list((root / "reports").glob("*.csv"))) == 2 * EXPORTS
    for wanted in ("reports.export", "ledger.post", "redelivered", "Nothing was lost", "reports", "What to try next"):
        assert wanted in output
    assert left_behind(root) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_no_process_behind(root: Path, number: signal.Signals) -> None:
    demo = start_demo(root)
    assert demo.stderr is not None
    assert demo.stdout is not None
    for line in demo.stderr:
        if "submitted: " in line:
            break
    assert left_behind(root) != []
    demo.send_signal(number)
    assert demo.wait(TIMEOUT_S) != 0
    demo.stderr.close()
    demo.stdout.close()
    assert left_behind(root) == []


@pytest.mark.slow
def test_out_of_time_it_names_the_jobs_and_the_way_to_their_stories(root: Path) -> None:
    code, output, errors = play(root, "--timeout", "1")
    found = last_line(output)
    assert code == 1
    assert found["lost"] == JOBS
    assert found["killed_pid"] is None
    assert found["stuck"][0] in errors
    assert f"deadsure show {found['stuck'][0]}" in errors
    assert left_behind(root) == []


@on_valkey
def test_the_count_notices_what_is_lost_doubled_or_damaged(
    engine: Engine, database_url: str, settings: Settings
) -> None:
    _, prepared = load.prepare(engine, 10)
    connection = connect(database_url)
    tally = Tally(connection, prepared.run)
    for page in prepared.pages():
        assert all(answer.created for answer in load.submit_page(engine, page))
    assert tally.progress().unfinished == 10
    exports, posts = ([str(job.job_id) for job in jobs] for jobs in (prepared.exports, prepared.posts))
    settings.reports_dir.mkdir(parents=True)
    with engine.begin() as business:
        business.execute(
            text("UPDATE jobs SET state = 'succeeded', result_key = 'k', finished_at = now() WHERE scope = :run"),
            {"run": prepared.run},
        )
        for job_id in (posts[0], posts[0], *posts[2:]):  # one doubled, one without effect
            business.execute(
                text(
                    "INSERT INTO ledger_entries (job_id, account_id, amount_cents, currency)"
                    " SELECT :job_id, min(account_id), 1, 'EUR' FROM accounts"
                ),
                {"job_id": job_id},
            )
        for job_id in exports:
            business.execute(
                text(
                    "INSERT INTO report_exports (job_id, result_key, rows, bytes, sha256)"
                    " VALUES (:job_id, 'k', 1, 1, encode(sha256('x'), 'hex'))"
                ),
                {"job_id": job_id},
            )
    for job_id, content in zip(exports[1:], ["damaged", *["x"] * len(exports)], strict=False):
        (settings.reports_dir / f"{job_id}.csv").write_text(content)
    found = {entry.type: entry for entry in tally.by_type({load.EXPORT: 7, load.POST: 4})}
    assert tally.bad_files(settings.reports_dir) == exports[:2], "one is missing, one is damaged"
    assert Tally(connection, "another run").by_type({load.POST: 1})[0].lost == 1
    connection.close()
    assert (found[load.POST].lost, found[load.POST].doubled) == (1, 1)
    assert (found[load.EXPORT].jobs, found[load.EXPORT].lost) == (7, 1), "one was submitted and has no row"
