"""One repetition of one system: submit, drain, light load, bulk, drain from a filled window, recovery.

Every phase ends by counting effects: exactly one for each job, or the figure is reported as broken and left out.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from bench import cpu
from bench.effects import WARM_UP, read_ends
from bench.programs import Programs, stop
from bench.servers import Servers

RATE = 50
POLL_S = 0.1
DRAIN_TIMEOUT_S = 240.0
RECOVERY_TIMEOUT_S = 180.0
SETTLE_S = 3.0
WINDOW = 750  # a relay refills its window of 1000 once a quarter of it is free
SLEEPY = 777

Figures = dict[str, Any]


class BrokenRunError(RuntimeError):
    """A phase ended without exactly one effect per job."""


@dataclass(frozen=True)
class Sizes:
    """Jobs of one drain, and seconds of light load."""

    jobs: int
    seconds: float


class Run:
    """The phases of one system."""

    def __init__(self, programs: Programs, servers: Servers, sizes: Sizes) -> None:
        self.programs, self.servers, self.sizes = programs, servers, sizes

    def repetition(self) -> Figures:
        """Every phase but recovery."""
        found: Figures = {}
        try:
            self._refresh()
            found["submit"] = self.submit("submit")
            found["drain"] = self.drain()
            found["light"] = self.light()
            self.programs.stop_worker()
            if self.programs.system.durable:
                self._refresh()
                found["bulk"] = self.submit("bulk")
                self.fill_window()
                found["drain_window"] = self.drain()
        except (BrokenRunError, RuntimeError) as error:
            found["broken"] = f"{type(error).__name__}: {error}"
        finally:
            self.programs.stop_worker()
        return found

    def submit(self, phase: str) -> Figures:
        """Jobs a second from one process, nobody consuming."""
        before, wal = cpu.usage(self.servers.roots()), self.servers.wal()
        answer = self.programs.client(phase, self.sizes.jobs)
        spent = cpu.spent(before, cpu.usage(self.servers.roots()))
        return {
            "rate": self.sizes.jobs / answer["secs"],
            "cpu_ms": self._per_job({**spent, "client": answer["cpu_s"]}),
            **self._wal_per_job(wal),
        }

    def fill_window(self) -> None:
        """Let `deadsure relay` publish the window, then end it."""
        wanted = min(WINDOW, self.sizes.jobs)
        relay = self.programs.start_relay()
        try:
            self._wait(
                lambda: self.servers.rows("SELECT count(*) FROM outbox WHERE sends > 0")[0][0] >= wanted,
                30,
                "the relay fills the window",
            )
        finally:
            stop(relay)

    def drain(self) -> Figures:
        """Jobs a second from the first effect to the last, all of them waiting before the worker starts."""
        wal, started = self.servers.wal(), time.monotonic()
        self.programs.start_worker()
        self._wait(lambda: self._effects() > 0, 60, "a first effect")
        ready_s = time.monotonic() - started
        roots = {"worker": self.programs.worker_pid, **self.servers.roots()}
        before, begin = cpu.usage(roots), time.monotonic()
        counted = self._effects()
        self._wait(lambda: self._effects() >= self.sizes.jobs, DRAIN_TIMEOUT_S, f"{self.sizes.jobs} effects")
        after, seconds = cpu.usage(roots), time.monotonic() - begin
        done = self.sizes.jobs - counted
        first, last = self.servers.rows(
            "SELECT extract(epoch FROM min(at))::float8, extract(epoch FROM max(at))::float8 FROM bench_effects"
            " WHERE n >= 0"
        )[0]
        self._check(0, self.sizes.jobs)
        spent = cpu.spent(before, after)
        return {
            "rate": self.sizes.jobs / (last - first),
            "start_s": ready_s,
            "cpu_ms": {name: round(1000 * value / done, 3) for name, value in spent.items()},
            "busiest": cpu.busiest(before, after, seconds),
            **self._wal_per_job(wal),
        }

    def light(self) -> Figures:
        """Milliseconds from before `delay` to the committed effect, at `RATE` jobs a second."""
        roots = {"worker": self.programs.worker_pid, **self.servers.roots()}
        before = cpu.usage(roots)
        calls = self.programs.client("steady", RATE, self.sizes.seconds)["calls"]
        first = 10_000_000
        with suppress(BrokenRunError):
            self._wait(lambda: self._effects(first) >= len(calls), 20, "the effects of light load")
        time.sleep(0.3)
        spent = cpu.spent(before, cpu.usage(roots))
        self._check(first, len(calls))
        ends = read_ends(self.programs.ends)
        times = sorted(1000 * (ends[task_id] - begun) for task_id, begun, _ in calls)
        return {
            "p50_ms": statistics.median(times),
            "p99_ms": times[int(0.99 * len(times))],
            "max_ms": times[-1],
            "call_p50_ms": 1000 * statistics.median(length for _, _, length in calls),
            "cpu_ms": {name: round(1000 * value / len(calls), 3) for name, value in spent.items()},
        }

    def recovery(self) -> Figures:
        """Seconds from the SIGKILL of a whole worker to the effect of the job it ran; a new worker starts at once."""
        try:
            self._refresh()
            self.programs.start_worker()
            self.programs.client("submit", 4)
            self._wait(lambda: self._effects() >= 4, 60, "the worker is ready")
            time.sleep(SETTLE_S)
            self.programs.client("sleepy", SLEEPY)
            self._wait(lambda: self._starts() > 0, 30, "the job starts")
            time.sleep(0.5)
            killed = time.monotonic()
            self.programs.kill_worker()
            self.programs.start_worker()
            self._wait(lambda: self._effects(SLEEPY) > 0, RECOVERY_TIMEOUT_S, "the effect after the kill", 0.02)
            seconds = time.monotonic() - killed
            time.sleep(SETTLE_S)
            self._check(SLEEPY, 1)
        except (BrokenRunError, RuntimeError) as error:
            return {"broken": f"{type(error).__name__}: {error}"}
        else:
            return {"seconds": seconds, "starts": self._starts()}
        finally:
            self.programs.stop_worker()

    def _refresh(self) -> None:
        self.servers.refresh()
        self.programs.ends.write_text("")

    def _effects(self, first: int = 0) -> int:
        return int(self.servers.rows("SELECT count(*) FROM bench_effects WHERE n >= %s", [first])[0][0])

    def _starts(self) -> int:
        return int(self.servers.rows("SELECT count(*) FROM bench_starts")[0][0])

    def _check(self, first: int, count: int) -> None:
        """Exactly one effect for each of `count` jobs from `first` on, and no third kind of row."""
        rows, different = self.servers.rows(
            "SELECT count(*), count(DISTINCT n) FROM bench_effects WHERE n >= %s AND n < %s", [first, first + count]
        )[0]
        strange = self.servers.rows(
            "SELECT count(*) FROM bench_effects WHERE n >= %s AND n <> %s", [first + count, WARM_UP]
        )[0][0]
        if (rows, different, strange) != (count, count, 0):
            raise BrokenRunError(f"{count} jobs, {rows} effects of {different} jobs, {strange} of others")

    def _wait(self, condition: Callable[[], bool], timeout_s: float, what: str, poll_s: float = POLL_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise BrokenRunError(f"waited {timeout_s:g} s in vain: {what}")
            time.sleep(poll_s)

    def _per_job(self, spent: dict[str, float]) -> dict[str, float]:
        return {name: round(1000 * value / self.sizes.jobs, 3) for name, value in spent.items()}

    def _wal_per_job(self, before: dict[str, float]) -> dict[str, float]:
        after = self.servers.wal()
        return {
            f"{name}_per_job": round((after[name] - before[name]) / self.sizes.jobs, 2)
            for name in ("wal_bytes", "commits")
        }
