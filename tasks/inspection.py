"""Is this message fit for Celery's request machinery? A look at the envelope before Celery takes one.

Celery acknowledges some broken messages away, runs others without their arguments, and dies of a third kind. Nothing
that fails here reaches it: the consumer dead-letters the message, and the intake keeps it with the same reason.
Reasons name the field, never its content.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from kombu import compression

from app.job_types import COALESCE_LIMIT
from tasks.headers import COPY, EPISODE, JOBS, NO_ENVELOPE, VERSION

BODY = json.dumps([[], {}, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}])
BODY_BYTES = BODY.encode()
BODY_LIMIT = 1 << 20
NAME_LIMIT = 255
JSON_TYPE = "application/json"
UTF8 = ("utf-8", "utf8", "us-ascii")
LATEST_YEAR = 3000
LONGEST_S = 1e9
PAIR, PROTOCOL_2 = 2, 3
HIGHEST = 9


def complaint(  # noqa: PLR0911  # one return per complaint
    headers: Any, body: Any, content_type: Any, content_encoding: Any
) -> str | None:
    """Why the message cannot be read, or None. A body that is our own constant needs no parsing."""
    if not isinstance(headers, Mapping):
        return "the headers are no table"
    if NO_ENVELOPE in headers:
        return "the entry of the list is no message"
    if not isinstance(name := headers.get("task"), str) or not 0 < len(name) <= NAME_LIMIT:
        return "header task is missing or no name (protocol 1 is not accepted)"
    if not is_id(headers.get("id")):
        return "header id is missing or no task id"
    if COPY in headers and not is_uuid(headers["id"]):
        return "header id is no job id"
    if headers.get("compression"):
        return "compressed bodies are not accepted"
    if (wrong := wrong_header(headers)) is not None:
        return f"header {wrong} is not what Celery's protocol says"
    if content_type != JSON_TYPE:
        return "content type is not application/json"
    if not isinstance(content_encoding, str) or content_encoding.lower() not in UTF8:
        return "content encoding is not utf-8"
    if COPY in headers and (wrong := not_a_wake_up(headers, body)) is not None:
        return wrong
    if body in (BODY_BYTES, BODY):
        return None
    return body_complaint(body)


def not_a_wake_up(headers: Mapping[str, Any], body: Any) -> str | None:
    """Why a message with our own headers is not ours: a wake-up call has no content, and waits for nothing."""
    if body not in (BODY_BYTES, BODY):
        return "the body is not that of a wake-up call"
    for name in ("eta", "expires", "group"):
        if headers.get(name) is not None:
            return f"header {name} does not belong to a wake-up call"
    if JOBS in headers and not is_group(headers):
        return f"header {JOBS} does not list the jobs of a delivery"
    return None


def is_group(headers: Mapping[str, Any]) -> bool:
    """Whether the jobs of a coalesced delivery are listed as the relay lists them: distinct, its own id first."""
    jobs = headers[JOBS]
    if not (isinstance(jobs, list | tuple) and 1 < len(jobs) <= COALESCE_LIMIT):
        return False
    if not all(isinstance(job_id, str) and is_uuid(job_id) for job_id in jobs):
        return False
    return jobs[0] == headers["id"] and len({uuid.UUID(job_id) for job_id in jobs}) == len(jobs)


def jobs_of(headers: Mapping[str, Any]) -> list[uuid.UUID]:
    """The jobs of a message that `complaint` has passed."""
    return [uuid.UUID(job_id) for job_id in headers.get(JOBS) or [headers["id"]]]


def wrong_header(headers: Mapping[str, Any]) -> str | None:
    """The first optional header with a value that Celery would stumble over."""
    limits = headers.get("timelimit")
    if limits is not None and not (
        isinstance(limits, list | tuple) and len(limits) == PAIR and all(is_limit(limit) for limit in limits)
    ):
        return "timelimit"
    for name in ("eta", "expires"):
        if headers.get(name) is not None and not is_time(headers[name]):
            return name
    for name in ("retries", COPY, EPISODE, VERSION):
        if headers.get(name) is not None and not is_counter(headers[name]):
            return name
    for name in ("root_id", "parent_id", "group", "shadow", "argsrepr", "kwargsrepr", "origin", "reply_to"):
        if not isinstance(headers.get(name), str | None):
            return name
    for name, kinds in (("stamps", Mapping), ("stamped_headers", list | tuple), ("delivery_info", Mapping)):
        if not isinstance(headers.get(name), kinds | None):
            return name
    return None


def body_complaint(body: Any) -> str | None:  # noqa: PLR0911  # one return per complaint
    """Why the body is no `[args, kwargs, embed]` of protocol 2."""
    if not isinstance(body, bytes | bytearray | memoryview | str):
        return "the body is no text"
    raw = body.encode(errors="surrogatepass") if isinstance(body, str) else bytes(body)
    if len(raw) > BODY_LIMIT:
        return f"the body has more than {BODY_LIMIT} bytes"
    try:
        parsed = json.loads(raw.decode())
    except (ValueError, RecursionError) as error:
        return f"the body is no JSON ({type(error).__name__})"
    if not (isinstance(parsed, list) and len(parsed) == PROTOCOL_2):
        return "the body is no list of arguments, keyword arguments and options"
    args, kwargs, embed = parsed
    if not isinstance(args, list):
        return "the arguments are no list"
    if not isinstance(kwargs, dict):
        return "the keyword arguments are no map"
    if not isinstance(embed, dict | None):
        return "the options are no map"
    return None


def body_bytes(body: Any) -> bytes:
    """The bytes of a body, whatever the transport made of it."""
    if isinstance(body, bytes | bytearray | memoryview):
        return bytes(body)
    return str(body).encode(errors="replace")


def never_decompress() -> None:
    """In a worker or an intake: kombu would unpack a body, a bomb too, before anything of ours has looked at it."""
    compression._decoders.clear()  # noqa: SLF001  # there is no public way; an unknown one is a decode error


def is_id(value: Any) -> bool:
    """A task id: short text without control characters."""
    return isinstance(value, str) and 0 < len(value) <= NAME_LIMIT and value.isprintable()


def is_uuid(value: str) -> bool:
    """Whether `value` can be a job id."""
    try:
        uuid.UUID(value)
    except ValueError:
        return False
    return True


def is_counter(value: Any) -> bool:
    """A number that the journal's columns can hold."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


