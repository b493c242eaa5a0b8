"""Job types of the batch tests: a coordinator over the numbers 1 to `children`, and its completion job."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from pydantic import BaseModel
from sqlalchemy.orm import Session

from app.batches import Child, Page
from app.job import Job
from tasks.batch import batch
from tasks.durable import durable
from tests.faults.jobs import finish, leased_effect, start


class Source(BaseModel):
    """As many children, `size` on a page. `name` tells sources apart whose children have the same keys."""

    children: int = 10
    size: int = 3
    name: str = "a"


class Done(BaseModel):
    """The batch that has ended."""

    batch_id: UUID


@durable("tests.batch_done", payload=Done)
def batch_done(job: Job, payload: Done) -> dict[str, str]:
    start(job)
    finish(job)
    return {"batch_id": str(payload.batch_id)}


@batch("tests.batch", payload=Source, child=leased_effect, on_complete=batch_done)
def numbers(session: Session, payload: Source, after: Any) -> Page:
    """Every number is a child; the last page is the empty one behind them."""
    assert session.in_transaction() is not None
    first = (after or 0) + 1
    page = range(first, min(first + payload.size, payload.children + 1))
    return Page([Child(f"n{n}", {"n": n}) for n in page], after=page[-1] if page else None)
