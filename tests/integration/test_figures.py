"""The database's figures: right, bounded, cached, and absent when the database is."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from psycopg2.extensions import connection as PgConnection

from app.journal import log
from app.metrics import database, figures
from app.metrics.database import DatabaseFigures
from app.metrics.endpoint import Endpoint
from app.settings import Settings
from db.session import rows
from tests.integration.scene import Scene, kill_sessions
from tests.nodes.scrape import Scrape, fetch
from tests.nodes.waiting import wait_for

NOWHERE = "postgresql+psycopg2://nobody@127.0.0.1:9/nothing"
QUEUES = ["jobs", "mails"]


def read(scene: Scene, window: int = 100, trace_s: float = 60) -> dict[tuple[str, ...], float]:
    """(name, label values…) -> value of all figures."""
    found: dict[tuple[str, ...], float] = {}
    for family in figures.read(scene.eyes, QUEUES, window, trace_s):
        for sample in family.samples:
            found[sample.name, *sample.labels.values()] = sample.value
    return found


def age(scene: Scene, table: str, column: str, job_id: Any, seconds: float) -> None:
    rows(
        scene.eyes,
        f"UPDATE {table} SET {column} = clock_timestamp() - make_interval(secs => %s) WHERE job_id = %s",
        (seconds, str(job_id)),
    )


def test_an_empty_database_shows_zeros(scene: Scene) -> None:
    found = read(scene)
    assert set(found.values()) == {0}
    assert found["deadsure_outbox_lag_seconds", "mails"] == 0
    assert found["deadsure_jobs", "retry_wait"] == 0


def test_backlog_debts_and_ages(scene: Scene) -> None:
    unsent, sent, later = (scene.job(n=n) for n in range(3))
    age(scene, "outbox", "due_at", unsent, 100)
    scene.sent(sent)
    age(scene, "outbox", "due_at", sent, -30)
    age(scene, "jobs", "changed_at", sent, 500)
    age(scene, "outbox", "due_at", later, -3600)
    scene.change(later, not_before="2100-01-01")
    found = read(scene)
    assert found["deadsure_jobs", "queued"] == 3
    assert found["deadsure_outbox_debts", "jobs", "unsent"] == 1
    assert found["deadsure_outbox_debts", "jobs", "sent"] == 1
    assert found["deadsure_outbox_lag_seconds", "jobs"] == pytest.approx(100, abs=10)
    assert found["deadsure_oldest_waiting_age_seconds", "jobs"] == pytest.approx(500, abs=10)
    assert found["deadsure_outbox_lag_seconds", "mails"] == 0
    scene.claimed(scene.worker(), unsent)
    found = read(scene)
    assert (found["deadsure_jobs", "running"], found["deadsure_outbox_lag_seconds", "jobs"]) == (1, 0)


def test_a_resend_that_nobody_makes_is_a_lag(scene: Scene) -> None:
    job_id = scene.job()
    scene.sent(job_id)
    age(scene, "outbox", "due_at", job_id, 40)
    assert read(scene)["deadsure_outbox_lag_seconds", "jobs"] == pytest.approx(40, abs=10)


def test_counts_stop_at_their_bound(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "MOST", 3)
    for n in range(5):
        scene.job(n=n)
    found = read(scene)
    assert (found["deadsure_jobs", "queued"], found["deadsure_outbox_debts", "jobs", "unsent"]) == (3, 3)


def test_quarantine_causes_and_missing_traces(scene: Scene) -> None:
    worker = scene.worker()
    for cause in ("permanent", "permanent", "words of a later release"):
        holder = scene.claimed(worker)
        rows(
            scene.eyes,
            "UPDATE jobs SET state = 'quarantined', cause = %s, episode = 1, worker_id = NULL WHERE job_id = %s;"
            " INSERT INTO quarantine_entries (job_id, episode, cause, fingerprint, reason, attempt)"
            " SELECT job_id, 1, cause, 'f', 'r', 1 FROM jobs WHERE job_id = %s",
            (cause, *[str(holder.claimed.job_id)] * 2),
        )
    traced, late = (row[0] for row in rows(scene.eyes, "SELECT job_id FROM quarantine_entries LIMIT 2"))
    age(scene, "quarantine_entries", "quarantined_at", late, 100)
    age(scene, "quarantine_entries", "quarantined_at", traced, 100)
    age(scene, "quarantine_entries", "dead_lettered_at", traced, 90)
    found = read(scene)
    assert found["deadsure_quarantined_jobs", "permanent"] == 2
    assert found["deadsure_quarantined_jobs", "other"] == 1
    assert found["deadsure_missing_traces",] == 1


def test_leases(scene: Scene) -> None:
    scene.worker()
    scene.end_lease(scene.worker())
    scene.lose(scene.worker())
    found = read(scene)
    assert [found["deadsure_workers", lease] for lease in figures.LEASES] == [1, 1, 1]


class Asked:
    """A read that counts, and may be told to hang."""

    def __init__(self) -> None:
        self.times = 0
        self.go = threading.Event()
        self.go.set()

    def __call__(self, connection: PgConnection) -> list[Metric]:
        self.times += 1
        self.go.wait(30)
        (row,) = rows(connection, "SELECT 7")
        return [GaugeMetricFamily("seven", "Seven.", row[0])]


@pytest.fixture
def asked() -> Iterator[Asked]:
    made = Asked()
    yield made
    made.go.set()


def collected(collector: DatabaseFigures) -> dict[str, float]:
    return {family.name: family.samples[0].value for family in collector.collect()}


def test_scrapes_share_one_answer_while_it_is_fresh(scene: Scene, asked: Asked) -> None:
    collector = DatabaseFigures(scene.url, 60, asked)
    assert asked.times == 0, "nobody scrapes, nobody asks"
    found = scene.at_once(*[lambda: collected(collector)] * 8)
    assert found == [{"deadsure_database_up": 1, "seven": 7}] * 8
    for _ in range(20):
        collected(collector)
    assert asked.times == 1
    collector.stop()


def test_an_old_answer_is_asked_for_again(scene: Scene, asked: Asked) -> None:
    collector = DatabaseFigures(scene.url, 1e-9, asked)
    monotone = [collected(collector)["deadsure_database_up"] for _ in range(3)]
    assert asked.times >= 2
    assert set(monotone) <= {0, 1}
    collector.stop()


def test_without_a_database_there_is_an_answer_and_no_figure(asked: Asked) -> None:
    collector = DatabaseFigures(NOWHERE, 60, asked)
    assert collected(collector) == {"deadsure_database_up": 0}
    assert asked.times == 0
    collector.stop()


def test_a_session_that_breaks_is_replaced(scene: Scene, asked: Asked) -> None:
    collector = DatabaseFigures(scene.url, 0.05, asked)
    wait_for(lambda: collected(collector).get("seven") == 7, 10, "the figures")
    assert kill_sessions(scene.eyes, "deadsure metrics") == 1
    wait_for(lambda: collected(collector)["deadsure_database_up"] == 0, 10, "that it is away", poll_s=0.01)
    wait_for(lambda: collected(collector).get("seven") == 7, 10, "the figures again")
    collector.stop()


def test_a_database_that_hangs_costs_a_scrape_little(
    scene: Scene, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "ANSWER_S", 0.1)
    collector = DatabaseFigures(scene.url, 60, asked)
    asked.go.clear()
    assert collected(collector) == {"deadsure_database_up": 0}
    assert collected(collector) == {"deadsure_database_up": 0}
    asked.go.set()
    wait_for(lambda: collected(collector).get("seven") == 7, 10, "the answer that came late")
    assert asked.times == 1, "no query is piled upon another"
    collector.stop()


@pytest.fixture
def serve(scene: Scene, producer_settings: Settings) -> Iterator[Any]:
    """Start an endpoint with changed settings; its port."""
    made: list[Endpoint] = []

    def start(**changed: Any) -> int | None:
        changed = {"metrics_port": 0, "lease_s": 30.0, "database_url": scene.url, **changed}
        made.append(Endpoint(replace(producer_settings, **changed), QUEUES, []))
        return made[-1].start()

    yield start
    for one in made:
        one.stop()


def test_the_endpoint_answers_with_counts_and_figures(scene: Scene, serve: Any) -> None:
    scene.job()
    seen = fetch(f"http://127.0.0.1:{serve()}/metrics")
    assert seen.total("deadsure_jobs", state="queued") == 1
    assert seen.total("deadsure_database_up") == 1
    assert "process_resident_memory_bytes" in seen.names()
    assert not [name for name in seen.names() if name.endswith("_created")]


def test_the_endpoint_answers_without_a_database(serve: Any) -> None:
    seen: Scrape = fetch(f"http://127.0.0.1:{serve(database_url=NOWHERE)}/metrics")
    assert seen.total("deadsure_database_up") == 0
    assert list(seen.samples("deadsure_jobs")) == []
    assert "deadsure_jobs_processed_total" in seen.names()


def test_it_is_off_unless_a_port_is_given(serve: Any) -> None:
    assert serve(metrics_port=None) is None


def test_a_port_that_cannot_be_had_is_said_and_nothing_more(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(log, "error", lambda event, **details: said.append((event, details)))
    first = serve()
    assert serve(metrics_port=first) is None
    assert serve(metrics_host="no.such.host.invalid") is None
    assert serve(metrics_host="192.0.2.1") is None, "an address that this machine does not have"
    assert [event for event, _ in said] == ["metrics.port_taken", "metrics.not_served", "metrics.not_served"]
    assert said[0][1]["port"] == first
    assert "DEADSURE_METRICS_PORT" in said[0][1]["next_step"]
    with urllib.request.urlopen(f"http://127.0.0.1:{first}/metrics", timeout=10) as answer:
        assert answer.status == 200


def test_collectors_are_registered_without_asking_anybody(asked: Asked) -> None:
    CollectorRegistry(auto_describe=True).register(DatabaseFigures(NOWHERE, 60, asked))
    assert asked.times == 0
