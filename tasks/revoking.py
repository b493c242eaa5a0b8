"""`celery -A tasks control revoke | terminate` in a worker: of a job it means `cancel`, as `AsyncResult.revoke()` does.

Celery's own commands let this worker discard the message, which the job's debt would send again and again until the
worker ends; or they kill the process in the middle of an effect. Every worker hears the command and cancels; a second
cancel changes nothing. What is no job goes to Celery.
"""

from __future__ import annotations

import uuid
from typing import Any

from celery.utils.functional import maybe_list
from celery.worker import control, state
from psycopg2.extensions import connection as PgConnection

from app.cancel import Cancelled, cancel
from app.journal import log
from tasks.delivery import DurableRequest
from tasks.inspection import is_uuid
from tasks.services import services
from tasks.settler import Settle

celerys_revoke = control.revoke


@control.control_command(variadic="task_id", signature="[id1 [id2 [... [idN]]]]")
def revoke(node: Any, task_id: Any, terminate: bool = False, signal: str | None = None, **options: Any) -> Any:
    """Cancel jobs and revoke plain tasks, by id (or a list of ids)."""
    ids = set(maybe_list(task_id) or [])
    for one_id in ids:
        if is_uuid(one_id):
            cancel_behind(one_id)
    others = {one_id for one_id in ids if not isinstance(state.requests.get(one_id), DurableRequest)}
    if not others:
        return {"ok": f"jobs {sorted(ids)} are cancelled, or asked to stop"}
    return celerys_revoke(node, others, terminate, signal, **options)


@control.control_command(variadic="task_id", args=[("signal", str)], signature="<signal> [id1 [id2 [... [idN]]]]")
def terminate(node: Any, signal: str, task_id: Any, **options: Any) -> Any:
    """Cancel jobs (a running one is asked, not shot) and terminate plain tasks."""
    return revoke(node, task_id, terminate=True, signal=signal, **options)


def cancel_behind(job_id: str) -> None:
    """Cancel in the settler's thread: the event loop waits for no SQL."""

    def work(connection: PgConnection) -> Settle:
        answer = cancel(connection, uuid.UUID(job_id), reason="revoked")
        if answer is not Cancelled.UNKNOWN:
            log.info("job.revoked", job_id=job_id, answer=answer.value)
        return Settle.ACK

    services().settler.put(work, lambda _: None, on_bug=Settle.ACK)
