"""Celery's `beat_schedule` read: which entries are durable jobs, which are plain tasks, and which are wrong.

A wrong entry is told by name and left out; it must not stop the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, tzinfo
from functools import partial
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from celery import Celery
from celery.beat import BeatLazyFunc
from celery.schedules import crontab, maybe_schedule, schedule
from pydantic import ValidationError

from app.errors import ConfigurationError, DeadsureError, invalid
from app.job_types import find
from app.periodic import CatchUp, Entry, FromTick
from app.ticks import Crontab, Every, Ticks
from tasks.durable import DurableTask

OPTIONS = ("catch_up", "timezone", "idempotency_key", "scope", "priority", "countdown", "expires")
TERMS = {"scope": "scope", "priority": "priority", "countdown": "countdown_s", "expires": "expires"}
ELSEWHERE = ("queue", "exchange", "routing_key")  # a plain task for workers of another application


@dataclass
class Schedule:
    """The entries of a `beat_schedule`; `wrong` says why an entry is left out, by name."""

    durable: list[Entry] = field(default_factory=list)
    plain: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)


def read(app: Celery) -> Schedule:
    """The schedule of the application; raises nothing, whatever stands in an entry."""
    found = Schedule()
    for name, conf in app.conf.beat_schedule.items():
        try:
            task = known_task(app, conf)
            if isinstance(task, DurableTask):
                found.durable.append(durable(app, str(name), task, conf))
            else:
                found.plain[name] = conf
        except ValidationError as error:
            found.wrong[name] = invalid(error)
        except KeyError as error:
            found.wrong[name] = f"{error} is missing"
        except (DeadsureError, TypeError, ValueError) as error:
            found.wrong[name] = str(error)
        except Exception as error:  # noqa: BLE001  # a function of the user's, called for a try
            found.wrong[name] = f"it cannot be made into a job ({type(error).__name__})"
    return found


def known_task(app: Celery, conf: Mapping[str, Any]) -> Any:
    """The task of an entry, None for one of another application; raises ConfigurationError for a name nobody has."""
    task = app.tasks.get(conf["task"])
    if task is None and not any((conf.get("options") or {}).get(option) for option in ELSEWHERE):
        raise ConfigurationError(
            f"no task {conf['task']!r} is registered here; import its module in tasks/__init__.py, "
            "or name the queue of the workers that have it in `options`"
        )
    return task


def durable(app: Celery, name: str, task: DurableTask, conf: Mapping[str, Any]) -> Entry:
    """The entry of a durable job, tried with its next tick; raises what is wrong with it."""
    options = dict(conf.get("options") or {})
    for option, value in options.items():
        if option not in OPTIONS and value not in (None, [], {}, ()):
            raise ConfigurationError(f"option {option!r} is not for a periodic job; it takes {', '.join(OPTIONS)}")
    zone = zone_of(app, options.get("timezone"))
    entry = Entry(
        name=name,
        job_type=find(task.name),
        ticks=ticks_of(app, conf, zone),
        zone=zone,
        catch_up=policy(options.get("catch_up", CatchUp.LAST)),
        fields={
            field_name: FromTick(partial(late, value)) if isinstance(value, BeatLazyFunc) else value
            for field_name, value in task.fields(conf.get("args") or (), conf.get("kwargs") or {}).items()
        },
        terms={ours: options[theirs] for theirs, ours in TERMS.items() if options.get(theirs) is not None},
        key=key_of(options.get("idempotency_key")),
    )
    tick = entry.ticks.after(datetime.now(UTC))
    if tick is None:
        raise ConfigurationError(f"{entry.schedule} has no tick in forty years")
    entry.job(tick)
    return entry


def late(value: BeatLazyFunc, _tick: datetime) -> Any:
    """Celery's own way to fill in a value late; it knows no tick."""
    return value()


def ticks_of(app: Celery, conf: Mapping[str, Any], zone: tzinfo) -> Ticks:
    """The ticks of Celery's schedule; raises ConfigurationError for one whose ticks are not known beforehand."""
    found = maybe_schedule(conf["schedule"], app=app)
    if conf.get("relative") or getattr(found, "relative", False):
        raise ConfigurationError("relative=True is not for a periodic job: its ticks are multiples of the interval")
    if getattr(found, "nowfun", None) is not None:
        raise ConfigurationError("nowfun is not for a periodic job: its time is the database's")
    if type(found) is crontab:
        return Crontab(
            minutes=frozenset(found.minute),
            hours=frozenset(found.hour),
            days=frozenset(found.day_of_month),
            months=frozenset(found.month_of_year),
            weekdays=frozenset(found.day_of_week),
            zone=zone,
        )
    if type(found) is schedule and isinstance(found.run_every, timedelta):
        return Every(found.run_every)
    raise ConfigurationError(f"a periodic job takes a crontab or an interval, not {type(found).__name__}")


def zone_of(app: Celery, name: Any) -> tzinfo:
    """The time zone of an entry, by default the application's."""
    if name is None:
        zone: tzinfo = app.timezone
        return zone
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, TypeError, ValueError):
        raise ConfigurationError(f"timezone={name!r} is no time zone, as Europe/Berlin is one") from None


def policy(name: Any) -> CatchUp:
    """The catch-up policy of an entry."""
    try:
        return CatchUp(name)
    except ValueError:
        raise ConfigurationError(f"catch_up={name!r}: write one of {', '.join(CatchUp)}") from None


def key_of(found: Any) -> Callable[[datetime], str] | None:
    """The function that gives a tick its key; None for the natural one."""
    if found is not None and not callable(found):
        raise ConfigurationError("idempotency_key must be a function of the tick: a text would make all ticks one job")
    key: Callable[[datetime], str] | None = found
    return key
