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

from app.claim import Refusal
from app.ending import Ending, Outcome, Settlement
from app.failures import Failure

TIMES = re.compile(r" waited (-?\d+\.\d+) s, ran (\d+\.\d+) s['\"]$")
KEY_LIMIT = 100  # of a result key, for Flower to show
GROUP = "jobs of one delivery: "


class JobRetried(Retry):
    """Celery's Retry; the debt brings the job back, not a message of Celery's."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(ending.reason, when=ending.delay_s)
        self.ending = ending

    def __reduce__(self) -> tuple[Any, ...]:
        return JobRetried, (self.ending,)


class JobRejected(Reject):
    """Celery's Reject without requeue: the delivery goes through the dead-letter exchange.

    `others`: how the other jobs of a coalesced delivery ended.
    """

    def __init__(self, ending: Ending, others: Sequence[Ending] = ()) -> None:
        super().__init__(ending.reason, requeue=False)
        self.ending, self.others = ending, others

    def __reduce__(self) -> tuple[Any, ...]:
        return JobRejected, (self.ending, self.others)


class JobIgnored(Ignore):
    """Celery's Ignore: acknowledged, and no result to tell of."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(ending.reason)
        self.ending = ending

    def __reduce__(self) -> tuple[Any, ...]:
        return JobIgnored, (self.ending,)


def tell(ending: Ending) -> str:
    """What a task returns for a job that succeeded, and raises for any other ending, so that Celery settles it.

    The result itself stays in the job row, out of logs and events.
    """
    match ending.settlement:
        case Settlement.SUCCEEDED:
            # A text: the representation of anything else costs Celery many times as much.
            return f"{ending.result_key} waited {ending.waited_s or 0.0:.6f} s, ran {ending.ran_s or 0.0:.6f} s"
        case Settlement.RETRIED:
            raise JobRetried(ending)
        case Settlement.QUARANTINED:
            raise JobRejected(ending)
        case Settlement.IGNORE:
            raise JobIgnored(ending)


def tell_all(endings: Sequence[Ending]) -> str:
    """What a task returns for a coalesced delivery: each job's ending, as `endings_of` reads them.

    Raises JobRejected when the database does not know one of its jobs: after a restore from a backup the message is all
    that is left of it, and is kept. To the others its dead letter means nothing.
    """
    unknown = [ending for ending in endings if ending.reason == Refusal.UNKNOWN.value]
    if unknown:
        raise JobRejected(unknown[0], [ending for ending in endings if ending is not unknown[0]])
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
                str(ending.result_key)[:KEY_LIMIT],
            ]
            for ending in endings
        ]
    )


def endings_of(returned: Any) -> list[Ending] | None:
    """The endings of a coalesced delivery, in the order of its jobs; None for what is none, whatever it looks like."""
    if not isinstance(returned, str) or not returned.startswith((f"'{GROUP}", f'"{GROUP}')):
        return None
    try:
        return read(returned)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):  # a plain task may return any text
        return None


def read(returned: str) -> list[Ending]:
    """The endings in the representation of what `tell_all` made. Raises ValueError and others for anything else."""
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
    if isinstance(returned, str):
        if times := TIMES.search(returned):
            return Ending(
                Settlement.SUCCEEDED, outcome=Outcome.SUCCEEDED, waited_s=float(times[1]), ran_s=float(times[2])
            )
    elif isinstance(returned, JobRetried | JobRejected | JobIgnored):
        return returned.ending
    return None
