"""What the demo tells while it runs: lines and a progress bar on standard error, plain lines without a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

PLAIN_LINES = 4  # lines that stand for one bar where there is no terminal

Show = Callable[[int], None]


class Screen:
    """Standard error; standard output is left to the result."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)

    def say(self, text: str) -> None:
        """One line, above the bar if there is one."""
        self._console.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def bar(self, label: str, total: int) -> Iterator[Show]:
        """A bar from 0 to `total`; call what it yields with the present value."""
        if not self._console.is_terminal:
            yield self._plain(label, total)
            return
        columns = (TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._console) as progress:
            task = progress.add_task(label, total=total)
            yield lambda value: progress.update(task, completed=value)

    def _plain(self, label: str, total: int) -> Show:
        shown = 0

        def show(value: int) -> None:
            nonlocal shown
            if value * PLAIN_LINES // total > shown:
                shown = value * PLAIN_LINES // total
                self.say(f"  {label}: {value} of {total}")

        return show
