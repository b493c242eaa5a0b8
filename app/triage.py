"""What a wish to replay becomes for one job: a replay, a settle, or nothing, with the reason.

every call done, and the type says that its call is everything -> settle, with the recorded result
nothing uncertain                                              -> replay; calls that are done are not made again
uncertain                                                      -> left, until a check can tell or somebody accepts it
another payload                                                -> replay only when the old one cannot have acted, nor
ever will: no call begun, or each proven not done
and no attempt alive that may still make it (H11)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from uuid import UUID

from psycopg2.extensions import connection as PgConnection
from pydantic import ValidationError

from app.candidate import Candidate, read
from app.edit import Edit, Edited
from app.errors import DeadsureError, invalid
from app.job_types import JobType
from app.json_text import to_json
from app.replay import Decider, replay
from app.settle import settle
from app.verdict import Verdict, judge, record

LOOKS = 5


class Why(StrEnum):
    """Why a job was left as it is."""

    GONE = "no such job"
    NOT_QUARANTINED = "not in quarantine"
    DECIDED = "decided by somebody else"
    EXPIRED = "its time to start is over (`expires`)"
    UNKNOWN_TYPE = "type or version unknown to this installation"
    INVALID = "the edit is not valid"
    UNCERTAIN = "uncertain whether a call took effect"
    ACTED = "the old payload has acted"
    MAY_ACT = "the old payload may still act"
    CHANGING = "its ledger keeps changing"


@dataclass(frozen=True)
class Leave:
    """Nothing is done; `detail` names calls, fields or states, never values. `decided`: the decision made elsewhere."""

    why: Why
    detail: str = ""
    decided: str | None = None

    def __str__(self) -> str:
        return f"{self.why}: {self.detail}" if self.detail else str(self.why)


@dataclass(frozen=True)
class Settle:
    """Its effect is done: close it as succeeded with this result (JSON text)."""

    verdict: Verdict
    result: str | None

    def __str__(self) -> str:
        return f"settle: {', '.join(self.verdict.done)} is done"


@dataclass(frozen=True)
class Replay:
    """Put it back; `forget` are calls whose repeat was accepted."""

    verdict: Verdict
    edited: Edited | None = None
    forget: tuple[str, ...] = ()

    def __str__(self) -> str:
        done = f"; done already: {', '.join(self.verdict.done)}" if self.verdict.done else ""
        return f"replay{' with another payload' if self.edited else ''}{done}"


Decision = Leave | Settle | Replay


@dataclass(frozen=True)
class Wish:
    """What the operator asked for."""

    edit: Edit | None = None
    accept_uncertain: bool = False
    settle_done: bool = False


def consider(candidate: Candidate | None, episode: int, wish: Wish) -> Decision:
    """The decision about a job in its `episode`-th quarantine. Asks the type's check; writes nothing."""
    obstacle = in_the_way(candidate, episode)
    if candidate is None or candidate.job_type is None or obstacle is not None:
        return obstacle or Leave(Why.UNKNOWN_TYPE)
    job_type = candidate.job_type
    edited = None
    if wish.edit is not None:
        try:
            edited = wish.edit.apply(job_type, candidate.payload, candidate.key)
        except (DeadsureError, ValueError) as error:
            return Leave(Why.INVALID, invalid(error) if isinstance(error, ValidationError) else str(error))
    verdict = judge(job_type, candidate)
    if edited is not None:
        return with_another_payload(candidate, verdict, edited)
    if verdict.all_done and (wish.settle_done or job_type.whole_effect in verdict.done):
        return Settle(verdict, result_of(job_type, verdict))
    if verdict.uncertain and not wish.accept_uncertain:
        return Leave(Why.UNCERTAIN, ", ".join(verdict.uncertain))
    return Replay(verdict, forget=verdict.uncertain)


def in_the_way(candidate: Candidate | None, episode: int) -> Leave | None:
    """What forbids any replay of the job."""
    if candidate is None:
        return Leave(Why.GONE)
    if not candidate.open(episode):
        why = Why.DECIDED if candidate.decided else Why.NOT_QUARANTINED
        return Leave(why, candidate.decided or candidate.state, candidate.decided)
    if candidate.expired:
        return Leave(Why.EXPIRED)
    if candidate.job_type is None:
        return Leave(Why.UNKNOWN_TYPE, f"{candidate.type} version {candidate.version}")
    return None


def with_another_payload(candidate: Candidate, verdict: Verdict, edited: Edited) -> Decision:
    """Exactly one of old and new may ever act. Nobody can accept a risk here: cancel, and submit another job."""
    if verdict.done:
        return Leave(Why.ACTED, ", ".join(verdict.done))
    if candidate.begun:
        return Leave(Why.ACTED, "it saved a checkpoint or began a batch")
    if candidate.accepted:
        return Leave(Why.MAY_ACT, "a call of it was accepted as uncertain before")
    if verdict.unproven:
        return Leave(Why.MAY_ACT, f"nobody can tell whether it was done: {', '.join(verdict.unproven)}")
    if verdict.started and not candidate.all_ended:
        return Leave(Why.MAY_ACT, f"an attempt that lost the job was never seen to end: {', '.join(verdict.started)}")
    return Replay(verdict, edited)


def result_of(job_type: JobType, verdict: Verdict) -> str | None:
    """The recorded result that becomes the job's: of its whole effect, its only call, or all of them by name."""
    done = verdict.done
    if job_type.whole_effect in done:
        found = done[job_type.whole_effect]
    else:
        found = next(iter(done.values())) if len(done) == 1 else done
    return None if found is None else to_json(found)


def decide(connection: PgConnection, job_id: UUID, episode: int, wish: Wish, decider: Decider) -> Decision:
    """Consider and write it, guarded; when the job or its ledger changed in between, consider again."""
    for _ in range(LOOKS):
        candidate = read(connection, job_id, episode)
        decision = consider(candidate, episode, wish)
        if isinstance(decision, Leave) or candidate is None:
            return decision
        if record(connection, candidate, decision.verdict):
            continue  # what the other side said is in the ledger now, and the picture has changed
        job_type = candidate.job_type
        assert job_type is not None
        if isinstance(decision, Settle):
            if settle(connection, job_id, episode, decider, result=decision.result):
                return decision
        elif replay(connection, job_type, candidate, decider, decision.edited, decision.forget):
            return decision
    return Leave(Why.CHANGING)
