"""How a delivery ended, on its way from the pool's child to the main process, by Celery's own ways.

An exception carries the whole ending. A success is one line of text by the time it leaves the child, since Celery sends
the representation of the value that a task returned; so the value says what the metrics need.
"""

from __future__ import annotations

import re
from typing import Any

from celery.exceptions import Ignore, Reject, Retry

from app.ending import Ending, Outcome, Settlement

TIMES = re.compile(r"'waited_s': ([0-9.e+-]+), 'ran_s': ([0-9.e+-]+)")


class JobRetried(Retry):
    """Celery's Retry; the debt brings the job back, not a message of Celery's."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(ending.reason, when=ending.delay_s)
        self.ending = ending

    def __reduce__(self) -> tuple[Any, ...]:
        return JobRetried, (self.ending,)


class JobRejected(Reject):
    """Celery's Reject without requeue: the delivery goes through the dead-letter exchange."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(ending.reason, requeue=False)
        self.ending = ending

    def __reduce__(self) -> tuple[Any, ...]:
        return JobRejected, (self.ending,)


class JobIgnored(Ignore):
    """Celery's Ignore: acknowledged, and no result to tell of."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(ending.reason)
        self.ending = ending

    def __reduce__(self) -> tuple[Any, ...]:
        return JobIgnored, (self.ending,)


def tell(ending: Ending) -> dict[str, Any]:
    """What a task returns for a job that succeeded, and raises for any other ending, so that Celery settles it.

    The result itself stays in the job row, out of logs and events.
    """
    match ending.settlement:
        case Settlement.SUCCEEDED:
            times = {"waited_s": round(ending.waited_s or 0.0, 6), "ran_s": round(ending.ran_s or 0.0, 6)}
            return {"result_key": ending.result_key, **times}
        case Settlement.RETRIED:
            raise JobRetried(ending)
        case Settlement.QUARANTINED:
            raise JobRejected(ending)
        case Settlement.IGNORE:
            raise JobIgnored(ending)


def ending_of(returned: Any) -> Ending | None:
    """The ending that a child told: its exception, or the text of its return value. None for what is not ours."""
    if isinstance(returned, JobRetried | JobRejected | JobIgnored):
        return returned.ending
    if isinstance(returned, str) and (times := TIMES.search(returned)):
        waited_s, ran_s = map(float, times.groups())
        return Ending(Settlement.SUCCEEDED, outcome=Outcome.SUCCEEDED, waited_s=waited_s, ran_s=ran_s)
    return None
