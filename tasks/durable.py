"""The durable task: `apply_async` submits a job, a delivery runs one attempt of it. No SQL here."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, NoReturn, ParamSpec

from celery import Task
from celery.result import AsyncResult
from pydantic import BaseModel
from sqlalchemy.orm import Session

from app import attempt, coalesced, submit, tracing
from app.attempt import Handler
from app.errors import TransientError, UnsupportedOption
from app.failures import Classifier, Failure, known
from app.job import Job, current
from app.job_types import JobType, find, register
from app.settings import settings
from app.submit import NewJob, Submitted
from app.tracing import HEADER, is_traceparent
from tasks import eager
from tasks.application import app
from tasks.delivery import deliveries_of
from tasks.endings import tell, tell_all
from tasks.headers import VERSION
from tasks.services import seat, watch
from tasks.topology import work_queue

P = ParamSpec("P")


class DurableTask(Task):
    """One job type as a Celery task. Its messages carry no arguments: they wake up a job by its id."""

    Request = "tasks.delivery:DurableRequest"
    ignore_result = True  # the job row is the result; nothing is stored a second time
    resultrepr_maxsize = 1 << 18  # the endings of a coalesced delivery, told to the main process
    acks_late = True
    reject_on_worker_lost = True
    typing = False
    max_retries = None
    job_type: JobType

    def run(self, *_args: Any, **_kwargs: Any) -> Any:
        """Run one attempt for the delivery at hand; Celery settles it after the result is durable."""
        if self.request.called_directly:
            raise UnsupportedOption(f"{self.name}: a durable task is not called directly; use .delay() or .submit()")
        job_type = find(self.name, self.request.get(VERSION))
        here = seat()
        first, *others = deliveries_of(self.request)
        here.clock.deliver()
        try:
            if others:
                return tell_all(coalesced.run(here, [first, *others], job_type, watch()))
            return tell(attempt.run(here, first, job_type))
        finally:
            here.clock.end()

    def apply(self, *_args: Any, **_options: Any) -> Any:
        """Refused: without a worker there is no lease. For tests set `task_always_eager` and use `.delay()`."""
        raise UnsupportedOption(
            f"{self.name}: apply() is not supported on a durable task; for tests set task_always_eager and use .delay()"
        )

    def retry(
        self, *_args: Any, countdown: float | None = None, exc: BaseException | None = None, **options: Any
    ) -> NoReturn:
        """Celery's `self.retry` inside a handler: the same as `job.retry`; the job type's policy sets the limit."""
        refuse(self.name, options)
        job = current.get()
        if job is None:
            raise UnsupportedOption(f"{self.name}: retry() is for the handler of a running job")
        raise TransientError("the handler asked for another try", retry_after_s=countdown) from exc

    def apply_async(
        self,
        args: Iterable[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        task_id: str | None = None,
        *,
        countdown: float | None = None,
        eta: datetime | None = None,
        expires: float | datetime | None = None,
        priority: int | None = None,
        idempotency_key: str | None = None,
        scope: str = "",
        correlation_id: str | None = None,
        traceparent: str | None = None,
        headers: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> AsyncResult:
        """Submit a job in a transaction of its own, or in the finishing transaction when a handler calls.

        `countdown` in seconds; `eta` with a time zone; `expires` (seconds, or a time with zone): not started after it,
        then REVOKED; `priority` 0 to 9, 9 first. `correlation_id` and `traceparent` (W3C; or the header of that name)
        go with the job into the log lines of its handler, and to its children; without them they are the calling job's,
        or that of OpenTelemetry's present span. Raises pydantic.ValidationError,
        PayloadTooLarge, IdempotencyConflict, UnsupportedOption; psycopg2.OperationalError when the database is away.
        """
        refuse(self.name, {**options, "headers": {k: v for k, v in (headers or {}).items() if k not in PROPAGATED}})
        parent = current.get()
        if idempotency_key is None and parent is not None and self.job_type.key is None:
            idempotency_key = parent.child_key(self.name)
        job = self.prepare(
            self.fields(args or (), kwargs or {}),
            idempotency_key=idempotency_key,
            scope=scope,
            priority=priority,
            countdown_s=countdown,
            eta=eta,
            expires=expires,
            job_id=own_id(self.name, task_id) if task_id else None,
            **lineage(parent, correlation_id, traceparent or in_headers(headers)),
        )
        if parent is not None:
            parent.outgoing.append(job)
        else:
            answer = submit.alone(job)
            if app.conf.task_always_eager and answer.created:
                eager.run(job)
        return AsyncResult(str(job.job_id), app=app, task_name=self.name)

    def submit(
        self,
        session: Session,
        *,
        idempotency_key: str | None = None,
        scope: str = "",
        priority: int | None = None,
        countdown: float | None = None,
        eta: datetime | None = None,
        expires: float | datetime | None = None,
        **payload: Any,
    ) -> Submitted:
        """Submit a job in the caller's transaction: it exists when, and only when, `session` commits."""
        job = self.prepare(
            payload,
            idempotency_key=idempotency_key,
            scope=scope,
            priority=priority,
            countdown_s=countdown,
            eta=eta,
            expires=expires,
            **lineage(current.get()),
        )
        refuse_eager(self.name)
        return submit.in_session(session, [job])[0]

    def submit_many(
        self,
        session: Session,
        payloads: Iterable[Mapping[str, Any]],
        *,
        keys: Iterable[str] | None = None,
        scope: str = "",
        scopes: Iterable[str] | None = None,
        priority: int | None = None,
        countdown: float | None = None,
        eta: datetime | None = None,
        expires: float | datetime | None = None,
    ) -> list[Submitted]:
        """Submit many jobs in the caller's transaction; `keys` and `scopes` give each payload its own, in order.

        Every payload is validated before the first row is written.
        """
        refuse_eager(self.name)
        listed = list(payloads)
        each_key = list(keys) if keys is not None else [None] * len(listed)
        each_scope = list(scopes) if scopes is not None else [scope] * len(listed)
        if not len(each_key) == len(each_scope) == len(listed):
            raise ValueError(
                f"{self.name}: {len(each_key)} keys and {len(each_scope)} scopes for {len(listed)} payloads"
            )
        origin = lineage(current.get())
        jobs = [
            self.prepare(
                payload,
                idempotency_key=key,
                scope=its_scope,
                priority=priority,
                countdown_s=countdown,
                eta=eta,
                expires=expires,
                **origin,
            )
            for payload, key, its_scope in zip(listed, each_key, each_scope, strict=True)
        ]
        return submit.in_session(session, jobs)

    def prepare(self, payload: Mapping[str, Any], **terms: Any) -> NewJob:
        """A validated job of this type's newest version, not yet written."""
        job_type = find(self.name)
        return submit.prepare(job_type, job_type.parse(payload), **terms)

    def fields(self, args: Iterable[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Positional arguments by the order of the payload's fields, and keyword arguments."""
        names = list(self.job_type.payload.model_fields)
        values = list(args)
        if len(values) > len(names):
            raise TypeError(f"{self.name} takes at most {len(names)} positional arguments, {len(values)} were given")
        named = dict(zip(names, values, strict=False))
        if twice := named.keys() & kwargs.keys():
            raise TypeError(f"{self.name}: {', '.join(sorted(twice))} was given twice")
        return {**named, **kwargs}


def lineage(parent: Job | None, correlation_id: str | None = None, traceparent: str | None = None) -> dict[str, Any]:
    """Parent, correlation id and trace context of a new job: the caller's word, then what is known of the call."""
    return {
        "parent_id": parent.job_id if parent else None,
        "correlation_id": correlation_id or (parent.correlation_id if parent else None),
        "trace_context": traceparent or tracing.of_child(parent.trace_context if parent else None),
    }


def in_headers(headers: Mapping[str, Any] | None) -> str | None:
    """The traceparent of Celery-style headers; None when it is not valid, as the standard asks."""
    found = (headers or {}).get(HEADER)
    return found if is_traceparent(found) else None


def refuse_eager(name: str) -> None:
    """Raise UnsupportedOption in eager mode: a job cannot run before its caller's session has committed."""
    if app.conf.task_always_eager:
        raise UnsupportedOption(
            f"{name}: task_always_eager cannot run a job before the session commits, so nothing was submitted; "
            "use .delay() there"
        )


def own_id(name: str, task_id: str) -> uuid.UUID:
    """The caller's own task id as a job id; raises ValueError that says what is needed."""
    try:
        return uuid.UUID(task_id)
    except ValueError:
        raise ValueError(f"{name}: task_id={task_id!r} is no UUID; for a key of your own use idempotency_key") from None


# What Celery itself passes along, and what changes nothing for a durable job.
HARMLESS = frozenset({"ignore_result", "shadow", "producer", "connection", "retry", "retry_policy"})
# Headers of the message that a durable task knows: the last two are accepted with the first, and stay behind.
PROPAGATED = frozenset({HEADER, "tracestate", "baggage"})
# Named first in a refusal: who wrote a chain does not recognise what else Celery passes with it.
COMPOSITE = ("chain", "chord", "group_id", "link", "link_error")


def refuse(name: str, options: Mapping[str, Any]) -> None:
    """Raise UnsupportedOption for an option that a durable task would not honour."""
    for option in sorted(options, key=lambda option: option not in COMPOSITE):
        value = options[option]
        if option not in HARMLESS and value not in (None, [], {}, ()):
            raise UnsupportedOption(
                f"{name}: apply_async({option}=…) is not supported on a durable task, so nothing was submitted"
            )


def only(errors: tuple[type[BaseException], ...]) -> Classifier:
    """A classifier that tries these errors again, and quarantines at once what nobody knows."""

    def classify(error: BaseException) -> Failure | None:
        if isinstance(error, errors):
            return Failure.TRANSIENT
        return None if known(error) else Failure.PERMANENT

    return classify


def durable(
    name: str,
    *,
    payload: type[BaseModel],
    autoretry_for: tuple[type[BaseException], ...] = (),
    bind: bool = True,  # noqa: ARG001  # accepted for code that comes from plain Celery
    **terms: Any,
) -> Callable[[Handler], DurableTask]:
    """Put a handler `(job, payload) -> JSON or None` on the allowlist and make it a Celery task.

    `terms` are the fields of `app.job_types.JobType`: version, mode, queue, time_limit_s, retry, key, … `autoretry_for`
    is Celery's: only these errors (and those that the defaults call transient) are tried again. `bind` changes nothing:
    the handler always gets its job.
    """
    if autoretry_for:
        terms.setdefault("classify", only(autoretry_for))
    job_type = register(JobType(name=name, payload=payload, **terms))

    def wrap(handler: Handler) -> DurableTask:
        attempt.HANDLERS[job_type.name, job_type.version] = handler
        if job_type.queue not in app.amqp.queues:
            app.amqp.queues.add(work_queue(job_type.queue, settings().broker_is_amqp or not settings().broker_url))
        known: DurableTask | None = app.tasks.get(name)
        if known is not None:
            if job_type.version > known.job_type.version:
                known.job_type = job_type
            return known
        task = type(
            handler.__name__,
            (DurableTask,),
            {
                "name": name,
                "job_type": job_type,
                "time_limit": job_type.time_limit_s,
                "soft_time_limit": job_type.soft_time_limit_s,
                "__module__": handler.__module__,
                "__doc__": handler.__doc__,
            },
        )()
        registered: DurableTask = app.register_task(task)
        return registered

    return wrap
