"""How a delivery ended, on its way from the pool's child to the main process, by Celery's own ways.

An exception carries the whole ending. A success is one line of text by the time it leaves the child, since Celery sends
the representation of the value that a task returned; so the value says what the metrics need.
"""

from __future__ import annotations

import ast
import json
import logging
import re
from collections.abc import Sequence
from typing import Any

from celery.exceptions import Ignore, Reject, Retry

from app.ending import Ending, Outcome, Settlement
from app.failures import Failure

TIMES = re.compile(r"'waited_s': ([0-9.e+-]+), 'ran_s': ([0-9.e+-]+)")
GROUP = "jobs of one delivery: "


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


def tell_all(endings: Sequence[Ending]) -> str:
    """What a task returns for a coalesced delivery: each job's ending, as `endings_of` reads them."""
    return GROUP + json.dumps(
        [
            [
                ending.settlement.value,
                ending.outcome,
                ending.failure,
                ending.cause,
                None if ending.waited_s is None else round(ending.waited_s, 6),
                None if ending.ran_s is None else round(ending.ran_s, 6),
                ending.expired,
                ending.result_key,
            ]
            for ending in endings
        ]
    )


def endings_of(returned: Any) -> list[Ending] | None:
    """The endings of a coalesced delivery, in the order of its jobs; None for what is none."""
    if not isinstance(returned, str) or not returned.startswith((f"'{GROUP}", f'"{GROUP}')):
        return None
    return [
        Ending(
            Settlement(settlement),
            result_key=result_key,
            outcome=Outcome(outcome),
            failure=Failure(failure) if failure else None,
            cause=cause,
            waited_s=waited_s,
            ran_s=ran_s,
            expired=expired,
        )
        for settlement, outcome, failure, cause, waited_s, ran_s, expired, result_key in json.loads(
            ast.literal_eval(returned).removeprefix(GROUP)
        )
    ]


class Briefly(logging.Filter):
    """Celery logs what a task returned: of a coalesced delivery the number of its jobs is enough."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Shorten the value; every record passes."""
        if isinstance(record.args, dict) and (endings := endings_of(record.args.get("return_value"))):
            record.args = {**record.args, "return_value": f"{len(endings)} jobs"}
        return True


def ending_of(returned: Any) -> Ending | None:
    """The ending that a child told: its exception, or the text of its return value. None for what is not ours."""
    if isinstance(returned, JobRetried | JobRejected | JobIgnored):
        return returned.ending
    if isinstance(returned, str) and (times := TIMES.search(returned)):
        waited_s, ran_s = map(float, times.groups())
        return Ending(Settlement.SUCCEEDED, outcome=Outcome.SUCCEEDED, waited_s=waited_s, ran_s=ran_s)
    return None
