"""Faults from outside: named functions of the program are wrapped, none of them knows.

The environment variable `FAULTS` holds a JSON list of `Fault` objects. Every fault that fires first
writes one line, `FAULT <do> <at> pid=<pid>`, to standard error, so that a test can wait for it.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

VARIABLE = "FAULTS"
MAIN_PID = "FAULTS_MAIN_PID"  # set where the faults are installed first, inherited by its children
OURS = ("app", "db", "tasks", "tests")
POLL_S = 0.02


@dataclass(frozen=True)
class Fault:
    """One fault.

    `at`: `before:` or `after:` and the dotted name of a function or method, such as
    `before:app.claim.claim`; `after` is when it has returned (not when it raised).
    `do`: `kill` and `stop` are SIGKILL and SIGSTOP; `wait_file` creates the file `announce` and goes on
    once the file `until` is there; `raise` raises `error`, a dotted class name.
    `who` is killed or stopped: this process, the worker's main process, or its whole group.
    `when`: fires at the n-th call in a process (0: at every call). `once_file`: of all processes, only
    the one that creates this file fires. `match`: only calls whose arguments' repr holds this text count.
    """

    at: str
    do: Literal["kill", "stop", "wait_file", "raise"]
    when: int = 1
    who: Literal["self", "main", "group"] = "self"
    once_file: str | None = None
    match: str | None = None
    announce: str | None = None
    until: str | None = None
    error: str = "builtins.RuntimeError"

    def __post_init__(self) -> None:
        moment, _, name = self.at.partition(":")
        if moment not in ("before", "after") or "." not in name:
            raise ValueError(f"at={self.at!r}: write before:module.function or after:module.function")
        if self.do == "wait_file" and not (self.announce and self.until):
            raise ValueError(f"{self.at}: wait_file needs announce and until")


def dump(faults: Iterable[Fault]) -> str:
    """The value of `FAULTS` for a process that a test starts."""
    return json.dumps([asdict(fault) for fault in faults])


def install_from_environment() -> None:
    """Install what `FAULTS` names. Raises when a target does not exist: a fault must not be lost."""
    faults = [Fault(**entry) for entry in json.loads(os.environ.get(VARIABLE, "[]"))]
    if faults:
        os.environ.setdefault(MAIN_PID, str(os.getpid()))
    for fault in faults:
        install(fault)


def install(fault: Fault) -> None:
    """Wrap the target where it is defined and wherever a module of ours holds it by name."""
    moment, _, name = fault.at.partition(":")
    owner, attribute = _find(name)
    stored = vars(owner)[attribute]
    kind = type(stored) if isinstance(stored, staticmethod | classmethod) else None
    original = stored.__func__ if kind else stored
    wrapped: Any = _wrap(original, fault, before=moment == "before")
    setattr(owner, attribute, kind(wrapped) if kind else wrapped)
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").partition(".")[0] not in OURS:
            continue
        for key, value in list(vars(module).items()):
            if value is original:
                setattr(module, key, wrapped)


def _find(name: str) -> tuple[Any, str]:
    """Owner (module or class) and attribute of a dotted name."""
    parts = name.split(".")
    for split in range(len(parts) - 1, 0, -1):
        try:
            owner: Any = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError:
            continue
        for part in parts[split:-1]:
            owner = getattr(owner, part)
        if parts[-1] not in vars(owner):
            break
        return owner, parts[-1]
    raise AttributeError(f"FAULTS names {name!r}, which does not exist")


def _wrap(original: Callable[..., Any], fault: Fault, *, before: bool) -> Callable[..., Any]:
    calls = 0

    def due(arguments: object) -> bool:
        nonlocal calls
        if fault.match is not None and fault.match not in repr(arguments):
            return False
        calls += 1
        return fault.when in (0, calls) and _is_first(fault.once_file)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not before:
            result = original(*args, **kwargs)
        if due((args, kwargs)):
            fire(fault)
        return original(*args, **kwargs) if before else result

    return wrapper


def _is_first(once_file: str | None) -> bool:
    if once_file is None:
        return True
    try:
        os.close(os.open(once_file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    return True


def fire(fault: Fault) -> None:
    """Do it."""
    os.write(2, f"FAULT {fault.do} {fault.at} pid={os.getpid()}\n".encode())
    if fault.do == "wait_file":
        assert fault.announce
        assert fault.until
        Path(fault.announce).touch()
        while not Path(fault.until).exists():
            time.sleep(POLL_S)
    elif fault.do == "raise":
        module, _, name = fault.error.rpartition(".")
        raise getattr(importlib.import_module(module), name)(f"injected {fault.at}")
    else:
        number = signal.SIGKILL if fault.do == "kill" else signal.SIGSTOP
        if fault.who == "group":
            os.killpg(os.getpgrp(), number)
        else:
            os.kill(int(os.environ[MAIN_PID]) if fault.who == "main" else os.getpid(), number)
        while fault.do == "kill":  # our own end follows at once: nothing more may happen here
            time.sleep(POLL_S)
