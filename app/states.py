"""The states of a job and the arrows between them: the legend that everything else refers to.

    submit      -> queued                     expire      running -> queued | quarantined | cancelled
    claim       queued | retry_wait -> running            release     running -> queued | cancelled
    succeed     running -> succeeded          replay      quarantined -> queued
    retry       running -> retry_wait | cancelled         settle      quarantined -> succeeded
    quarantine  running | queued | retry_wait -> quarantined
    cancel      queued | retry_wait | quarantined -> cancelled

The clean path of an atomic job writes claim and succeed (or retry, quarantine) in one commit.
"""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """`jobs.state`; the database's enum `job_state` holds the same words in the same order."""

    QUEUED = "queued"
    RUNNING = "running"
    RETRY_WAIT = "retry_wait"
    SUCCEEDED = "succeeded"
    QUARANTINED = "quarantined"
    CANCELLED = "cancelled"


class Arrow(StrEnum):
    """A change of state; also the journal event that records it."""

    SUBMIT = "submit"
    CLAIM = "claim"
    SUCCEED = "succeed"
    RETRY = "retry"
    QUARANTINE = "quarantine"
    EXPIRE = "expire"
    RELEASE = "release"
    REPLAY = "replay"
    SETTLE = "settle"
    CANCEL = "cancel"


TERMINAL = frozenset({State.SUCCEEDED, State.CANCELLED})

ARROWS: dict[Arrow, tuple[frozenset[State | None], frozenset[State]]] = {
    Arrow.SUBMIT: (frozenset({None}), frozenset({State.QUEUED})),
    Arrow.CLAIM: (frozenset({State.QUEUED, State.RETRY_WAIT}), frozenset({State.RUNNING})),
    Arrow.SUCCEED: (frozenset({State.RUNNING}), frozenset({State.SUCCEEDED})),
    Arrow.RETRY: (frozenset({State.RUNNING}), frozenset({State.RETRY_WAIT, State.CANCELLED})),
    Arrow.QUARANTINE: (
        frozenset({State.RUNNING, State.QUEUED, State.RETRY_WAIT}),
        frozenset({State.QUARANTINED}),
    ),
    Arrow.EXPIRE: (
        frozenset({State.RUNNING}),
        frozenset({State.QUEUED, State.QUARANTINED, State.CANCELLED}),
    ),
    Arrow.RELEASE: (frozenset({State.RUNNING}), frozenset({State.QUEUED, State.CANCELLED})),
    Arrow.REPLAY: (frozenset({State.QUARANTINED}), frozenset({State.QUEUED})),
    Arrow.SETTLE: (frozenset({State.QUARANTINED}), frozenset({State.SUCCEEDED})),
    Arrow.CANCEL: (
        frozenset({State.QUEUED, State.RETRY_WAIT, State.QUARANTINED}),
        frozenset({State.CANCELLED}),
    ),
}
