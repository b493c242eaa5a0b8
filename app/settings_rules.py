"""Which settings must fit each other: checked at start, and told by `deadsure settings --markdown`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from app.errors import ConfigurationError


@dataclass(frozen=True)
class Rule:
    """`small` times `factor` must not be above `large`; both are environment variables. `why`: what goes wrong."""

    small: str
    large: str
    why: str
    factor: int = 1

    def told(self) -> str:
        """The rule as one line of the reference."""
        times = f"{self.factor} times " if self.factor > 1 else ""
        return f"{times}`{self.small}` ≤ `{self.large}`"


RULES = (
    Rule(
        "DEADSURE_LEASE_RENEW_S",
        "DEADSURE_LEASE_S",
        "two failed renewals would cost a living worker its jobs",
        factor=3,
    ),
    Rule("DEADSURE_SWEEP_S", "DEADSURE_LEASE_S", "jobs of a dead worker would wait longer than its lease"),
    Rule("DEADSURE_RESEND_FIRST_S", "DEADSURE_RESEND_MAX_S", "the gap grows from the first to the longest"),
    Rule("DEADSURE_POLL_S", "DEADSURE_RESEND_FIRST_S", "a message cannot be sent again before somebody looks"),
    Rule("DEADSURE_PREFETCH", "DEADSURE_WINDOW", "one process would hold more than the relay keeps in the broker"),
    Rule("DEADSURE_LEASE_S", "DEADSURE_CONSUMER_TIMEOUT_S", "RabbitMQ would give away what a living worker holds"),
    Rule(
        "DEADSURE_SHUTDOWN_GRACE_S",
        "DEADSURE_CONSUMER_TIMEOUT_S",
        "RabbitMQ would give away jobs that may still finish",
    ),
)


def check(value: Callable[[str], float]) -> None:
    """Raise ConfigurationError that names both settings of the first rule that is broken; `value` looks one up."""
    for rule in RULES:
        small, large = value(rule.small), value(rule.large)
        if small * rule.factor > large:
            raise ConfigurationError(f"{rule.small}={small:g} is too large for {rule.large}={large:g}: {rule.why}")
