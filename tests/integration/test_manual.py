"""The jobs of the documents are registered, and the first one of a newcomer is run, fails and is repaired."""

from __future__ import annotations

import re
import subprocess
import sys
import types
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from click.testing import CliRunner
from sqlalchemy.orm import Session

from app.errors import JobQuarantined
from app.job_types import REGISTRY
from app.stack.ports import free_port
from tests.integration.scene import Scene
from tests.nodes.waiting import wait_for

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def code(name: str, holding: str) -> str:
    """The Python block of a document that holds this text."""
    (found,) = [block for block in BLOCK.findall((ROOT / name).read_text()) if holding in block]
    return str(found)


@pytest.fixture
def registered(jobs: Any) -> Iterator[None]:
    """Whatever a test registers is forgotten after it."""
    from app.attempt import HANDLERS  # noqa: PLC0415  with the environment of the test
    from tasks import app  # noqa: PLC0415

    assert jobs
    known, tasks, handlers = set(REGISTRY), set(app.tasks), set(HANDLERS)
    yield
    for key in set(REGISTRY) - known:
        del REGISTRY[key]
    for name in set(app.tasks) - tasks:
        del app.tasks[name]
    for key in set(HANDLERS) - handlers:
        del HANDLERS[key]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[str]:
    """The help desk of docs/first-job.md; its URL."""
    (tmp_path / "desk.py").write_text(code("docs/first-job.md", "# desk.py"))
    port = free_port()
    program = subprocess.Popen(
        [sys.executable, str(tmp_path / "desk.py"), str(port), "0"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def up() -> bool:
        try:
            return requests.get(f"http://127.0.0.1:{port}/tickets/x", timeout=5).status_code == 404
        except requests.ConnectionError:
            return False

    wait_for(up, 30, "the desk answers")
    yield f"http://127.0.0.1:{port}"
    program.kill()
    program.wait()


@pytest.fixture
def eager(registered: None) -> Iterator[Any]:
    """The application in eager mode."""
    assert registered is None
    from tasks import app  # noqa: PLC0415  reads the environment

    app.conf.task_always_eager = True
    yield app
    app.conf.task_always_eager = False


@pytest.mark.usefixtures("eager")
def test_the_first_job_runs_fails_and_is_repaired(scene: Scene, desk: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks.commands import deadsure  # noqa: PLC0415  reads the environment

    monkeypatch.setenv("DESK_URL", desk)
    module = types.ModuleType("tickets_of_the_manual")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(code("docs/first-job.md", "# tasks/tickets.py"), module.__dict__)  # noqa: S102  our own document
    first = module.open_ticket.delay(complaint_id=1, account_id=7)
    assert first.get() == {"ticket": "T-1"}
    assert module.open_ticket.delay(complaint_id=1, account_id=7).id == first.id
    wrong = module.open_ticket.delay(complaint_id=2, account_id=8, queue="billing")
    with pytest.raises(JobQuarantined, match="permanent"):
        wrong.get()
    command = ["quarantine", "replay", wrong.id, "--reason", "billing has no desk", "--yes", "--patch"]
    refused = CliRunner().invoke(deadsure, [*command, '{"queu": "support"}'])
    assert "queu: Extra inputs are not permitted" in refused.output
    replayed = CliRunner().invoke(deadsure, [*command, '{"queue": "support"}'])
    assert replayed.exit_code == 0, replayed.output
    now = scene.row(uuid.UUID(wrong.id))
    assert (now["state"], now["payload"]["queue"]) == ("queued", "support")


def test_the_jobs_of_the_other_documents_are_registered(registered: None) -> None:
    from app.batches import Child, Page  # noqa: PLC0415
    from app.job import Job  # noqa: PLC0415
    from tasks.batch import batch  # noqa: PLC0415
    from tasks.durable import durable  # noqa: PLC0415
    from tasks.reports import export_report  # noqa: PLC0415

    assert registered is None
    invoices: dict[str, Any] = {"__name__": "invoices"}
    exec(code("README.md", "invoices.send"), invoices)  # noqa: S102
    assert invoices["send_invoice"].job_type.payload is invoices["SendInvoice"]
    payload = invoices["SendInvoice"]
    names = {
        "durable": durable,
        "batch": batch,
        "Job": Job,
        "Session": Session,
        "Page": Page,
        "Child": Child,
        "Any": Any,
    }
    stand_ins = {"NewsletterSent": payload, "Issue": payload, "send_newsletter": export_report}
    newsletters: dict[str, Any] = {"__name__": "newsletters", **names, **stand_ins}
    exec(code("docs/batches.md", "newsletters.all"), newsletters)  # noqa: S102
    assert ("newsletters.all", 1) in REGISTRY


def test_the_schedule_of_the_manual_is_right(jobs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from celery.schedules import crontab  # noqa: PLC0415

    from app.domain.months import month_before  # noqa: PLC0415
    from app.periodic import FromTick  # noqa: PLC0415
    from tasks import app, schedule  # noqa: PLC0415

    assert jobs
    given: dict[str, Any] = {"crontab": crontab, "FromTick": FromTick, "month_before": month_before}
    exec(code("docs/periodic.md", "beat_schedule"), given)  # noqa: S102
    monkeypatch.setitem(app.conf.changes, "beat_schedule", given["beat_schedule"])
    found = schedule.read(app)
    app.conf.changes.pop("beat_schedule", None)
    assert (found.wrong, [entry.name for entry in found.durable]) == ({}, ["monthly-reports"])
