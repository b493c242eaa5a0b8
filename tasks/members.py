"""The jobs of a coalesced delivery, shown one by one: task events (Flower) and `inspect active` / `inspect reserved`.

Celery knows one request for the delivery, under the id of its first job. What it tells about the request is told here
about each job; `task-received` when the delivery came in, the rest when the delivery has ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from uuid import UUID

from celery.worker import state as worker_state
from celery.worker.control import inspect_command

from app.ending import Ending, Outcome

ENDED = {
    Outcome.SUCCEEDED: "task-succeeded",
    Outcome.RETRIED: "task-retried",
    Outcome.QUARANTINED: "task-failed",
}


def tell_received(eventer: Any, name: str, jobs: Iterable[UUID]) -> None:
    """`task-received` of jobs that came along with another one."""
    for job_id in jobs:
        eventer.send(
            "task-received", uuid=str(job_id), name=name, args="()", kwargs="{}", root_id=str(job_id), retries=0
        )


def tell_ended(eventer: Any, jobs: Sequence[UUID], endings: Sequence[Ending]) -> None:
    """How each job ended; the first one has been told as started already."""
    for place, (job_id, ending) in enumerate(zip(jobs, endings, strict=True)):
        event = ENDED.get(ending.outcome)
        if event is None:
            continue
        if place:
            eventer.send("task-started", uuid=str(job_id))
        fields: dict[str, Any] = {}
        if ending.outcome is Outcome.SUCCEEDED:
            fields = {"result": repr({"result_key": ending.result_key}), "runtime": ending.ran_s}
        elif ending.outcome is Outcome.RETRIED:
            fields = {"exception": ending.cause, "traceback": None}
        else:
            fields = {"exception": f"quarantined; the reason: deadsure show {job_id}", "traceback": None}
        eventer.send(event, uuid=str(job_id), **fields)


def each(requests: Iterable[Any], *, safe: bool) -> list[dict[str, Any]]:
    """What `inspect` tells of requests, one entry for each job."""
    found = []
    for request in requests:
        info = request.info(safe=safe)
        jobs = getattr(request, "jobs", None) or [request.id]
        found += [{**info, "id": str(job_id)} for job_id in jobs]
    return found


@inspect_command(alias="dump_active")
def active(state: Any, safe: bool = False, **_: Any) -> list[dict[str, Any]]:
    """List the jobs that are being executed, with those that came by the same deliveries."""
    return each(state.tset(worker_state.active_requests), safe=safe)


@inspect_command(alias="dump_reserved")
def reserved(state: Any, **_: Any) -> list[dict[str, Any]]:
    """List the jobs of deliveries that wait in this worker."""
    waiting = state.tset(worker_state.reserved_requests) - state.tset(worker_state.active_requests)
    return each(waiting, safe=False)
