"""What a person on call sees of real processes: work, retries, crashes, a dead relay, a lost exchange, a drain.

One story on one worker and one relay, since processes are what costs time here.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from kombu import Connection

from tests.faults.effects import Effects
from tests.faults.inject import Fault
from tests.nodes.marks import on_rabbitmq
from tests.nodes.monitoring import expressions, grouped_by, selectors
from tests.nodes.node import Node
from tests.nodes.scrape import Scrape, scrape
from tests.nodes.servers import BrokerNode
from tests.nodes.waiting import wait_for

pytestmark = [
    on_rabbitmq,
    pytest.mark.usefixtures("settings"),
    pytest.mark.environment(
        DEADSURE_METRICS_PORT="0",
        DEADSURE_METRICS_REFRESH_S="0.2",
        DEADSURE_RESEND_FIRST_S="1",
        DEADSURE_RESEND_MAX_S="2",
    ),
]
GIVEN = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
PROCESSED = "deadsure_jobs_processed_total"


def wait_seen(node: Node, condition: Callable[[Scrape], object], what: str) -> Scrape:
    """Scrape a node until it shows something."""
    last: list[Scrape] = []

    def seen() -> bool:
        last[:] = [scrape(node)]
        return bool(condition(last[0]))

    wait_for(seen, 60, f"{node.name()} shows {what}", retry_on=(OSError,))
    return last[0]


def unpaid(seen: Scrape) -> float:
    return seen.total("deadsure_outbox_debts", queue="jobs")


def lines_of(node: Node, event: str) -> list[dict[str, Any]]:
    """The JSON log lines of an event."""
    lines = [line for line in node.logs().splitlines() if event in line and line.startswith("{")]
    return [json.loads(line) for line in lines]


def test_the_metrics_of_a_worker_and_a_relay_tell_what_happens(  # noqa: PLR0915  # one story, told in order
    broker: BrokerNode, jobs: Any, deadly: Any, effects: Effects, start_worker: Any, start_relay: Any, tmp_path: Path
) -> None:
    import tests.faults.jobs_traced as traced  # noqa: PLC0415  # reads the environment when it is imported

    taken = socket.create_server(("127.0.0.1", 0))
    clash = start_relay(environment={"DEADSURE_METRICS_PORT": str(taken.getsockname()[1])})
    unclaimed = Fault("before:app.claim.claim", "kill", once_file=str(tmp_path / "unclaimed"))
    known = "tests.faults.jobs_deaths,tests.faults.jobs_traced"
    worker = start_worker(faults=[unclaimed], options=["--without-relay", "-I", known])
    relay = start_relay(ready_prompt="relay.ready")
    # The port was taken: a line that says what to do, and a process that works all the same.
    clash.wait_for_log("relay.ready")
    (refused,) = lines_of(clash, "metrics.port_taken")
    assert "DEADSURE_METRICS_PORT of its own" in refused["next_step"]
    assert clash.terminate() == 0
    taken.close()

    # A child that dies before it claims, work, retries, a quarantine: the main process counts what its children did.
    job = traced.traced.apply_async(kwargs={"failures": 1}, correlation_id="order 7", traceparent=GIVEN)
    deadly.awkward.delay(how="mute")
    seen = wait_seen(
        worker,
        lambda s: s.total(PROCESSED, outcome="succeeded") == 2 and s.total(PROCESSED, outcome="quarantined") == 1,
        "the endings",
    )
    assert seen.total(PROCESSED, outcome="succeeded", type="tests.traced") == 1
    assert seen.total(PROCESSED, outcome="retried") == 2
    assert seen.total("deadsure_jobs_failed_total", failure="transient", type="tests.awkward") == 2
    assert seen.total("deadsure_jobs_quarantined_total", cause="attempts_spent", type="tests.awkward") == 1
    for name in ("deadsure_job_duration_seconds", "deadsure_job_wait_seconds"):
        assert seen.total(f"{name}_count") == 5, name
        assert 0 < seen.total(f"{name}_sum") < 60, name
    assert seen.total("deadsure_deliveries_total") >= 6, "a resend may come too"
    assert seen.total("deadsure_redeliveries_total") >= 1
    assert seen.total(PROCESSED, outcome="skipped") >= 1
    assert seen.total("deadsure_database_up") == 1
    assert seen.total("deadsure_workers", lease="live") == 1
    assert seen.total("deadsure_worker_last_message_age_seconds", queue="jobs") < 30
    assert seen.total("deadsure_worker_processes") == 2
    seen = wait_seen(relay, lambda s: s.total("deadsure_dead_letters_stored_total") >= 1, "the dead letter")
    assert seen.total("deadsure_relay_sends_total", kind="first") >= 5
    assert seen.total("deadsure_quarantined_jobs", cause="attempts_spent") == 1
    assert seen.total("deadsure_relay_last_success_age_seconds") < 5
    assert seen.total("deadsure_intake_last_success_age_seconds") < 5
    for said in ("a line of structlog", "a line of the standard library"):
        lines = lines_of(worker, said)
        assert [line["attempt"] for line in lines] == [1, 2]
        for line in lines:
            assert (line["job_id"], line["correlation_id"], line["trace_id"]) == (job.id, "order 7", GIVEN[3:35])

    # kill -9 of a child.
    slow = deadly.death.delay(how="killed", once=str(tmp_path / "killed"))
    seen = wait_seen(worker, lambda s: s.total(PROCESSED, type="tests.death", outcome="succeeded") == 1, "its success")
    assert seen.total("deadsure_jobs_crashed_total", cause="killed", type="tests.death") == 1
    assert seen.total(PROCESSED, type="tests.death", outcome="crashed") == 1
    assert effects.count(slow.id) == 1
    listening = {
        pid for pid in worker.children() for at in psutil.Process(pid).net_connections() if at.status == "LISTEN"
    }
    assert not listening, "a child that was forked later holds the port of the metrics"

    # A dead relay: nobody answers there, and the worker shows the debt that nobody pays.
    relay.sigkill()
    traced.traced.delay()
    seen = wait_seen(worker, lambda s: s.total("deadsure_outbox_lag_seconds") > 1, "the lag")
    assert seen.total("deadsure_outbox_debts", queue="jobs", debt="unsent") == 1
    assert seen.total("deadsure_oldest_waiting_age_seconds") > 1
    with pytest.raises(OSError, match="refused"):
        scrape(relay)
    relay = start_relay(ready_prompt="relay.ready")
    wait_seen(worker, lambda s: s.total("deadsure_outbox_lag_seconds") == 0 and not unpaid(s), "no lag, no debt")

    # The dead-letter exchange is gone: the row is there, its trace is not.
    with Connection(broker.url) as connection:
        connection.default_channel.exchange_delete("jobs.dlx")
    deadly.awkward.delay(how="mute")
    wait_seen(worker, lambda s: s.total("deadsure_missing_traces") == 1, "the missing trace")
    wait_seen(relay, lambda s: s.total("deadsure_relay_sends_total", kind="trace") >= 1, "its offers")

    # A drain is to be seen until it ends.
    go = tmp_path / "go"
    jobs.slow.delay(until=str(go))
    wait_seen(worker, lambda s: s.total("deadsure_jobs", state="running") == 1, "the running job")
    worker.kill("SIGTERM")
    seen = wait_seen(worker, lambda s: s.total("deadsure_worker_draining") == 1, "the drain")
    assert seen.total("deadsure_worker_active_jobs") == 1
    shown = [seen, scrape(relay)]
    go.touch()
    assert worker.wait(60) == 0
    wait_seen(relay, lambda s: s.total("deadsure_workers", lease="live") == 0, "that no worker is left")
    assert_shown_is_all_that_is_asked_for(shown)


def assert_shown_is_all_that_is_asked_for(shown: list[Scrape]) -> None:
    """Every series, label and label value that rules and dashboard ask for is one that these endpoints have."""
    for expression in expressions():
        labels = set()
        for selector in selectors(expression):
            having = [seen for seen in shown if selector.name in seen.names()]
            assert having, f"no endpoint has {selector.name}: {expression}"
            found = {label for seen in having for label in seen.labels(selector.name)}
            assert selector.used <= found, expression
            assert any(list(seen.samples(selector.name, **dict(selector.equal))) for seen in having), expression
            labels |= found
        assert grouped_by(expression) <= labels, expression
