"""Where in its life an attempt is struck, for each kind of job: as faults that hit one job by its id."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from uuid import UUID, uuid4

from kombu.exceptions import ChannelError

from tests.faults.inject import Fault
from tests.nodes.servers import BrokerNode
from tests.nodes.waiting import wait_for

PARKED_TIMEOUT_S = 60
Kind = Literal["leased", "atomic", "export", "parent"]
QUICK = ("--without-mingle", "--without-gossip")  # a second less for each start


@dataclass(frozen=True)
class Point:
    """A place, and whether the claim is committed and the job not finished there: then a crash is counted."""

    at: str
    counted: bool


def points(kind: Kind, *, clean_path: bool) -> dict[str, Point]:
    """The points of a kind of job; `clean_path`: claim and effect of an atomic one share a commit."""
    atomic = kind == "atomic" and clean_path
    claim = "app.claim.begin_atomic" if atomic else "app.claim.claim"
    inside = {
        "leased": {
            "in the middle of the effect": "after:tests.faults.effects.record_now",
            "after the effect": "after:tests.faults.effects.record_in",
        },
        "export": {
            "in the middle of the effect": "after:app.domain.atomic_file.create_temporary",
            "after the file": "before:app.domain.reports.record_export",
        },
        "parent": {
            "after its children were made": "after:app.submit.within",
        },
    }["leased" if kind == "atomic" else kind]
    return {
        "before the claim": Point(f"before:{claim}", counted=False),
        "after the claim": Point(f"after:{claim}", counted=not atomic),
        **{name: Point(at, counted=not atomic) for name, at in inside.items()},
        "before succeed": Point("before:app.finish.succeed", counted=not atomic),
        "after succeed": Point("after:app.finish.succeed", counted=False),
    }


def identities(names: Mapping[str, object]) -> dict[str, UUID]:
    """A job id for each name, known before the worker starts."""
    return {name: uuid4() for name in names}


def kill_child(at: str, job_id: UUID, directory: Path) -> Fault:
    """SIGKILL the child that works on `job_id`, once."""
    return Fault(at, "kill", who="self", match=str(job_id), once_file=str(directory / f"killed-{job_id}"))


def park(at: str, job_id: UUID, directory: Path) -> Fault:
    """Hold `job_id` there until `let_go`, or for ever."""
    return Fault(
        at,
        "wait_file",
        match=str(job_id),
        announce=str(directory / f"parked-{job_id}"),
        until=str(directory / f"go-{job_id}"),
    )


def wait_parked(directory: Path, *job_ids: UUID) -> None:
    """Wait until each of these jobs is held where `park` said."""
    for job_id in job_ids:
        wait_for((directory / f"parked-{job_id}").exists, PARKED_TIMEOUT_S, f"{job_id} is parked")


def let_go(directory: Path, *job_ids: UUID) -> None:
    """Let parked jobs go on."""
    for job_id in job_ids:
        (directory / f"go-{job_id}").touch()


def none_waits(broker: BrokerNode) -> bool:
    """Whether workers hold every message: on Redis/Valkey an empty queue is none."""
    try:
        return broker.depth("jobs") == 0
    except ChannelError:
        return True
