"""The decorator of a batch's coordinator: a function that returns the next page, and which jobs it becomes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any
from uuid import UUID

from pydantic import BaseModel

from app.batches import NextPage, Plan, coordinate
from app.errors import ConfigurationError
from app.job import Job
from tasks.durable import DurableTask, durable


def its_id(_payload: Any, batch_id: UUID) -> dict[str, Any]:
    """The completion job's payload when none is given: the batch."""
    return {"batch_id": batch_id}


def batch(
    name: str,
    *,
    payload: type[BaseModel],
    child: DurableTask,
    on_complete: DurableTask | None = None,
    completion: Callable[[Any, UUID], Mapping[str, Any]] = its_id,
    **terms: Any,
) -> Callable[[NextPage], DurableTask]:
    """Make a coordinator of a function `(session, payload, after) -> Page`; `after` is None at the beginning.

    The function is called for one page after the other, each in a transaction that commits the page's children (jobs of
    `child`) together with the cursor. When the source is exhausted and all children have ended, one job of
    `on_complete` is submitted, with the payload `completion(payload, batch_id)`. `terms` as for `durable`.
    """
    if terms.get("mode") == "atomic":
        raise ConfigurationError(f"{name}: a coordinator commits page by page, so it cannot be atomic")

    def wrap(next_page: NextPage) -> DurableTask:
        @functools.wraps(next_page)
        def coordinator(job: Job, _payload: Any) -> dict[str, int]:
            end = on_complete.job_type if on_complete is not None else None
            return coordinate(job, Plan(next_page, child.job_type, end, completion))

        return durable(name, payload=payload, **terms)(coordinator)

    return wrap
