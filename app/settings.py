"""Every setting in one place, read from the environment and cross-checked at start.

Durations are seconds. `Settings.describe()` is the reference that `deadsure settings` prints.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from app import settings_rules
from app.ages import Age
from app.errors import ConfigurationError
from db.session import DatabaseUrlError, check_url

DEFAULT_REPORTS_DIR = Path("var/reports")
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
PORTS = range(65_536)
BROKER_SCHEMES = ("amqp", "amqps", "redis", "rediss", "unix")


def setting(name: str, default: Any, doc: str, kind: type | None = None) -> Any:
    """A dataclass field that carries its environment variable and its one line of documentation.

    `kind` is the type of its value where the default, None for unset, does not tell.
    """
    return field(default=default, metadata={"name": name, "doc": doc, "kind": kind or type(default)})


@dataclass(frozen=True)
class Settings:
    """The settings of one process."""

    database_url: str = setting("DATABASE_URL", "", "PostgreSQL, as postgresql+psycopg2://…")
    broker_url: str = setting("BROKER_URL", "", "RabbitMQ (amqp://…) or Redis/Valkey (redis://…)")
    management_url: str = setting("RABBITMQ_MANAGEMENT_URL", "", "RabbitMQ's management API, for depths and policies")
    smtp_url: str = setting("SMTP_URL", "", "mail server: smtp://, smtp+starttls:// or smtps://user:password@host:port")
    payments_url: str = setting("PAYMENTS_URL", "", "payment service: https://user:password@host/path")
    reports_dir: Path = setting("REPORTS_DIR", DEFAULT_REPORTS_DIR, "where reports are written")
    lease_s: float = setting("DEADSURE_LEASE_S", 30.0, "length of a worker's lease")
    lease_renew_s: float = setting("DEADSURE_LEASE_RENEW_S", 5.0, "gap between renewals")
    sweep_s: float = setting("DEADSURE_SWEEP_S", 1.0, "gap between two looks for dead workers")
    poll_s: float = setting("DEADSURE_POLL_S", 1.0, "longest time between two looks at the outbox")
    resend_first_s: float = setting(
        "DEADSURE_RESEND_FIRST_S", 30.0, "first gap before an unpaid message is sent again; doubles"
    )
    resend_max_s: float = setting("DEADSURE_RESEND_MAX_S", 900.0, "longest gap between resends")
    evidence_age_s: float = setting(
        "DEADSURE_EVIDENCE_AGE_S", 2.0, "least age of a debt before evidence of loss resends it"
    )
    window: int = setting("DEADSURE_WINDOW", 1000, "unpaid deliveries kept in the broker per queue")
    batch: int = setting("DEADSURE_BATCH", 200, "debts a relay takes in one statement")
    confirm_timeout_s: float = setting("DEADSURE_CONFIRM_TIMEOUT_S", 15.0, "longest wait for publisher confirms")
    consumer_timeout_s: float = setting(
        "DEADSURE_CONSUMER_TIMEOUT_S", 1800.0, "RabbitMQ's consumer_timeout, where its configuration changes it"
    )
    prefetch: int = setting("DEADSURE_PREFETCH", 4, "deliveries held per worker process")
    park_grace_s: float = setting(
        "DEADSURE_PARK_GRACE_S", 600.0, "how long a type or version that nobody here knows may wait for a worker"
    )
    shutdown_grace_s: float = setting(
        "DEADSURE_SHUTDOWN_GRACE_S", 60.0, "how long running jobs may go on after SIGTERM before they are released"
    )
    payload_limit: int = setting("DEADSURE_PAYLOAD_LIMIT", 65536, "largest payload in bytes of JSON")
    mail_from: str = setting("DEADSURE_MAIL_FROM", "noreply@localhost", "address that mails are sent from")
    call_timeout_s: float = setting(
        "DEADSURE_CALL_TIMEOUT_S", 10.0, "longest silence of a mail server or payment service during a call"
    )
    submit_timeout_s: float = setting("DEADSURE_SUBMIT_TIMEOUT_S", 10.0, "longest a submit may wait for the database")
    pooled: bool = setting("DEADSURE_POOLED", False, "sessions go through a pooler: only the lease proves death")
    metrics_port: int | None = setting(
        "DEADSURE_METRICS_PORT", None, "port that Prometheus scrapes; 0 takes a free one and logs it, unset is off", int
    )
    metrics_host: str = setting("DEADSURE_METRICS_HOST", "127.0.0.1", "address that the metrics are served on")
    metrics_refresh_s: float = setting(
        "DEADSURE_METRICS_REFRESH_S", 5.0, "how old the database's figures may be in a scrape"
    )
    retention_succeeded: Age = setting(
        "DEADSURE_RETENTION_SUCCEEDED", Age("30d"), "how long `deadsure prune` keeps succeeded jobs"
    )
    retention_cancelled: Age = setting(
        "DEADSURE_RETENTION_CANCELLED", Age("30d"), "how long `deadsure prune` keeps cancelled jobs"
    )
    retention_journal: Age = setting(
        "DEADSURE_RETENTION_JOURNAL", Age("30d"), "how long it keeps journal rows whose job is gone"
    )
    retention_dead_letters: Age = setting(
        "DEADSURE_RETENTION_DEAD_LETTERS", Age("90d"), "how long it keeps dead letters of jobs that have ended"
    )
    retention_replay_runs: Age = setting(
        "DEADSURE_RETENTION_REPLAY_RUNS", Age("90d"), "how long it keeps the records of replays in stages"
    )
    retention_batches: Age = setting(
        "DEADSURE_RETENTION_BATCHES", Age("90d"), "how long it keeps ended batches whose jobs are gone"
    )
    retention_workers: Age = setting("DEADSURE_RETENTION_WORKERS", Age("7d"), "how long it keeps workers that are gone")
    retention_tombstones: Age = setting(
        "DEADSURE_RETENTION_TOMBSTONES", Age("never"), "how long the key of a pruned job stays taken"
    )
    retention_keyless: Age = setting(
        "DEADSURE_RETENTION_KEYLESS", Age("30d"), "how long a pruned job without a key still answers for its id"
    )
    log: str = setting("DEADSURE_LOG", "auto", "json, console, or auto (console on a terminal)")
    log_level: str = setting("DEADSURE_LOG_LEVEL", "INFO", "least level that is logged")

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name == "metrics_port":
                if value is not None and value not in PORTS:
                    raise ConfigurationError(f"DEADSURE_METRICS_PORT={value}: write a port, 0 to 65535")
                continue
            if isinstance(value, int | float) and not isinstance(value, bool | Age) and not 0 < value < math.inf:
                raise ConfigurationError(f"{entry.metadata['name']}={value}: must be a number above 0")
        values = {f.metadata["name"]: getattr(self, f.name) for f in fields(self)}
        settings_rules.check(values.__getitem__)
        if self.log_level.upper() not in LEVELS:
            raise ConfigurationError(f"DEADSURE_LOG_LEVEL={self.log_level!r}: write one of {', '.join(LEVELS)}")
        if self.log not in ("json", "console", "auto"):
            raise ConfigurationError(f"DEADSURE_LOG={self.log!r}: write json, console or auto")
        if self.mail_from.count("@") != 1 or not self.mail_from.isascii() or not self.mail_from.isprintable():
            raise ConfigurationError(f"DEADSURE_MAIL_FROM={self.mail_from!r}: write one plain address, name@domain")

    @classmethod
    def describe(cls) -> list[tuple[str, str, str]]:
        """(environment variable, default, what it is) for each setting."""
        return [
            (f.metadata["name"], "" if f.default is None else str(f.default), f.metadata["doc"]) for f in fields(cls)
        ]

    def need_database(self) -> str:
        """The database URL; raises ConfigurationError with the next step when it is missing or unusable."""
        if not self.database_url:
            raise ConfigurationError(
                "DATABASE_URL is not set: for development run `make services`, then `. var/dev.env`; "
                "to look around first run `make demo`"
            )
        try:
            return checked(self.database_url)
        except DatabaseUrlError as error:
            raise ConfigurationError(str(error)) from None

    def need_broker(self) -> str:
        """The broker URL; raises ConfigurationError with the next step when it is missing or unknown."""
        if not self.broker_url:
            raise ConfigurationError("BROKER_URL is not set: for development run `make services`, then `. var/dev.env`")
        scheme, found, _ = self.broker_url.partition("://")
        if not found or scheme not in BROKER_SCHEMES:
            begins = f"BROKER_URL starts with {scheme!r}" if found else "BROKER_URL has no scheme"
            raise ConfigurationError(f"{begins}: write amqp://… (RabbitMQ) or redis://… (Redis/Valkey)")
        return self.broker_url

    @property
    def broker_is_amqp(self) -> bool:
        """Whether the broker has a dead-letter exchange and a `redelivered` flag that can be trusted."""
        return self.broker_url.startswith("amqp")


def read(environ: Mapping[str, str]) -> Settings:
    """Settings from an environment; raises ConfigurationError naming the variable that is wrong."""
    known = {f.metadata["name"]: f for f in fields(Settings)}
    for name in environ:
        if name.startswith("DEADSURE_") and name not in known:
            raise ConfigurationError(f"{name} is no setting of Deadsure: `deadsure settings` lists them all")
    values: dict[str, Any] = {}
    for name, entry in known.items():
        text = environ.get(name)
        if text is None or text == "":
            continue
        try:
            values[entry.name] = convert(text, entry.metadata["kind"])
        except ValueError as error:
            kind = entry.metadata["kind"]
            raise ConfigurationError(f"{name}={text!r} is no {getattr(kind, 'EXPECTED', kind.__name__)}") from error
    return Settings(**values)


def convert(text: str, kind: type) -> Any:
    """`text` as a `kind`; raises ValueError."""
    if kind is bool:
        if text.lower() not in ("1", "0", "true", "false", "yes", "no"):
            raise ValueError(text)
        return text.lower() in ("1", "true", "yes")
    return kind(text)


@lru_cache(maxsize=8)
def checked(url: str) -> str:
    """`check_url`, once for each URL: every submit asks."""
    return check_url(url)


@lru_cache(maxsize=1)
def settings() -> Settings:
    """The settings of this process, read once."""
    return read(os.environ)
