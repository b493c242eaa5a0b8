"""The ledger of external calls against PostgreSQL: who may make a call, and what a rerun knows of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import pytest
from psycopg2.extensions import connection as PgConnection

from app import finish
from app.effects import Answer, Caller, Check, Checked
from app.errors import LeaseLost, TransientError, UncertainEffect, UncertainError, UnrecoverableError
from app.finish import Holder
from app.release import release
from app.seat import DatabaseAway
from app.sweep import CHILD_DIED, Sweeper, expire_child, expire_redelivered
from db.session import rows
from tests.integration.scene import Background, Scene, Worker
from tests.nodes.waiting import wait_for

NAME = "smtp"


@dataclass
class FarSide:
    """Counts the calls and their keys; fails with the errors that are queued."""

    errors: list[Exception] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)

    def __call__(self, key: str) -> dict[str, int]:
        self.keys.append(key)
        if self.errors:
            raise self.errors.pop(0)
        return {"n": len(self.keys)}

    @property
    def calls(self) -> int:
        return len(self.keys)


def says(answer: Answer, result: Any = None) -> Check:
    return lambda _name, _key, _payload: Checked(answer, result)


class Attempts:
    """One job on its way through several attempts."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.job_id = scene.job()
        self.far = FarSide()

    def start(self, worker: Worker | None = None) -> Holder:
        """Claim the next attempt."""
        self.worker = worker or self.scene.worker()
        self.holder = self.scene.claimed(self.worker, self.job_id)
        return self.holder

    def caller(self, check: Check | None = None, **changed: Any) -> Caller:
        session = self.scene.connect()
        given: dict[str, Any] = {
            "ledger": lambda: session,
            "job_id": self.job_id,
            "attempt": self.holder.claimed.attempt,
            "worker_id": self.worker.worker_id,
            "payload": None,
            "check": check,
        }
        return Caller(**{**given, **changed})

    def call(self, check: Check | None = None, *, takes_key: bool = False, **changed: Any) -> Any:
        return self.caller(check, **changed).call(NAME, self.far, takes_key=takes_key)

    def killed_in_the_call(self, end: Callable[[], object]) -> None:
        """An attempt that made the call, never said so, and then ended."""
        self.start()
        with pytest.raises(KeyboardInterrupt):
            self.caller().call(NAME, interrupted(self.far), takes_key=False)
        end()
        self.start()

    # how an attempt ends

    def retry(self) -> None:
        finish.retry(self.worker.session, self.holder, 0.0, "transient", "x", in_transaction=False)

    def child_dies(self) -> None:
        seen = (self.job_id, self.worker.worker_id, self.worker.pid, CHILD_DIED)
        assert expire_child(self.scene.eyes, *seen) == "queued"

    def session_is_gone(self) -> None:
        """A hint that may free the job: the process may still be in its call."""
        self.scene.end_session(self.worker)
        assert expire_redelivered(self.scene.eyes, self.job_id)

    def released(self) -> None:
        assert release(self.scene.eyes, self.job_id, self.worker.worker_id, self.worker.pid, "leaves") is not None

    def stalls(self) -> None:
        """The lease is over, the process may only be frozen."""
        self.scene.end_lease(self.worker)
        sweeper = Sweeper(0.0)
        wait_for(lambda: [sweeper.look(self.scene.eyes), self.scene.state(self.job_id)][1] == "queued", 10)

    def row(self) -> dict[str, Any] | None:
        found = self.scene.records("SELECT * FROM effects WHERE job_id = %s", (str(self.job_id),))
        return found[0] if found else None

    @property
    def status(self) -> tuple[str, int] | None:
        row = self.row()
        return (row["status"], row["attempt"]) if row else None


def interrupted(far: FarSide) -> Callable[[str], Any]:
    def call(key: str) -> Any:
        far(key)
        raise KeyboardInterrupt

    return call


@pytest.fixture
def attempts(scene: Scene) -> Attempts:
    return Attempts(scene)


# the first call


