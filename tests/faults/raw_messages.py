"""Messages as no client of ours would send them: any bytes, headers and properties, on either broker."""

from __future__ import annotations

import gzip
import json
import pickle
import uuid
from dataclasses import dataclass, field
from typing import Any

from celery import Celery
from kombu import Connection

from tasks.headers import COPY, EPISODE, VERSION
from tasks.topology import work_queue
from tests.nodes.servers import BrokerNode

PRIVATE = "name-of-a-customer"  # stands in many bodies: no log, no reason may show it
JSON, UTF8 = "application/json", "utf-8"


def body(*parts: Any) -> bytes:
    """A body of JSON parts; by default what protocol 2 wants."""
    return json.dumps(parts or ([], {"n": 1}, {"callbacks": None, "errbacks": None, "chain": None})).encode()


GOOD = body([], {"n": 1, "note": PRIVATE}, None)


def envelope(task: Any = "tests.foreign", **changed: Any) -> dict[str, Any]:
    """Headers of protocol 2 with a task id of their own; None leaves one out."""
    found = {"task": task, "id": str(uuid.uuid4()), "lang": "py", **changed}
    return {name: value for name, value in found.items() if value is not None}


def our_headers(task: str, job_id: object, *, copy: int = 1, episode: int = 1, version: int = 1) -> dict[str, Any]:
    """Headers as the relay writes them."""
    return envelope(task, id=str(job_id), **{COPY: copy, EPISODE: episode, VERSION: version})


@dataclass(frozen=True)
class Raw:
    """One message."""

    body: bytes = GOOD
    headers: dict[str, Any] = field(default_factory=envelope)
    content_type: str | None = JSON
    content_encoding: str | None = UTF8


def send(broker: BrokerNode, *messages: Raw, queue: str = "jobs") -> None:
    """Publish them to a queue, which is declared if need be."""
    with Connection(broker.url) as connection:
        channel = connection.default_channel
        work_queue(queue, broker.is_rabbitmq)(channel).declare()
        for raw in messages:
            made = channel.prepare_message(
                raw.body,
                content_type=raw.content_type,
                content_encoding=raw.content_encoding,
                headers=raw.headers,
                properties={"delivery_mode": 2},
            )
            channel.basic_publish(made, exchange="", routing_key=queue)


def stranger(broker: BrokerNode) -> Celery:
    """Somebody else's Celery: it has the broker and nothing of ours."""
    made = Celery("elsewhere", broker=broker.url, set_as_current=False)
    made.conf.task_default_queue = "jobs"
    made.conf.task_create_missing_queues = False
    made.conf.task_queues = [work_queue("jobs", broker.is_rabbitmq)]
    return made