def is_of_a_job(headers: Mapping[str, Any]) -> bool:
    """Whether a message, readable or not, names a job and the copy of its message as we do."""
    job_id = headers.get("id")
    return isinstance(job_id, str) and is_uuid(job_id) and is_counter(headers.get(COPY))


def is_limit(value: Any) -> bool:
    """A time limit: nothing, or a positive number of seconds."""
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < LONGEST_S)


def is_time(value: Any) -> bool:
    """An ISO 8601 time that a calendar can hold; Celery writes nothing else."""
    if not isinstance(value, str):
        return False
    try:
        return datetime.fromisoformat(value).year < LATEST_YEAR
    except ValueError:
        return False


def priority_of(properties: Mapping[str, Any], own: int, *, amqp: bool) -> int:
    """The priority (0 to 9, 9 first) that a client asked for; its job type's `own` where it asked for none.

    Redis/Valkey serves 0 first, and 0 is what a message without a priority has: there one can only ask for less.
    """
    asked = properties.get("priority")
    if not isinstance(asked, int) or isinstance(asked, bool) or asked < 0:
        return own
    return min(asked, HIGHEST) if amqp else min(own, HIGHEST - min(asked, HIGHEST))


def time_of(value: str | None) -> datetime | None:
    """The time in a header that `is_time` has passed; without a zone it is UTC, as Celery means it."""
    if value is None:
        return None
    at = datetime.fromisoformat(value)
    return at if at.tzinfo else at.replace(tzinfo=UTC)