def test_a_call_is_started_before_it_is_made_and_finished_after(attempts: Attempts, scene: Scene) -> None:
    attempts.start()
    seen: list[Any] = []

    def far(key: str) -> str:
        seen.extend([key, attempts.status])
        return "250 taken"

    assert attempts.caller().call(NAME, far, takes_key=False) == "250 taken"
    assert seen == [f"{attempts.job_id}:{NAME}", ("started", 1)]
    row = attempts.row()
    assert row is not None
    assert (row["status"], row["attempt"], row["result"]) == ("finished", 1, "250 taken")
    assert row["finished_at"] >= row["started_at"]
    assert scene.state(attempts.job_id) == "running"


def test_the_same_name_twice_is_one_call(attempts: Attempts) -> None:
    attempts.start()
    assert attempts.call() == attempts.call() == {"n": 1}
    assert attempts.far.calls == 1


def test_two_names_are_two_calls_with_two_keys(attempts: Attempts) -> None:
    attempts.start()
    caller = attempts.caller()
    assert [caller.call(name, attempts.far, takes_key=True)["n"] for name in ("a", "b")] == [1, 2]
    assert len(set(attempts.far.keys)) == 2


def test_a_call_without_result_is_finished_with_null(attempts: Attempts) -> None:
    attempts.start()
    assert attempts.caller().call(NAME, lambda _key: None, takes_key=False) is None
    attempts.retry()
    attempts.start()
    assert attempts.call() is None
    assert attempts.far.calls == 0


@pytest.mark.parametrize("answer", [object(), {"x": float("nan")}, "\0"], ids=["object", "NaN", "NUL"])
def test_a_result_that_is_no_json_does_not_make_the_call_twice(attempts: Attempts, answer: Any) -> None:
    attempts.start()
    with pytest.raises(UnrecoverableError, match="not JSON"):
        attempts.caller().call(NAME, lambda _key: answer, takes_key=False)
    assert attempts.status == ("finished", 1)


# who may call


@pytest.mark.parametrize("state", ["queued", "succeeded", "quarantined", "cancelled"])
def test_nobody_calls_for_a_job_that_does_not_run(attempts: Attempts, scene: Scene, state: str) -> None:
    attempts.start()
    scene.change(
        attempts.job_id,
        state=state,
        worker_id=None,
        result_key="k" if state == "succeeded" else None,
        cause="x",
        episode=1,
        finished_at="now" if state in ("succeeded", "cancelled") else None,
    )
    with pytest.raises(LeaseLost, match="was not called"):
        attempts.call(takes_key=True)
    assert (attempts.far.calls, attempts.row()) == (0, None)


def test_an_older_attempt_does_not_call(attempts: Attempts) -> None:
    attempts.start()
    old = attempts.caller()
    attempts.stalls()
    attempts.start()
    with pytest.raises(LeaseLost, match="attempt 1 no longer owns"):
        old.call(NAME, attempts.far, takes_key=True)
    assert attempts.call() == {"n": 1}
    with pytest.raises(LeaseLost):
        old.call(NAME, attempts.far, takes_key=True)
    assert attempts.far.calls == 1


def test_another_worker_does_not_call_for_the_same_attempt(attempts: Attempts, scene: Scene) -> None:
    attempts.start()
    with pytest.raises(LeaseLost):
        attempts.call(worker_id=scene.worker().worker_id)
    assert attempts.far.calls == 0


def test_a_frozen_call_that_ends_late_gives_its_result_to_the_next_attempt(attempts: Attempts) -> None:
    attempts.start()
    frozen, inside, go_on = attempts.caller(), threading.Event(), threading.Event()

    def far(key: str) -> Any:
        inside.set()
        assert go_on.wait(10)
        return attempts.far(key)

    late = Background(lambda: frozen.call(NAME, far, takes_key=False))
    assert inside.wait(10)
    attempts.stalls()
    attempts.start()
    with pytest.raises(UncertainEffect):
        attempts.call()
    go_on.set()
    assert late.result() == {"n": 1}
    assert attempts.call() == {"n": 1}
    assert attempts.far.calls == 1


