"""Which due debts travel in one message: under backlog many jobs of one type, under light load one.

A group holds first sends only, of one type, version, priority and episode: a resend, a trace and what has a history
go alone. A group is a quarter of what is due of its kind, so that a few jobs are spread over processes instead of being
put into one, and nothing ever waits for a group to fill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from app.outbox import Debt

SHARE = 4


def groups(debts: Sequence[Debt], limit: Callable[[str, int], int]) -> list[list[Debt]]:
    """The debts by message, in order of the first of each; `limit(type, version)` bounds the jobs of one message."""
    alike: dict[Any, list[Debt]] = {}
    for debt in debts:
        alone = debt.kind != "wake" or debt.copy != 1
        kind = debt.job_id if alone else (debt.type, debt.version, debt.priority, debt.episode)
        alike.setdefault(kind, []).append(debt)
    place = {debt.job_id: number for number, debt in enumerate(debts)}
    made = []
    for found in alike.values():
        size = max(1, min(limit(found[0].type, found[0].version), len(found) // SHARE))
        made += [found[start : start + size] for start in range(0, len(found), size)]
    return sorted(made, key=lambda group: place[group[0].job_id])
