"""Handlers that end in every bad way (`celery -A tests.faults.jobs_deaths worker`)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from app.errors import TransientError
from app.job import Job
from app.retry_policy import RetryPolicy
from tasks.durable import durable
from tests.faults.jobs import POLL_S, finish, start
from tests.faults.worker_app import app

__all__ = ["app"]

FOREVER_S = 60
QUICK = RetryPolicy(limit=2, first_s=0.2)


class How(BaseModel):
    """Which way; `once`: a file that is made by the first run, after which the job behaves."""

    how: str
    once: str | None = None


class Refused(Exception):
    """Cannot be built from its own `args`, so it cannot be unpickled."""

    def __init__(self, code: int, *, account: int) -> None:
        super().__init__(f"refused with {code} for {account}")
        self.code, self.account = code, account


class Holding(Exception):
    """Cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


class Mute(Exception):
    """Has no text: asking for it raises."""

    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


class Panic(BaseException):
    """As asyncio.CancelledError, or what a Rust extension raises when it panics."""


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt() -> None:
    raise KeyboardInterrupt


def run_out_of_memory() -> None:
    raise MemoryError


DEATHS: dict[str, Callable[[], object]] = {
    "killed": kill_self,
    "segfault": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "os_exit": lambda: os._exit(0),
    "sys_exit": lambda: sys.exit(3),
    "interrupt": interrupt,
    "memory": run_out_of_memory,
}


@durable("tests.death", payload=How, mode="leased")
def death(job: Job, payload: How) -> None:
    """Writes its effect into the finishing transaction, then its process dies."""
    start(job)
    finish(job)
    if payload.once is None or not Path(payload.once).exists():
        if payload.once:
            Path(payload.once).touch()
        DEATHS[payload.how]()


@durable("tests.atomic_death", payload=How, mode="atomic", time_limit_s=20)
def atomic_death(job: Job, payload: How) -> None:
    start(job)
    finish(job)
    DEATHS[payload.how]()


def sleep_swallowing() -> None:
    """Whatever is raised into it, it goes on."""
    until = time.monotonic() + FOREVER_S
    while time.monotonic() < until:
        with suppress(BaseException):
            time.sleep(0.2)


OVERRUNS: dict[str, Callable[[], object]] = {
    "sleep": lambda: time.sleep(FOREVER_S),
    "in_c": lambda: ctypes.PyDLL(None).sleep(FOREVER_S),  # keeps the interpreter lock: no signal handler runs
    "swallow": sleep_swallowing,
}


@durable("tests.overrun", payload=How, mode="leased", time_limit_s=1)
def overrun(job: Job, payload: How) -> None:
    start(job)
    finish(job)
    OVERRUNS[payload.how]()


@durable("tests.atomic_overrun", payload=How, mode="atomic", time_limit_s=1)
def atomic_overrun(job: Job, payload: How) -> None:
    start(job)
    finish(job)
    OVERRUNS[payload.how]()


def sleep_broadly() -> None:
    """The usual loop around a list of items: no error of one stops the rest."""
    until = time.monotonic() + FOREVER_S
    while time.monotonic() < until:
        with suppress(Exception):
            time.sleep(0.2)


@durable("tests.softly", payload=How, mode="leased", soft_time_limit_s=1, time_limit_s=3, retry=QUICK)
def softly(job: Job, payload: How) -> None:
    """`sleep` lets the soft limit through, `broad` swallows it, `commit` is done at once."""
    start(job)
    finish(job)
    if payload.how == "sleep":
        time.sleep(FOREVER_S)
    elif payload.how == "broad":
        sleep_broadly()


def end_slowly(job: Job, payload: How) -> None:
    """Does its work at once; what takes long is its end."""
    start(job)
    finish(job)
    while payload.once and not Path(payload.once).exists():
        time.sleep(POLL_S)
    if payload.how == "fail" and job.failures == 0:
        raise TransientError("the other side is away")


LONG_END: dict[str, Any] = {"soft_time_limit_s": 2, "time_limit_s": 30, "retry": QUICK}
softly_leased = durable("tests.softly_leased", payload=How, mode="leased", **LONG_END)(end_slowly)
softly_atomic = durable("tests.softly_atomic", payload=How, mode="atomic", **LONG_END)(end_slowly)


@durable("tests.softly_calling", payload=How, mode="leased", soft_time_limit_s=1, time_limit_s=30, retry=QUICK)
def softly_calling(job: Job, _payload: How) -> None:
    """Makes a call, and is then busy for ever; the next attempt finds the call done, and behaves."""
    start(job)
    job.call("it", lambda _key: None)
    if job.failures == 0:
        time.sleep(FOREVER_S)
    finish(job)


def refuse() -> None:
    raise Refused(7, account=1)


def hold() -> None:
    raise Holding


def hold_as_cause() -> None:
    try:
        hold()
    except Holding as error:
        raise RuntimeError("in turn") from error


def refuse_as_cause() -> None:
    try:
        refuse()
    except Refused as error:
        raise Holding from error


def be_mute() -> None:
    raise Mute


def group() -> None:
    raise ExceptionGroup("several", [Holding(), Refused(1, account=2)])


def panic() -> None:
    raise Panic


AWKWARD: dict[str, Callable[[], None]] = {
    "arguments": refuse,
    "unpicklable": hold,
    "unpicklable_cause": hold_as_cause,
    "arguments_cause": refuse_as_cause,
    "mute": be_mute,
    "group": group,
    "base_exception": panic,
}


@durable("tests.awkward", payload=How, mode="leased", retry=QUICK)
def awkward(job: Job, payload: How) -> None:
    start(job)
    finish(job)
    AWKWARD[payload.how]()


def nested(depth: int) -> Any:
    """Lists in lists."""
    made: Any = []
    for _ in range(depth):
        made = [made]
    return made


ODD: dict[str, Callable[[], Any]] = {
    "object": object,
    "set": lambda: {1, 2},
    "nan": lambda: float("nan"),
    "bytes": lambda: b"\xff",
    "surrogate": lambda: "\ud800",
    "nul": lambda: "a\0b",
    "cycle": lambda: vars(sys.modules[__name__]),
    "keys": lambda: {(1, 2): 3},
    "deep": lambda: nested(100_000),
    "huge_number": lambda: 10**5000,
}


@durable("tests.odd_result", payload=How, mode="leased")
def odd_result(job: Job, payload: How) -> Any:
    start(job)
    finish(job)
    return ODD[payload.how]()


@durable("tests.forker", payload=How, mode="leased")
def forker(job: Job, payload: How) -> dict[str, int]:
    """The child of its fork comes back from the handler too (or fails there)."""
    start(job)
    child = os.fork()
    if child == 0 and payload.how == "raises":
        raise RuntimeError("in the fork")
    if child == 0 and payload.how == "writes":
        return {"child": 1}
    if child == 0 and payload.how == "sys_exit":
        sys.exit(0)
    if child == 0:
        os._exit(0)
    time.sleep(POLL_S)
    os.waitpid(child, 0)
    finish(job)
    return {"child": 0}


@durable("tests.closer", payload=How, mode="leased", retry=QUICK)
def closer(job: Job, _payload: How) -> None:
    """Closes the connection that it shares with its own success."""
    start(job)
    finish(job)
    close(job)


@durable("tests.atomic_closer", payload=How, mode="atomic", retry=QUICK, time_limit_s=30)
def atomic_closer(job: Job, _payload: How) -> None:
    start(job)
    finish(job)
    close(job)


def close(job: Job) -> None:
    driver: Any = job.session.connection().connection.driver_connection
    driver.close()