class RunsCode:
    """Unpickling it creates a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


def broken(trap: str) -> dict[str, Raw]:
    """C08 to C10, by name: `trap` is a file that appears when a payload's code runs."""
    deep = b"[" * 100_000 + b"]" * 100_000
    python = f"!!python/object/apply:builtins.open [{trap!r}, 'w']".encode()
    task_table = {"name": "tests.foreign"}
    return {
        "C08 broken JSON": Raw(f'[[], {{"n": "{PRIVATE}"'.encode()),
        "C08 broken UTF-8": Raw(b'[[], {"note": "\xff\xfe\xc3 ' + PRIVATE.encode() + b'"}, null]'),
        "C08 lone continuation, latin-1": Raw(b"[[], {}, null] \xe9", content_encoding="latin-1"),
        "C08 utf-16": Raw(GOOD.decode().encode("utf-16"), content_encoding="utf-16"),
        "C08 bad gzip": Raw(b"\x1f\x8b no gzip " + PRIVATE.encode(), envelope(compression="application/x-gzip")),
        "C08 good gzip": Raw(gzip.compress(GOOD, mtime=0), envelope(compression="gzip")),
        "C08 unknown compression": Raw(headers=envelope(compression="rot13")),
        "C08 nested 100,000 deep": Raw(deep),
        "C08 nested deep in the arguments": Raw(b"[[" + deep + b"], {}, null]"),
        "C08 number of 5,000 digits": Raw(b"[[], {" + b'"n": ' + b"9" * 5000 + b"}, null]"),
        "C08 no content type": Raw(content_type=None),
        "C08 wrong content type": Raw(content_type="text/plain"),
        "C08 application/data": Raw(content_type="application/data", content_encoding="binary"),
        "C08 unknown content type": Raw(content_type="application/x-\u2603"),
        "C08 no content encoding": Raw(content_encoding=None),
        "C08 unknown content encoding": Raw(content_encoding="klingon"),
        "C08 wrong content type, no task": Raw(headers={}, content_type="text/plain"),
        "C08 oversized": Raw(body([], {"note": PRIVATE + "x" * (1 << 20)}, None)),
        "C09 null": Raw(b"null"),
        "C09 a number": Raw(b"5"),
        "C09 a text": Raw(b'"abc"'),
        "C09 an empty list": Raw(b"[]"),
        "C09 two parts": Raw(b"[[],{}]"),
        "C09 four parts": Raw(body([], {}, None, PRIVATE)),
        "C09 empty": Raw(b""),
        "C09 keyword arguments in a list": Raw(body([], [["n", 1]], None)),
        "C09 arguments in a map": Raw(body({"n": 1}, {}, None)),
        "C09 options in a list": Raw(body([], {}, [1])),
        "C09 no headers": Raw(headers={}),
        "C09 no id": Raw(headers=envelope(id=None)),
        "C09 id is a number": Raw(headers=envelope(id=5)),
        "C09 id is a table": Raw(headers=envelope(id={"a": 1})),
        "C09 id is no UUID": Raw(headers=envelope(id="not-a-uuid")),
        "C09 id is long": Raw(headers=envelope(id="x" * 300)),
        "C09 task is a table": Raw(headers=envelope(task_table)),
        "C09 task is a list": Raw(headers=envelope(["tests.foreign"])),
        "C09 task is empty": Raw(headers=envelope("")),
        "C09 task is long": Raw(headers=envelope("t" * 10_000)),
        "C09 timelimit is a text": Raw(headers=envelope(timelimit="soon")),
        "C09 timelimit is a number": Raw(headers=envelope(timelimit=7)),
        "C09 timelimit of texts": Raw(headers=envelope(timelimit=["a", "b"])),
        "C09 timelimit of one": Raw(headers=envelope(timelimit=[1])),
        "C09 timelimit is negative": Raw(headers=envelope(timelimit=[-1, -1])),
        "C09 eta is no time": Raw(headers=envelope(eta="tomorrow, " + PRIVATE)),
        "C09 eta is a table": Raw(headers=envelope(eta={"year": 2030})),
        "C09 eta in the year 9999": Raw(headers=envelope(eta="9999-12-31T23:59:59+00:00")),
        "C09 expires is a list": Raw(headers=envelope(expires=[1])),
        "C09 retries is a text": Raw(headers=envelope(retries="many")),
        "C09 root_id is a table": Raw(headers=envelope(root_id={"a": 1})),
        "C09 stamps is a list": Raw(headers=envelope(stamps=[1])),
        "C09 stamped_headers is a text": Raw(headers=envelope(stamped_headers="abc")),
        "C09 our copy is a text": Raw(headers=envelope(**{COPY: PRIVATE})),
        "C09 our copy is a table": Raw(headers=envelope(**{COPY: {"a": 1}})),
        "C09 our copy is negative": Raw(headers=envelope(**{COPY: -1})),
        "C09 our copy is huge": Raw(headers=envelope(**{COPY: 2**62, EPISODE: 2**62, VERSION: 1})),
        "C09 our episode is a text": Raw(headers=envelope(**{COPY: 1, EPISODE: "first", VERSION: 1})),
        "C09 our version is a table": Raw(headers=envelope(**{COPY: 1, EPISODE: 1, VERSION: {"a": 1}})),
        "C09 our version is a list": Raw(headers=envelope(**{COPY: 1, EPISODE: 1, VERSION: [1]})),
        "C09 our headers, no job id": Raw(headers=envelope(id="abc", **{COPY: 1, EPISODE: 1, VERSION: 1})),
        "C09 absurd headers": Raw(headers={**{f"h{n}": "x" * 500 for n in range(120)}, "a": {"b": {"c": [{}] * 50}}}),
        "C09 NUL and control characters": Raw(headers=envelope("tests.\x00foreign", note="\x00\x1b[2J")),
        "C09 protocol 1": Raw(
            json.dumps({"task": "tests.foreign", "id": str(uuid.uuid4()), "args": [], "kwargs": {"n": 1}}).encode(), {}
        ),
        "C10 pickle": Raw(pickle.dumps(RunsCode(trap)), content_type="application/x-python-serialize"),
        "C10 pickle, said to be JSON": Raw(pickle.dumps(RunsCode(trap)), content_encoding="binary"),
        "C10 pickle, no content type": Raw(pickle.dumps(RunsCode(trap)), content_type=None, content_encoding=None),
        "C10 YAML": Raw(python, content_type="application/x-yaml"),
        "C10 a Python class": Raw(body([], {"n": {"__type__": "builtins.open", "__value__": [trap, "w"]}}, None)),
        "C10 a class in the options": Raw(body([], {}, {"callbacks": [{"py/object": "builtins.open"}]})),
        "C10 an unknown tag": Raw(body([], {"n": {"__type__": [], "__value__": 1}}, None)),
    }
