"""What the ledger says of a quarantined job's calls before anything is decided: done, not done, uncertain.

A finished call is done. Of a started one the job type's check asks the other side. What nobody can tell is uncertain,
unless a rerun of the job would be allowed to repeat the call: the same rule as at the call itself (`app.effects`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from psycopg2.extensions import connection as PgConnection
from pydantic import ValidationError

from app.candidate import Call, Candidate
from app.effects import Answer, Checked, may_go_on
from app.job_types import JobType
from app.journal import log
from app.json_text import to_json
from db.session import one

RECORD = """
UPDATE effects SET status = 'finished', result = %(result)s::jsonb, finished_at = clock_timestamp()
 WHERE job_id = %(job_id)s AND name = %(name)s AND attempt = %(attempt)s AND status = 'started'
RETURNING 1
"""


@dataclass(frozen=True)
class Verdict:
    """The calls by what is known of them: results of those that are done, names of the others.

    `answered`: done by the word of the other side alone; the ledger does not have it yet. `unproven`: started, and not
    proven not to have happened.
    """

    done: dict[str, Any]
    answered: tuple[Call, ...] = ()
    unproven: tuple[str, ...] = ()
    uncertain: tuple[str, ...] = ()
    started: tuple[str, ...] = ()

    @property
    def all_done(self) -> bool:
        """Whether there are calls, and each of them took effect."""
        return bool(self.done) and not self.started


def judge(job_type: JobType, candidate: Candidate) -> Verdict:
    """Ask the other side about the calls that were cut off; writes nothing."""
    done: dict[str, Any] = {}
    answered: list[Call] = []
    unproven, uncertain, started = [], [], []
    for call in candidate.calls:
        if call.finished:
            done[call.name] = call.result
            continue
        checked = ask(job_type, candidate, call)
        if checked.answer is Answer.DONE:
            done[call.name] = checked.result
            answered.append(replace(call, finished=True, result=checked.result))
            continue
        started.append(call.name)
        if checked.answer is not Answer.NOT_DONE:
            unproven.append(call.name)
        takes_key = call.takes_key or job_type.on_uncertain == "retry"
        if not may_go_on(checked, takes_key=takes_key, ended=call.ended):
            uncertain.append(call.name)
    return Verdict(done, tuple(answered), tuple(unproven), tuple(uncertain), tuple(started))


def ask(job_type: JobType, candidate: Candidate, call: Call) -> Checked:
    """The other side's answer; unknown when nobody can be asked or asking fails."""
    if job_type.check is None:
        return Checked(Answer.UNKNOWN)
    try:
        return job_type.check(call.name, call.key, job_type.parse(candidate.payload))
    except ValidationError:
        return Checked(Answer.UNKNOWN)
    except Exception as error:  # noqa: BLE001  # a check that breaks knows nothing
        log.warning("check.failed", job_id=str(candidate.job_id), call=call.name, error=type(error).__name__)
        return Checked(Answer.UNKNOWN)


def record(connection: PgConnection, candidate: Candidate, verdict: Verdict) -> bool:
    """Enter into the ledger what the other side said is done; whether anything was written."""
    written = False
    for call in verdict.answered:
        values = {
            "job_id": str(candidate.job_id),
            "name": call.name,
            "attempt": call.attempt,
            "result": None if call.result is None else to_json(call.result),
        }
        written = one(connection, RECORD, values) is not None or written
    return written
