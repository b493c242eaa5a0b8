"""A batch of 100,000 children: submitted in a minute, counted in a second, right after each disturbance."""

from __future__ import annotations

import time
from uuid import UUID

import pytest

from app import batch_story
from app.batch_cancel import cancel_batch
from app.completion import Completer
from db.session import rows
from tests.integration.batch_scene import Batches
from tests.integration.scene import Scene

CHILDREN = 100_000
BUSY = 4  # how much slower a machine may be that runs other tests beside this one


def seen(scene: Scene, batch_id: UUID) -> dict[str, int]:
    """The children by state, as `deadsure batch show` tells them, within its second."""
    began = time.monotonic()
    story = batch_story.show(scene.eyes, batch_id)
    assert time.monotonic() - began < 1 * BUSY
    assert story is not None
    assert story["total"] == CHILDREN
    children: dict[str, int] = story["children"]
    assert sum(children.values()) == CHILDREN
    assert story["ended"] == children.get("succeeded", 0) + children.get("cancelled", 0)
    blocking = {group["what"].split()[0]: group["count"] for group in story["blocking"]}
    assert blocking == {state: count for state, count in children.items() if state not in ("succeeded", "cancelled")}
    return children


def change(scene: Scene, batch_id: UUID, state: str, count: int, assignments: str) -> None:
    """Change the rows of `count` children in a state, as an arrow would."""
    picked = "SELECT job_id FROM jobs WHERE batch_id = %s AND state = %s LIMIT %s"
    rows(scene.eyes, f"UPDATE jobs SET {assignments} WHERE job_id IN ({picked})", (str(batch_id), state, count))


def look_s(scene: Scene, completer: Completer) -> float:
    began = time.monotonic()
    assert completer.look(scene.eyes) == []
    return time.monotonic() - began


@pytest.mark.slow
def test_a_hundred_thousand_children(scene: Scene, batches: Batches) -> None:
    rows(scene.eyes, "SET statement_timeout = '60s'; SET synchronous_commit = off")
    worker = scene.worker()
    began = time.monotonic()
    batch_id = batches.run(children=CHILDREN, size=1000)
    assert time.monotonic() - began < 30 * BUSY
    assert scene.row(batch_id)["result"] == {"children": CHILDREN}
    assert seen(scene, batch_id) == {"queued": CHILDREN}

    running = f"state = 'running', worker_id = '{worker.worker_id}', child_pid = {worker.pid}, attempt = 1"
    change(scene, batch_id, "queued", 700, running)
    change(scene, batch_id, "queued", 300, "state = 'retry_wait', not_before = clock_timestamp()")
    change(scene, batch_id, "queued", 200, "state = 'quarantined', cause = 'c', episode = 1")
    assert seen(scene, batch_id) == {"queued": 98_800, "running": 700, "retry_wait": 300, "quarantined": 200}
    batches.lose(worker)  # a deploy without grace: all 700 go back
    assert seen(scene, batch_id) == {"queued": 99_500, "retry_wait": 300, "quarantined": 200}

    batches.end_by_hand(batch_id, limit=99_000)
    assert seen(scene, batch_id) == {"succeeded": 99_000, "queued": 500, "retry_wait": 300, "quarantined": 200}
    look_s(scene, Completer())  # marks what is dead in the index
    assert look_s(scene, Completer()) < 0.05 * BUSY, "a look reads no child that has ended"
    done = cancel_batch(scene.eyes, batch_id, author="ann", reason="the wrong month")
    assert done is not None
    assert (done.cancelled, done.asked) == (1000, 0)
    assert seen(scene, batch_id) == {"succeeded": 99_000, "cancelled": 1000}
    assert batches.look() == []
    assert batches.completions() == 0
