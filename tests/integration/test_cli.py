"""`deadsure`: each command for people and for scripts; errors in one line; no payload in any output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from app import settings as app_settings
from app.settings import Settings
from db import migrate
from db.session import rows
from tests.integration.scene import Scene

ROOT = Path(__file__).parents[2]
SECRET = "sehr-geheim-4711"  # noqa: S105  a payload that must not be printed
Run = Callable[..., Result]


@pytest.fixture
def cli(jobs: Any) -> Run:
    """The console script's group in this process: (arguments) -> what it printed."""
    assert jobs
    from tasks.commands import deadsure  # noqa: PLC0415  reads the environment when it is imported

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(deadsure, arguments, prog_name="deadsure")

    return run


def program(*arguments: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
    """The console script as a program of its own; None takes a variable away."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("DEADSURE_")}
    changed = {**inherited, **{key: value for key, value in environment.items() if value is not None}}
    for key in [key for key, value in environment.items() if value is None]:
        changed.pop(key, None)
    return subprocess.run(
        [sys.executable, "-m", "tasks.cli", *arguments],
        cwd=ROOT,
        env=changed,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def as_json(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    assert result.output.count("\n") == 1
    return json.loads(result.output)


def one_error(result: Result) -> str:
    """The one line of an error that was expected."""
    assert result.exit_code != 0
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if line and not line.startswith(("Usage:", "Try "))]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("Error: ")
    return lines[0]


def payload(**fields: Any) -> str:
    return json.dumps({"account_id": 1, "amount_cents": 5, "currency": "EUR", "memo": SECRET} | fields)


def submitted(cli: Run, *more: str) -> uuid.UUID:
    return uuid.UUID(as_json(cli("submit", "ledger.post", "--payload", payload(), "--json", *more))["job_id"])


# submit


def test_submit_writes_the_job(cli: Run, scene: Scene) -> None:
    job_id = submitted(cli, "--key", "k", "--scope", "acct-7", "--priority", "9", "--countdown", "60")
    row = scene.row(job_id)
    assert (row["type"], row["idempotency_key"], row["scope"], row["priority"]) == ("ledger.post", "k", "acct-7", 9)
    assert row["payload"]["memo"] == SECRET
    assert row["not_before"] > row["created_at"]


def test_submit_tells_what_became_of_it(cli: Run) -> None:
    arguments = ("submit", "ledger.post", "--payload", payload(), "--key", "k")
    first, again = cli(*arguments), cli(*arguments)
    assert first.exit_code == again.exit_code == 0
    assert "deadsure show" in first.output
    assert "there already, it is queued" in again.output
    answer = as_json(cli(*arguments, "--json"))
    assert (answer["created"], answer["state"]) == (False, "queued")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ledger.post", "--payload", f"{{{SECRET}"], "no JSON"),
        (["ledger.post", "--payload", f'["{SECRET}"]'], "must be a JSON object"),
        (["ledger.post", "--payload", f'"{SECRET}"'], "must be a JSON object"),
        (["ledger.post", "--payload", payload(amount_cents=SECRET)], "amount_cents"),
        (["ledger.post", "--payload", '{"account_id": NaN}'], "account_id"),
        (["ledger.post", "--payload", payload(memo="a\0b" + SECRET)], "Error"),
        (["ledger.post", "--payload", payload(memo="\ud800" + SECRET)], "Error"),
        (["no.such.type", "--payload", payload()], "known: "),
        (["ledger.post", "--payload", payload(), "--priority", "10"], "--priority"),
        (["ledger.post", "--payload", payload(), "--countdown", "-1"], "--countdown"),
        (["ledger.post", "--payload", payload(), "--countdown", "inf"], "Error"),
        (["ledger.post", "--payload", payload(), "--countdown", "nan"], "Error"),
        (["ledger.post", "--payload", payload(), "--key", ""], "idempotency_key"),
        (["ledger.post"], "--payload"),
    ],
)
def test_submit_refuses_in_one_line_without_the_payload(
    cli: Run, scene: Scene, arguments: list[str], said: str
) -> None:
    result = cli("submit", *arguments)
    assert said in one_error(result)
    assert SECRET not in result.output
    assert scene.ask("SELECT count(*) FROM jobs") == 0


def test_submit_with_a_key_that_is_taken(cli: Run) -> None:
    job_id = submitted(cli, "--key", "k")
    result = cli("submit", "ledger.post", "--payload", payload(amount_cents=6), "--key", "k")
    assert str(job_id) in one_error(result)
    assert SECRET not in result.output


# show


def ended(scene: Scene, job_id: uuid.UUID) -> None:
    """The job has run and left a result, which is the handler's and not for a terminal."""
    rows(scene.eyes, "DELETE FROM outbox WHERE job_id = %s", (str(job_id),))
    scene.change(job_id, state="succeeded", result_key="entry:7", finished_at="now", result=f'"{SECRET}"')


def test_show_tells_the_story(cli: Run, scene: Scene) -> None:
    job_id = submitted(cli)
    found = as_json(cli("show", str(job_id), "--json"))
    assert (found["job_id"], found["state"], found["type"]) == (str(job_id), "queued", "ledger.post")
    assert found["debt"]["sends"] == 0
    assert [event["event"] for event in found["journal"]] == ["submit"]
    readable = cli("show", str(job_id))
    assert readable.exit_code == 0
    for word in (str(job_id), "queued", "debt.sends", "submit"):
        assert word in readable.output
    ended(scene, job_id)
    found = as_json(cli("show", str(job_id), "--json"))
    assert (found["debt"], found["result_key"]) == (None, "entry:7")
    assert cli("show", str(job_id)).exit_code == 0


def test_show_of_no_job(cli: Run) -> None:
    nobody = str(uuid.uuid4())
    for more in ([], ["--json"]):
        assert f"no job {nobody}" in one_error(cli("show", nobody, *more))
    assert "not a valid UUID" in one_error(cli("show", "soon"))


# jobs list


def test_list_newest_first_and_filtered(cli: Run, scene: Scene) -> None:
    first, second = submitted(cli), submitted(cli)
    scene.change(first, state="quarantined", cause="permanent", episode=1)
    other = scene.job(created_at="yesterday")

    def ids(*filters: str) -> list[str]:
        return [job["job_id"] for job in as_json(cli("jobs", "list", "--json", *filters))]

    assert ids() == [str(second), str(first), str(other)]
    assert ids("--state", "quarantined") == [str(first)]
    assert ids("--type", "scene.plain") == [str(other)]
    assert ids("--older", "60") == [str(other)]
    assert ids("--limit", "1") == [str(second)]
    assert ids("--type", "none") == []
    readable = cli("jobs", "list")
    assert readable.exit_code == 0
    assert "3 jobs" in readable.output


@pytest.mark.parametrize(
    "arguments", [["--state", "done"], ["--limit", "0"], ["--older", "-1"], ["--older", "nan"], ["--older", "inf"]]
)
def test_list_refuses(cli: Run, arguments: list[str]) -> None:
    one_error(cli("jobs", "list", *arguments))


def test_a_table_keeps_whole_job_ids_in_a_narrow_terminal(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are there to be copied into `deadsure show`."""
    monkeypatch.setenv("COLUMNS", "80")
    job_id = submitted(cli)
    assert str(job_id) in cli("jobs", "list").output


# no payload anywhere


def test_no_output_holds_a_payload_or_a_result(cli: Run, scene: Scene) -> None:
    job_id = submitted(cli, "--key", "k")
    printed = ""
    for _ in range(2):
        for arguments in (["show", str(job_id)], ["jobs", "list"]):
            for more in ([], ["--json"]):
                result = cli(*arguments, *more)
                assert result.exit_code == 0, result.output
                printed += result.output
        ended(scene, job_id)
    assert SECRET not in printed


# db upgrade, settings, help


def test_db_upgrade_twice(empty_database_url: str) -> None:
    first = program("db", "upgrade", "--json", DATABASE_URL=empty_database_url, BROKER_URL=None)
    assert json.loads(first.stdout) == {"before": 0, "after": migrate.NEWEST}
    assert first.returncode == 0, first.stderr
    second = program("db", "upgrade", DATABASE_URL=empty_database_url, BROKER_URL=None)
    assert (second.returncode, second.stdout) == (0, f"The schema is at {migrate.NEWEST:04d} already.\n")


def test_settings_are_listed(cli: Run) -> None:
    listed = as_json(cli("settings", "--json"))
    assert {entry["name"] for entry in listed} == {name for name, _, _ in Settings.describe()}
    readable = cli("settings")
    assert readable.exit_code == 0
    assert "DEADSURE_LEASE_S" in readable.output


def commands(group: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for name, command in group.commands.items():
        found.extend(commands(command, (*path, name)) if hasattr(command, "commands") else [(*path, name)])
    return found


def test_every_command_explains_itself(cli: Run) -> None:
    from tasks.commands import deadsure  # noqa: PLC0415

    for path in commands(deadsure):
        result = cli(*path, "--help")
        assert result.exit_code == 0
        text = result.output.partition("Options:")[0].splitlines()
        assert any(line.strip().endswith(".") or line.strip() for line in text[1:]), path
        if path != ("relay",):
            assert "--json" in result.output, path


# the environment


READERS = [["jobs", "list"], ["show", str(uuid.uuid4())], ["submit", "ledger.post", "--payload", payload()]]


@pytest.mark.parametrize("arguments", READERS, ids=lambda arguments: arguments[0])
def test_a_database_that_is_away(cli: Run, monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql+psycopg2://x:hidden@127.0.0.1:1/x")
    app_settings.settings.cache_clear()
    result = cli(*arguments)
    assert "database does not answer" in one_error(result)
    assert "hidden" not in result.output


@pytest.mark.parametrize("arguments", [*READERS, ["db", "upgrade"]], ids=lambda arguments: arguments[0])
def test_no_database_url(cli: Run, monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    monkeypatch.delenv("DATABASE_URL")
    app_settings.settings.cache_clear()
    assert "DATABASE_URL is not set" in one_error(cli(*arguments))


def test_upgrade_with_the_database_away(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql+psycopg2://x:hidden@127.0.0.1:1/x")
    app_settings.settings.cache_clear()
    assert "database does not answer" in one_error(cli("db", "upgrade"))


@pytest.mark.parametrize("arguments", READERS, ids=lambda arguments: arguments[0])
def test_an_empty_database(
    cli: Run, empty_database_url: str, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setenv("DATABASE_URL", empty_database_url)
    app_settings.settings.cache_clear()
    assert "run `deadsure db upgrade`" in one_error(cli(*arguments))


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"DEADSURE_LEASES_S": "3"}, "DEADSURE_LEASES_S is no setting"),
        ({"DEADSURE_LEASE_S": "soon"}, "DEADSURE_LEASE_S='soon' is no float"),
        ({"DATABASE_URL": "postgresql://a@b/c"}, "names the driver 'postgresql'"),
        ({"DATABASE_URL": None}, "DATABASE_URL is not set"),
        ({"DATABASE_URL": "::"}, "DATABASE_URL cannot be read"),
    ],
    ids=["unknown variable", "no number", "another driver", "no url", "no url at all"],
)
def test_a_wrong_environment_ends_the_program_in_one_line(environment: dict[str, str | None], said: str) -> None:
    given = {"DATABASE_URL": "postgresql+psycopg2://x@127.0.0.1:1/x", "BROKER_URL": None, **environment}
    ended = program("jobs", "list", **given)
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr.count("\n") == 1, ended.stderr
    assert said in ended.stderr


def test_a_relay_without_a_broker_url() -> None:
    ended = program("relay", DATABASE_URL="postgresql+psycopg2://x@127.0.0.1:1/x", BROKER_URL=None)
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1)
    assert "BROKER_URL is not set" in ended.stderr


def test_jobs_cancel_takes_what_a_list_prints(scene: Scene, cli: Run, jobs: Any) -> None:
    from tasks.commands import deadsure  # noqa: PLC0415  reads the environment when it is imported

    waiting = {jobs.atomic.delay(n=n).id for n in range(3)}
    listed = cli("jobs", "list", "--state", "queued", "--json")
    arguments = ("jobs", "cancel", "-", "--reason", "the wrong month", "--author", "ann", "--json", "--yes")
    answered = CliRunner().invoke(deadsure, arguments, input=listed.output, prog_name="deadsure")
    assert {entry["job_id"] for entry in as_json(answered) if entry["done"]} == waiting
    for job_id in waiting:
        row = scene.row(uuid.UUID(job_id))
        assert (row["state"], row["reason"]) == ("cancelled", "ann: the wrong month")


def test_jobs_cancel_asks_a_running_one_and_leaves_what_it_may_not_decide(scene: Scene, cli: Run) -> None:
    running = scene.claimed(scene.worker()).claimed.job_id
    done = scene.job(state="succeeded", result_key="k", finished_at="now")
    stuck = scene.job(state="quarantined", cause="permanent", episode=1)
    told = cli("jobs", "cancel", *map(str, (running, done, stuck)), "--reason", "r", "--yes")
    assert told.exit_code == 3
    assert "1 running; it is asked to stop" in told.output
    assert f"{done}  finished already" in told.output
    assert f"deadsure quarantine cancel {stuck}" in told.output
    assert (scene.row(running)["cancel_requested"], scene.state(stuck)) == (True, "quarantined")
    refused = cli("jobs", "cancel", str(running), "--reason", "r")
    assert refused.exit_code == 1
