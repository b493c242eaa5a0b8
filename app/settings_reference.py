"""docs/configuration.md, as `deadsure settings --markdown` prints it: from the settings and the rules between them."""

from __future__ import annotations

from dataclasses import Field, fields
from typing import Any

from app.ages import Age
from app.settings import Settings
from app.settings_rules import RULES

HEAD = """# Configuration

Written by `deadsure settings --markdown`; a test compares this file with it.

Settings come from environment variables, read once when a process starts. An empty variable counts as unset. A name
that begins with `DEADSURE_` and is none of these, a value that cannot be read and a pair of values that do not fit end
the process with one line that names the variable. Numbers are above 0. Names that end in `_S` are seconds; an age is
`30d`, `12h`, `45min`, `90s` or `never`. Give every process of a system the same values.

How Celery itself is set (acknowledgements, serializers, beat's schedule) is in `celeryconfig.py`, with a reason at each
line; the terms of one job type are in [jobs.md](jobs.md#the-terms-of-a-type).
"""
RULES_HEAD = """## What must fit together

Each pair is checked at start. Refused is what breaks the rule:

| rule | without it |
|---|---|
"""
TAIL = """
What no process can see alone is checked by `deadsure doctor`: RabbitMQ's real `consumer_timeout` against the longest
time limit and the lease, prefetch against memory, policies of the queues against `DEADSURE_WINDOW`, and more.
"""
# The first section with a beginning that fits takes a setting.
SECTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Lease: when a worker counts as dead", ("DEADSURE_LEASE", "DEADSURE_SWEEP", "DEADSURE_POOLED")),
    (
        "Relay: when a message is sent, and sent again",
        (
            "DEADSURE_POLL",
            "DEADSURE_RESEND",
            "DEADSURE_EVIDENCE",
            "DEADSURE_WINDOW",
            "DEADSURE_BATCH",
            "DEADSURE_CONFIRM",
        ),
    ),
    (
        "Worker: what it holds, and how it leaves",
        ("DEADSURE_PREFETCH", "DEADSURE_CONSUMER", "DEADSURE_PARK", "DEADSURE_SHUTDOWN"),
    ),
    ("Submit", ("DEADSURE_PAYLOAD", "DEADSURE_SUBMIT")),
    ("Retention: what `deadsure prune` deletes", ("DEADSURE_RETENTION",)),
    ("Metrics and logs", ("DEADSURE_METRICS", "DEADSURE_LOG")),
    ("The job types that ship", ("SMTP_", "PAYMENTS_", "REPORTS_", "DEADSURE_MAIL", "DEADSURE_CALL")),
    ("Servers", ("",)),
)
KINDS: dict[type, str] = {float: "seconds", int: "number", bool: "yes or no", Age: "age"}


def markdown() -> str:
    """The whole reference."""
    placed: dict[str, list[Field[Any]]] = {title: [] for title, _ in SECTIONS}
    for entry in fields(Settings):
        placed[next(title for title, begins in SECTIONS if entry.metadata["name"].startswith(begins))].append(entry)
    order = ["Servers", *[title for title, _ in SECTIONS if title != "Servers"]]
    rules = "".join(f"| {rule.told()} | {rule.why} |\n" for rule in RULES)
    return "\n".join([HEAD, *[section(title, placed[title]) for title in order], RULES_HEAD + rules + TAIL])


def section(title: str, entries: list[Field[Any]]) -> str:
    """One table."""
    return f"## {title}\n\n| variable | default | value | what it is |\n|---|---|---|---|\n" + "".join(
        map(line, entries)
    )


def line(entry: Field[Any]) -> str:
    """One setting."""
    kind = KINDS.get(entry.metadata["kind"], "text")
    default = "unset" if entry.default in (None, "") else f"`{shown(entry.default)}`"
    return f"| `{entry.metadata['name']}` | {default} | {kind} | {entry.metadata['doc']} |\n"


def shown(default: object) -> str:
    """A default as it is written into the environment."""
    if isinstance(default, bool):
        return "yes" if default else "no"
    return f"{default:g}" if isinstance(default, float) and not isinstance(default, Age) else str(default)
