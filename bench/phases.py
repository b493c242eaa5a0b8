"""The phases of one system: submit, drain, light load, bulk, drain from a filled window, recovery.

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
from bench.effects import STEADY_FIRST, WARM_UP, read_ends
from bench.programs import Programs, stop
from bench.servers import Site

RATE = 50
POLL_S = 0.1
DRAIN_TIMEOUT_S = 240.0
RECOVERY_TIMEOUT_S = 180.0
SETTLE_S = 3.0
WINDOW = 750  # a relay refills its window of 1000 once a quarter of it is free
SLEEPY = 777

PHASES = ("submit", "drain", "light", "bulk", "drain_window", "recovery")
DURABLE_ONLY = ("bulk", "drain_window")

Figures = dict[str, Any]


class BrokenRunError(RuntimeError):
    """A phase ended without exactly one effect per job."""


@dataclass(frozen=True)
class Sizes:
    """Jobs of one drain, and seconds of light load."""

    jobs: int
    seconds: float


class Run:
    """The phases of one system. A phase that broke leaves its reason, and the rest of its repetition is left out."""

    def __init__(self, programs: Programs, site: Site, sizes: Sizes) -> None:
        self.programs, self.site, self.sizes = programs, site, sizes
        self.figures: Figures = {}

    def phase(self, name: str) -> None:
        """Run one of `PHASES` and keep what it found."""
        if "broken" in self.figures or (name in DURABLE_ONLY and not self.programs.system.durable):
            return
        try:
            self.figures[name] = getattr(self, name)()
        except (BrokenRunError, RuntimeError) as error:
            self.figures["broken"] = f"{name}: {error}"
        finally:
            self.programs.stop_worker()

    def submit(self) -> Figures:
        """Jobs a second, one by one from one process, nobody consuming."""
        return self._submit("submit")

    def bulk(self) -> Figures:
        """Jobs a second in one transaction."""
        return self._submit("bulk")

    def drain_window(self) -> Figures:
        """`drain` after `deadsure relay` alone has filled the window of messages in the broker."""
        relay = self.programs.start_relay()
        try:
            wanted = min(WINDOW, self.sizes.jobs)
            self._wait(lambda: self._sent() >= wanted or relay.poll() is not None, 30, "the relay fills the window")
        finally:
            stop(relay)
        return self.drain()

    def drain(self) -> Figures:
        """Jobs a second from the first effect to the last, all of them waiting before the worker starts."""
        wal, started = self.site.wal(), time.monotonic()
        self.programs.start_worker()
        self._wait(lambda: self._effects() > 0, 60, "a first effect")
        ready_s = time.monotonic() - started
        roots = {"worker": self.programs.worker_pid, **self.site.servers.roots()}
        before, begin = cpu.usage(roots), time.monotonic()
        counted = self._effects()
        self._wait(lambda: self._effects() >= self.sizes.jobs, DRAIN_TIMEOUT_S, f"{self.sizes.jobs} effects")
        after, seconds = cpu.usage(roots), time.monotonic() - begin
        done = self.sizes.jobs - counted
        first, last = self.site.rows(
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
            "foreign_cores": round(spent["foreign"] / seconds, 2),
            **self._wal_per_job(wal),
        }

    def light(self) -> Figures:
        """Milliseconds from before `delay` to the committed effect, at `RATE` jobs a second."""
        self.programs.ends.write_text("")
        self.programs.start_worker()
        self.programs.client("submit", 0)
        self._wait(lambda: len(self.programs.ends.read_text().splitlines()) > 0, 60, "the worker is ready")
        time.sleep(1)
        roots = {"worker": self.programs.worker_pid, **self.site.servers.roots()}
        before, begin = cpu.usage(roots), time.monotonic()
        calls = self.programs.client("steady", RATE, self.sizes.seconds)["calls"]
        with suppress(BrokenRunError):
            self._wait(lambda: self._effects(STEADY_FIRST) >= len(calls), 20, "the effects of light load")
        time.sleep(0.3)
        seconds, spent = time.monotonic() - begin, cpu.spent(before, cpu.usage(roots))
        self._check(STEADY_FIRST, len(calls))
        ends = read_ends(self.programs.ends)
        times = sorted(1000 * (ends[task_id] - begun) for task_id, begun, _ in calls)
        return {
            "p50_ms": statistics.median(times),
            "p99_ms": times[int(0.99 * len(times))],
            "max_ms": times[-1],
            "call_p50_ms": 1000 * statistics.median(length for _, _, length in calls),
            "cpu_ms": {name: round(1000 * value / len(calls), 3) for name, value in spent.items()},
            "foreign_cores": round(spent["foreign"] / seconds, 2),
        }

    def recovery(self) -> Figures:
        """Seconds from the SIGKILL of a whole worker to the effect of the job it ran; a new worker starts at once."""
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
        return {"seconds": seconds, "starts": self._starts()}

    def _submit(self, phase: str) -> Figures:
        self._refresh()
        roots = self.site.servers.roots()
        before, wal, begin = cpu.usage(roots), self.site.wal(), time.monotonic()
        answer = self.programs.client(phase, self.sizes.jobs)
        seconds = time.monotonic() - begin
        spent = cpu.spent(before, cpu.usage(roots))
        spent["client"] = answer["cpu_s"]
        return {
            "rate": self.sizes.jobs / answer["secs"],
            "cpu_ms": self._per_job(spent),
            "foreign_cores": round((spent["foreign"] - answer["cpu_s"]) / seconds, 2),
            **self._wal_per_job(wal),
        }

    def _refresh(self) -> None:
        self.site.refresh()
        self.programs.ends.write_text("")

    def _effects(self, first: int = 0) -> int:
        return int(self.site.rows("SELECT count(*) FROM bench_effects WHERE n >= %s", [first])[0][0])

    def _sent(self) -> int:
        return int(self.site.rows("SELECT count(*) FROM outbox WHERE sends > 0")[0][0])

    def _starts(self) -> int:
        return int(self.site.rows("SELECT count(*) FROM bench_starts")[0][0])

    def _check(self, first: int, count: int) -> None:
        """Exactly one effect for each of `count` jobs from `first` on, and no third kind of row."""
        rows, different = self.site.rows(
            "SELECT count(*), count(DISTINCT n) FROM bench_effects WHERE n >= %s AND n < %s", [first, first + count]
        )[0]
        strange = self.site.rows(
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
        after = self.site.wal()
        return {
            f"{name}_per_job": round((after[name] - before[name]) / self.sizes.jobs, 2)
            for name in ("wal_bytes", "commits")
        }
