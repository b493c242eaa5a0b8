"""`deadsure quarantine`: each command for people and for scripts, with exit codes, and no secret in any output."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from typing import Annotated, Any
from uuid import UUID

import pytest
from click.testing import CliRunner, Result
from pydantic import BaseModel, SecretStr

from app import dead_letters, replay_walk, submit
from app.dead_letters import DeadLetter
from app.effects import Caller
from app.job_types import REGISTRY, JobType
from app.redaction import SECRET
from db.session import rows
from tests.integration.scene import PLAIN, Scene, Worker
from tests.integration.test_replay_run import Fleet
from tests.integration.worklist import FRAMES, actions, quarantine, quarantined

HUSH = "hush-4711"
Run = Callable[..., Result]
BY = ("--author", "ann", "--reason", "the provider is back")


class Login(BaseModel):
    """A payload with secrets of both kinds."""

    n: int = 0
    password: SecretStr = SecretStr(HUSH)
    token: Annotated[str, SECRET] = HUSH


@pytest.fixture
def cli(scene: Scene, jobs: Any, monkeypatch: pytest.MonkeyPatch) -> Run:
    """(arguments of `deadsure quarantine`) -> what it printed."""
    assert jobs
    from tasks.commands import deadsure  # noqa: PLC0415  reads the environment when it is imported

    monkeypatch.setitem(REGISTRY, (PLAIN.name, 1), JobType(name=PLAIN.name, payload=Login))
    monkeypatch.setattr(replay_walk, "LOOK_S", 0.02)

    def run(*arguments: str, stdin: str | None = None) -> Result:
        done = CliRunner().invoke(deadsure, ("quarantine", *arguments), prog_name="deadsure", input=stdin)
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
        assert HUSH not in done.output
        return done

    assert scene.url
    return run


@pytest.fixture
def worker(scene: Scene) -> Worker:
    return scene.worker()


def login(scene: Scene, n: int = 0, scope: str = "") -> UUID:
    job_type = REGISTRY[PLAIN.name, 1]
    new = submit.prepare(job_type, Login(n=n), scope=scope)
    submit.within(lambda sql, values: rows(scene.eyes, sql, values), [new])
    return new.job_id


def failed(scene: Scene, worker: Worker, n: int = 0, scope: str = "", **how: Any) -> str:
    return str(quarantined(scene, worker, login(scene, n, scope), **how))


def as_json(result: Result, code: int = 0) -> Any:
    assert result.exit_code == code, result.output
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout)


# list


def test_groups_and_their_filters(cli: Run, scene: Scene, worker: Worker) -> None:
    first = failed(scene, worker, scope="acct-7")
    rows(scene.eyes, "UPDATE quarantine_entries SET quarantined_at = quarantined_at - interval '1 hour'")
    failed(scene, worker)
    failed(scene, worker, fingerprint="g", cause="attempts_spent")
    found = as_json(cli("list", "--json"))
    assert [(group["fingerprint"], group["count"]) for group in found] == [("f", 2), ("g", 1)]
    assert found[0]["sample_job_id"] == first
    assert (found[0]["types"], found[0]["causes"]) == ([PLAIN.name], ["permanent"])
    assert found[0]["first_seen"] < found[0]["last_seen"]
    assert found[0]["missing_traces"] == 2

    def count(*filters: str) -> int:
        return sum(group["count"] for group in as_json(cli("list", "--json", *filters)))

    assert count("--scope", "acct-7") == count("--older", "600") == count("--cause", "attempts_spent") == 1
    assert count("--code", "permanent") == count("--newer", "600") == count("--age", "0") - 1 == 2
    assert count("--type", "none") == 0
    assert as_json(cli("list", "--fingerprint", "f", "--json"))[0]["job_id"] == first
    assert len(as_json(cli("list", "--jobs", "--json"))) == 3
    for readable in (cli("list"), cli("list", "--jobs")):
        assert readable.exit_code == 0
        assert first in readable.output


# show


def test_show_tells_everything_but_secrets(cli: Run, scene: Scene, worker: Worker) -> None:
    holder = scene.claimed(worker, login(scene, n=3))
    ledger = scene.connect()
    caller = Caller(lambda: ledger, holder.claimed.job_id, 1, worker.worker_id, None, None)
    caller.call("smtp", lambda _key: {"answer": HUSH}, takes_key=True)
    job_id = quarantine(holder, worker)
    headers = {"id": str(job_id), "x-death": [{"reason": "rejected"}], "kwargsrepr": HUSH, "x-death-extra": 1}
    dead_letters.store(scene.eyes, DeadLetter(job_id, 1, 1, headers, {}, HUSH.encode(), "rejected"), 2.0)
    assert cli("note", str(job_id), "asked the provider", "--author", "ann").exit_code == 0
    found = as_json(cli("show", str(job_id), "--json"))
    assert found["payload"] == {"n": 3, "password": "*" * 10, "token": "*" * 10}
    assert found["entries"][0]["traceback"] == list(FRAMES)
    assert [(one["attempt"], one["ended"]) for one in found["attempts"]] == [(1, "quarantine")]
    assert (found["effects"][0]["name"], found["effects"][0]["has_result"]) == ("smtp", True)
    (letter,) = found["dead_letters"]
    assert letter["headers"]["x-death"] == [{"reason": "rejected"}]
    assert letter["headers"]["kwargsrepr"] == "(hidden)"
    assert [(action["action"], action["reason"]) for action in found["actions"]] == [("note", "asked the provider")]
    assert "quarantined" in [event["event"] for event in found["journal"]]
    readable = cli("show", str(job_id))
    assert readable.exit_code == 0
    for word in (FRAMES[0], "smtp", "x-death", "asked the provider", "quarantine 1"):
        assert word in readable.output


def test_show_of_no_job(cli: Run) -> None:
    nobody = str(uuid.uuid4())
    assert f"no job {nobody}" in cli("show", nobody).stderr
    assert cli("show", nobody).exit_code == 1
    assert cli("show", "soon").exit_code == 2
    assert cli("note", nobody, "x").exit_code == 1


def test_letters_without_a_job_are_seen_and_dismissed(cli: Run, scene: Scene, worker: Worker) -> None:
    letter = DeadLetter(None, None, None, {"argsrepr": HUSH}, {"content_type": "x/y"}, b"{broken \xff", "no JSON")
    dead_letters.store(scene.eyes, letter, 2.0)
    owned = failed(scene, worker)
    dead_letters.store(scene.eyes, DeadLetter(UUID(owned), 1, 1, {}, {}, b"", "rejected"), 2.0)
    (found,) = as_json(cli("list", "--unreadable", "--json"))
    number = str(found["dead_letter_id"])
    assert (found["reason"], found["size"], found["job_id"]) == ("no JSON", 9, None)
    assert "no JSON" in cli("list", "--unreadable").output
    assert "body" not in as_json(cli("show", number, "--json"))
    assert as_json(cli("show", number, "--body", "--json"))["body"] == "{broken \\xff"
    assert cli("show", "999999").exit_code == 1
    assert cli("dismiss", number, *BY).exit_code == 0
    assert as_json(cli("list", "--unreadable", "--json")) == []
    assert as_json(cli("show", number, "--json"))["dismissed_by"] == "ann"
    assert cli("dismiss", number, *BY).exit_code == 1
    of_a_job = str(scene.ask("SELECT dead_letter_id FROM dead_letters WHERE job_id IS NOT NULL"))
    assert cli("dismiss", of_a_job, *BY).exit_code == 1


# replay


def test_replay_of_one_job(cli: Run, scene: Scene, worker: Worker) -> None:
    job_id = failed(scene, worker)
    done = as_json(cli("replay", job_id, *BY, "--json"))
    assert (done["counts"], done["left"], done["exit_code"]) == ({"replayed": 1}, [], 0)
    (action,) = actions(scene, UUID(job_id))
    assert (action["author"], action["reason"]) == ("ann", "the provider is back")
    again = as_json(cli("replay", job_id, *BY, "--json"), code=3)
    assert again["left"] == [{"job_id": job_id, "outcome": "left: not in quarantine: queued"}]
    assert len(actions(scene, UUID(job_id))) == 1


def test_replay_of_a_list_on_stdin(cli: Run, scene: Scene, worker: Worker) -> None:
    first, second = failed(scene, worker), failed(scene, worker)
    lines = f'{first}\n\n{{"job_id": "{second}", "type": "x"}}\n{first}\n'
    done = as_json(cli("replay", "-", *BY, "--yes", "--json", stdin=lines))
    assert done["counts"] == {"replayed": 2}
    assert cli("replay", "-", *BY, "--yes", stdin="soon\n").exit_code == 2


def test_a_group_goes_in_stages_and_tells_when_the_failure_returns(cli: Run, scene: Scene, worker: Worker) -> None:
    for n in range(14):
        failed(scene, worker, n)
    fleet = Fleet(scene, lambda n: "f" if n == 5 else None)
    fleet.start()
    stopped = as_json(cli("replay", "--fingerprint", "f", *BY, "--yes", "--json"), code=4)
    assert stopped["stopped"] == "returned"
    assert stopped["counts"]["to come"] == 3
    assert [entry["outcome"] for entry in stopped["left"]] == ["returned"]
    (listed,) = as_json(cli("runs", "--json"))
    assert (listed["stopped_reason"], listed["jobs"], listed["to_come"]) == ("returned", 14, 3)
    assert stopped["run_id"] in cli("runs").output
    run_id = stopped["run_id"]
    refused = cli("replay", "--resume", run_id, stdin="n\n")
    assert (refused.exit_code, "came back" in refused.stderr) == (1, True)
    done = cli("replay", "--resume", run_id, "--yes")
    fleet.stop()
    assert done.exit_code == 3, done.output
    assert "13  succeeded" in done.output
    assert "1  returned" in done.output
    assert max(fleet.ran.values()) == 1
    assert "has ended" in cli("replay", "--resume", run_id, "--yes").stderr


def test_a_stage_that_takes_too_long_has_its_own_exit_code(cli: Run, scene: Scene, worker: Worker) -> None:
    failed(scene, worker)
    late = cli("replay", "--fingerprint", "f", *BY, "--yes", "--stage-timeout", "0.05")
    assert late.exit_code == 5
    assert "--resume" in late.output
    assert "stage 1 of 3" in late.stderr


def test_a_patch_is_shown_as_a_diff_and_asked_about(cli: Run, scene: Scene, worker: Worker) -> None:
    job_id = failed(scene, worker)
    edit = ("replay", job_id, "--patch", f'{{"n": 9, "token": "{HUSH}-new"}}', *BY)
    dry = cli(*edit, "--dry-run")
    assert dry.exit_code == 0
    assert '-   "n": 0' in dry.output
    assert '+   "n": 9' in dry.output
    refused = cli(*edit, stdin="n\n")
    assert (refused.exit_code, actions(scene, UUID(job_id))) == (1, [])
    assert '+   "n": 9' in refused.stderr
    assert as_json(cli(*edit, "--yes", "--json"))["counts"] == {"replayed": 1}
    row = scene.row(UUID(job_id))
    assert row["payload"] == {"n": 9, "password": HUSH, "token": f"{HUSH}-new"}
    (shown,) = as_json(cli("show", job_id, "--json"))["actions"]
    assert (shown["old_payload"]["n"], shown["new_payload"]["n"]) == (0, 9)
    assert shown["old_payload"]["token"] == shown["new_payload"]["token"] == "*" * 10


def test_c28_an_edit_that_fails_validation_is_an_error_and_no_run(cli: Run, scene: Scene, worker: Worker) -> None:
    job_id = failed(scene, worker)
    before = scene.picture()
    refused = cli("replay", job_id, "--patch", f'{{"n": "{HUSH}"}}', *BY, "--yes")
    assert refused.exit_code == 1
    assert "nothing replayed" in refused.stderr
    assert refused.stdout == ""
    assert scene.picture() == before
    assert as_json(cli("runs", "--json")) == []


def test_a_dry_run_changes_nothing(cli: Run, scene: Scene, worker: Worker) -> None:
    first, second = failed(scene, worker), failed(scene, worker)
    before = scene.picture()
    told = as_json(cli("replay", "--fingerprint", "f", "--dry-run", "--json"))
    assert [(job["job_id"], job["would"]) for job in told["jobs"]] == [(first, "replay"), (second, "replay")]
    nobody = str(uuid.uuid4())
    assert cli("replay", nobody, "--dry-run").exit_code == 3
    assert scene.picture() == before


@pytest.mark.parametrize(
    "arguments",
    [
        ["--reason", "x"],
        ["{}", "--fingerprint", "f", "--reason", "x"],
        ["{}", "--resume", str(uuid.uuid4())],
        ["{}"],
        ["{}", "--patch", "{}", "--payload", "{}", "--reason", "x"],
        ["--fingerprint", "f", "--payload", "{}", "--reason", "x"],
        ["{}", "--patch", "[1]", "--reason", "x"],
        ["{}", "--patch", "{", "--reason", "x"],
        ["{}", "--patch", "@/nowhere", "--reason", "x"],
        ["{}", "--stages", "all,1", "--reason", "x"],
        ["{}", "--stages", "0,all", "--reason", "x"],
        ["{}", "--rate", "0", "--reason", "x"],
        ["{}", "--stages", "1,all", "--no-wait", "--reason", "x"],
    ],
)
def test_replay_refuses_what_makes_no_sense(cli: Run, scene: Scene, worker: Worker, arguments: list[str]) -> None:
    job_id = failed(scene, worker)
    before = scene.picture()
    refused = cli("replay", *[job_id if word == "{}" and place == 0 else word for place, word in enumerate(arguments)])
    assert refused.exit_code == 2, refused.output
    assert scene.picture() == before


def test_no_user_and_no_author(cli: Run, scene: Scene, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> str:
        raise OSError("no such user")

    monkeypatch.setattr("getpass.getuser", nobody)
    refused = cli("replay", failed(scene, worker), "--reason", "x")
    assert (refused.exit_code, "--author" in refused.stderr) == (2, True)


# settle, cancel, export


def test_settle_needs_evidence(cli: Run, scene: Scene, worker: Worker) -> None:
    job_id = failed(scene, worker)
    assert cli("settle", job_id, "--author", "ann").exit_code == 2
    assert cli("settle", job_id, "--evidence", "x", "--result", "{").exit_code == 2
    settled = cli("settle", job_id, "--author", "ann", "--evidence", "seen at the bank", "--result", '{"a": 1}')
    assert settled.exit_code == 0, settled.output
    row = scene.row(UUID(job_id))
    assert (row["state"], row["result"], row["result_key"]) == ("succeeded", {"a": 1}, f"job:{job_id}")
    again = cli("settle", job_id, "--evidence", "x")
    assert (again.exit_code, "not in quarantine: succeeded" in again.stderr) == (1, True)


def test_cancel_asks_and_leaves_what_was_decided(cli: Run, scene: Scene, worker: Worker) -> None:
    job_ids = [failed(scene, worker) for _ in range(3)]
    asked = cli("cancel", "--fingerprint", "f", *BY, stdin="n\n")
    assert (asked.exit_code, scene.state(UUID(job_ids[0]))) == (1, "quarantined")
    assert cli("replay", job_ids[0], *BY).exit_code == 0
    told = as_json(cli("cancel", *job_ids[:2], *BY, "--yes", "--json"), code=3)
    assert (told["cancelled"], [entry["job_id"] for entry in told["left"]]) == (1, [job_ids[0]])
    assert cli("cancel", "--fingerprint", "f", *BY, "--yes").exit_code == 0
    assert [scene.state(UUID(job_id)) for job_id in job_ids] == ["queued", "cancelled", "cancelled"]
    assert cli("cancel", *BY).exit_code == 2


def test_export_is_stable_limited_and_redacted(
    cli: Run, scene: Scene, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.quarantine.PAGE", 2)
    job_ids = [failed(scene, worker, n) for n in range(5)]
    printed = [json.loads(line) for line in cli("export").stdout.splitlines()]
    assert [entry["job_id"] for entry in printed] == job_ids
    assert [entry["payload"]["n"] for entry in printed] == [0, 1, 2, 3, 4]
    assert printed[0]["payload"]["password"] == "*" * 10
    assert printed[0]["traceback"] == list(FRAMES)
    assert [entry["job_id"] for entry in as_json(cli("export", "--limit", "3", "--json"))] == job_ids[:3]
    assert cli("export", "--type", "none").stdout == ""
    monkeypatch.delitem(REGISTRY, (PLAIN.name, 1))
    assert "model is not known" in cli("export", "--limit", "1").stdout