def test_a_frozen_call_that_was_taken_over_is_not_recorded(attempts: Attempts) -> None:
    attempts.start()
    frozen, inside, go_on = attempts.caller(), threading.Event(), threading.Event()

    def far(key: str) -> Any:
        inside.set()
        assert go_on.wait(10)
        return attempts.far(key)

    late = Background(lambda: frozen.call(NAME, far, takes_key=True))
    assert inside.wait(10)
    attempts.stalls()
    attempts.start()
    assert attempts.call(takes_key=True) == {"n": 1}
    go_on.set()
    with pytest.raises(LeaseLost, match="result is not recorded"):
        late.result()
    row = attempts.row()
    assert row is not None
    assert (row["attempt"], row["result"]) == (2, {"n": 1})
    assert len(set(attempts.far.keys)) == 1, "the other side saw one key"


# a rerun


def test_a_finished_call_returns_its_result(attempts: Attempts) -> None:
    attempts.start()
    first = attempts.call()
    attempts.child_dies()
    attempts.start()
    assert attempts.call(says(Answer.NOT_DONE)) == first == {"n": 1}
    assert attempts.far.calls == 1


@pytest.mark.parametrize("end", ["retry", "child_dies", "released", "stalls"])
def test_a_started_call_that_nobody_can_judge_is_uncertain(attempts: Attempts, end: str) -> None:
    attempts.killed_in_the_call(getattr(attempts, end))
    with pytest.raises(UncertainEffect, match="attempt 1 started 'smtp' and did not finish it"):
        attempts.call()
    assert (attempts.far.calls, attempts.status) == (1, ("started", 1))


def test_a_started_call_is_repeated_with_the_same_key_where_keys_are_taken(attempts: Attempts) -> None:
    attempts.killed_in_the_call(attempts.stalls)
    assert attempts.call(takes_key=True) == {"n": 2}
    assert attempts.far.keys == [f"{attempts.job_id}:{NAME}"] * 2
    assert attempts.status == ("finished", 2)


def test_a_type_may_choose_the_risk(attempts: Attempts) -> None:
    attempts.killed_in_the_call(attempts.child_dies)
    assert attempts.call(risk_repeat=True) == {"n": 2}


@pytest.mark.parametrize("takes_key", [True, False])
def test_done_closes_the_row_and_calls_nobody(attempts: Attempts, takes_key: bool) -> None:
    attempts.killed_in_the_call(attempts.stalls)
    asked: list[Any] = []

    def check(*question: Any) -> Checked:
        asked.append(question)
        return Checked(Answer.DONE, {"reference": "ch_1"})

    caller = attempts.caller(check, payload="payload")
    assert caller.call(NAME, attempts.far, takes_key=takes_key) == {"reference": "ch_1"}
    assert asked == [(NAME, f"{attempts.job_id}:{NAME}", "payload")]
    assert (attempts.far.calls, attempts.status) == (1, ("finished", 2))


@pytest.mark.parametrize("end", ["retry", "child_dies", "released"])
def test_not_done_is_believed_once_the_old_owner_cannot_act(attempts: Attempts, end: str) -> None:
    attempts.killed_in_the_call(getattr(attempts, end))
    assert attempts.call(says(Answer.NOT_DONE)) == {"n": 2}
    assert attempts.status == ("finished", 2)


@pytest.mark.parametrize("end", ["stalls", "session_is_gone"])
def test_not_done_is_not_believed_while_the_old_owner_may_only_be_frozen(attempts: Attempts, end: str) -> None:
    """H11: it would make its call after the answer was given."""
    attempts.killed_in_the_call(getattr(attempts, end))
    with pytest.raises(UncertainEffect):
        attempts.call(says(Answer.NOT_DONE))
    assert attempts.far.calls == 1
    assert attempts.call(says(Answer.NOT_DONE), takes_key=True) == {"n": 2}


def test_unknown_is_as_good_as_no_check(attempts: Attempts) -> None:
    attempts.killed_in_the_call(attempts.child_dies)
    with pytest.raises(UncertainEffect):
        attempts.call(says(Answer.UNKNOWN))
    assert attempts.call(says(Answer.UNKNOWN), takes_key=True) == {"n": 2}


