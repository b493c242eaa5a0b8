"""parked: a message without a job waits in the database for whoever can read it, and moves as a whole or not at all."""

from __future__ import annotations

import json
from typing import Any

import pytest
from psycopg2.extras import Json

from app.parked import Parked, give_up, keep, offer
from tests.integration.scene import Scene, Worker

GRACE_S, AT_ONCE_S = 60.0, 0.0
ENVELOPE = json.dumps({"headers": {"task": "their.task", "id": "7"}, "content_type": "application/json", "priority": 3})


def message(task: str = "their.task", queue: str = "jobs", body: bytes = b"[[], {}, null]") -> Parked:
    return Parked(task, queue, ENVELOPE, body, "no such task here")


def kept(scene: Scene, *tried: str, of: Parked | None = None, **options: Any) -> bool:
    """Some worker has kept a message."""
    return keep(scene.eyes, of or message(), "7", tried, AT_ONCE_S, **options)


def waiting(scene: Scene) -> int:
    return int(scene.ask("SELECT count(*) FROM parked_messages"))


def reader(scene: Scene, *accepts: str, queues: list[str] | None = None) -> Worker:
    """A live worker that accepts these."""
    made = scene.worker()
    known = (Json(accepts), Json(queues) if queues is not None else None, str(made.worker_id))
    scene.ask("UPDATE workers SET accepts = %s, queues = %s WHERE worker_id = %s RETURNING 1", known)
    return made


def offered(scene: Scene) -> list[Parked]:
    """What goes back to the broker now."""
    found: list[Parked] = []
    while offer(scene.eyes, found.append):
        pass
    return found


def waited(scene: Scene, seconds: float) -> None:
    """All were kept so long ago."""
    scene.ask(
        "UPDATE parked_messages SET parked_at = clock_timestamp() - make_interval(secs => %s) RETURNING 1", (seconds,)
    )


def test_it_waits_while_nobody_can_read_it_and_comes_back_whole(scene: Scene) -> None:
    assert kept(scene)
    assert offered(scene) == []
    newer = reader(scene, "their.task@2")
    assert offered(scene) == [message()]
    assert waiting(scene) == 0
    kept(scene)
    scene.end_lease(newer)
    assert offered(scene) == []


@pytest.mark.parametrize(
    ("accepts", "tried", "readable"),
    [
        (["their.task"], [], True),
        (["their.task@1"], [], True),
        (["their.task@1"], ["their.task@1"], False),
        (["their.task@1", "their.task@2"], ["their.task@1"], True),
        (["their.task.other@1", "other.their.task@1", "their.taskX"], [], False),
        (["their.task@x"], [], False),
    ],
)
def test_who_may_read_it(scene: Scene, accepts: list[str], tried: list[str], readable: bool) -> None:
    reader(scene, *accepts)
    assert kept(scene, *tried, only_if_readable=True) == readable
    assert waiting(scene) == readable
    assert bool(offered(scene)) == readable


def test_whoever_does_not_consume_its_queue_cannot_read_it(scene: Scene) -> None:
    reader(scene, "their.task", queues=["elsewhere"])
    kept(scene)
    assert offered(scene) == []
    waited(scene, GRACE_S + 1)
    assert give_up(scene.eyes, GRACE_S, 1)
    kept(scene)
    reader(scene, "their.task", queues=["elsewhere", "jobs"])
    assert len(offered(scene)) == 1


def test_delivered_twice_it_is_kept_once_with_its_first_time(scene: Scene) -> None:
    kept(scene)
    waited(scene, GRACE_S)
    before = scene.ask("SELECT parked_at FROM parked_messages")
    assert kept(scene)
    assert (waiting(scene), scene.ask("SELECT parked_at FROM parked_messages")) == (1, before)
    kept(scene, of=message(body=b"another"))
    assert waiting(scene) == 2


def test_what_the_broker_does_not_take_stays(scene: Scene) -> None:
    reader(scene, "their.task")
    kept(scene)

    def away(_message: Parked) -> None:
        raise ConnectionRefusedError

    with pytest.raises(ConnectionRefusedError):
        offer(scene.eyes, away)
    assert offered(scene) == [message()]


def test_two_at_once_offer_it_once(scene: Scene) -> None:
    reader(scene, "their.task")
    kept(scene)
    other, meanwhile = scene.connect(), []

    def publish(_message: Parked) -> None:
        meanwhile.append(offer(other, lambda _again: None))

    assert offer(scene.eyes, publish)
    assert meanwhile == [False]


def test_after_the_grace_it_is_a_dead_letter_with_its_bytes(scene: Scene) -> None:
    kept(scene)
    waited(scene, GRACE_S - 5)
    assert not give_up(scene.eyes, GRACE_S, 1)
    waited(scene, GRACE_S + 1)
    newer = reader(scene, "their.task@2")
    assert not give_up(scene.eyes, GRACE_S, 1), "it waits for whoever can read it"
    scene.end_lease(newer)
    assert give_up(scene.eyes, GRACE_S, 1)
    assert not give_up(scene.eyes, GRACE_S, 1)
    letter = scene.record("SELECT * FROM dead_letters")
    assert (bytes(letter["body"]), letter["headers"]["id"], letter["source"]) == (b"[[], {}, null]", "7", "task layer")
    assert letter["reason"] == "no such task here; no live worker could read it"
    assert waiting(scene) == 0