def test_a_check_that_fails_changes_nothing(attempts: Attempts) -> None:
    attempts.killed_in_the_call(attempts.child_dies)

    def check(*_question: Any) -> Checked:
        raise TransientError("the status page is down")

    with pytest.raises(TransientError):
        attempts.call(check, takes_key=True)
    assert (attempts.far.calls, attempts.status) == (1, ("started", 1))


# calls that fail


def test_a_refused_call_is_withdrawn_and_may_be_made_again(attempts: Attempts) -> None:
    attempts.far.errors = [ConnectionRefusedError(), TransientError("421")]
    for _ in range(2):
        attempts.start()
        with pytest.raises((ConnectionRefusedError, TransientError)):
            attempts.call()
        assert attempts.row() is None
        attempts.retry()
    attempts.start()
    assert attempts.call() == {"n": 3}


@pytest.mark.parametrize("error", [UncertainError("?"), ConnectionResetError(), TimeoutError(), RuntimeError("a bug")])
def test_a_call_that_may_have_happened_stays_started(attempts: Attempts, error: Exception) -> None:
    attempts.far.errors = [error]
    attempts.start()
    with pytest.raises(type(error)):
        attempts.call()
    assert attempts.status == ("started", 1)
    attempts.retry()
    attempts.start()
    with pytest.raises(UncertainEffect):
        attempts.call()
    assert attempts.far.calls == 1


def test_a_later_no_says_nothing_about_an_earlier_attempt(attempts: Attempts) -> None:
    attempts.killed_in_the_call(attempts.child_dies)
    attempts.far.errors = [ConnectionRefusedError()]
    with pytest.raises(ConnectionRefusedError):
        attempts.call(takes_key=True)
    assert attempts.status == ("started", 2)


# the database goes away


class Flaky:
    """A ledger whose session is cut at the server before the n-th statement, and is replaced after that."""

    def __init__(self, scene: Scene, at: int, away: int = 0) -> None:
        self.scene, self.at, self.away = scene, at, away
        self.uses = 0
        self.connection: PgConnection = scene.connect()

    def __call__(self) -> PgConnection:
        self.uses += 1
        if self.uses == self.at:
            rows(self.scene.eyes, "SELECT pg_terminate_backend(%s, 5000)", (self.connection.info.backend_pid,))
        elif self.connection.closed:
            if self.away:
                self.away -= 1
                raise DatabaseAway("no server")
            self.connection = self.scene.connect()
        return self.connection


def test_the_answer_of_a_call_is_kept_until_the_ledger_has_it(attempts: Attempts, scene: Scene) -> None:
    attempts.start()
    assert attempts.call(ledger=Flaky(scene, at=2, away=2)) == {"n": 1}
    assert (attempts.far.calls, attempts.status) == (1, ("finished", 1))


def test_a_refusal_is_kept_until_the_ledger_has_it(attempts: Attempts, scene: Scene) -> None:
    attempts.far.errors = [ConnectionRefusedError()]
    attempts.start()
    with pytest.raises(ConnectionRefusedError):
        attempts.call(ledger=Flaky(scene, at=2))
    assert attempts.row() is None


def test_an_outage_before_the_call_leaves_no_trace_of_it(attempts: Attempts, scene: Scene) -> None:
    attempts.start()
    with pytest.raises(DatabaseAway):
        attempts.call(ledger=Flaky(scene, at=1))
    assert (attempts.far.calls, attempts.row()) == (0, None)


def test_a_recorded_answer_may_be_recorded_again(attempts: Attempts) -> None:
    """The answer to the commit was lost: the repeat must not look like another attempt's row."""
    attempts.start()
    assert attempts.call() == {"n": 1}
    assert attempts.caller().finish(NAME, {"n": 1}) == {"n": 1}


def test_a_pruned_job_takes_its_calls_along(attempts: Attempts, scene: Scene) -> None:
    attempts.start()
    attempts.call()
    job_id: UUID = attempts.job_id
    rows(scene.eyes, "DELETE FROM jobs WHERE job_id = %s", (str(job_id),))
    assert attempts.row() is None
