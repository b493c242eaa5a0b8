"""Alert rules and dashboard: each alert fires when it should, is quiet when it should be, and leads to its section.

promtool judges. Where it is missing the tests fail: a rule that nobody tried is not tested.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.nodes.monitoring import CONFIGURATION, ROOT, RULES, alerts, expressions, panels, selectors

RUNBOOK = ROOT / "docs/runbook.md"
UP = {"deadsure_database_up": "1x60"}
LOOPS = {f"deadsure_{loop}_last_success_age_seconds": "1x60" for loop in ("relay", "intake", "sweeper")}
WAITING = {'deadsure_oldest_waiting_age_seconds{queue="jobs"}': "400x60"}
IDLE = {
    'deadsure_worker_last_message_age_seconds{queue="jobs"}': "400x60",
    "deadsure_worker_active_jobs": "0x60",
    "deadsure_worker_draining": "0x60",
}
JOBS = {"queue": "jobs"}
LAG = 'deadsure_outbox_lag_seconds{queue="jobs"}'
SENT = 'deadsure_outbox_debts{queue="jobs",debt="sent"}'
RESENDS = 'deadsure_relay_sends_total{kind="resend"}'

# For each alert: series (one sample a minute) at which it fires at `minute` with these labels, and series at which not.
CASES: dict[str, tuple[dict[str, str], int, dict[str, str], list[dict[str, str]]]] = {
    "DeadsureNotScraped": ({}, 6, {}, [UP]),
    "DeadsureDatabaseAway": (
        {"deadsure_database_up": "0x60"},
        3,
        {"instance": "w1", "job": "deadsure"},
        [UP, {"deadsure_database_up": "0 1 0 1 0 1 0 1"}],
    ),
    "DeadsureNoWorker": (
        {'deadsure_workers{lease="live"}': "0x60"},
        3,
        {},
        [{'deadsure_workers{lease="live"}': "1x60", 'deadsure_workers{lease="over"}': "0x60"}],
    ),
    "DeadsureRelayStopped": (
        {**LOOPS, "deadsure_relay_last_success_age_seconds": "100+60x60"},
        4,
        {},
        [LOOPS, {**LOOPS, "deadsure_relay_last_success_age_seconds": "0x1 61 0x60"}],
    ),
    "DeadsureDebtsNotSent": (
        {LAG: "61+60x60", SENT: "0x60"},
        3,
        JOBS,
        [{LAG: "61+60x60", SENT: "1000x60"}, {LAG: "0x60", SENT: "0x60"}],
    ),
    "DeadsureIntakeStopped": ({**LOOPS, "deadsure_intake_last_success_age_seconds": "100+60x60"}, 7, {}, [LOOPS]),
    "DeadsureSweeperStopped": ({**LOOPS, "deadsure_sweeper_last_success_age_seconds": "100+60x60"}, 4, {}, [LOOPS]),
    "DeadsureLeaseNotSwept": (
        {'deadsure_workers{lease="over"}': "1x60"},
        6,
        {},
        [{'deadsure_workers{lease="over"}': "1x2 0x60"}],
    ),
    "DeadsureWorkersGoSilent": (
        {'deadsure_workers_lost_total{cause="stalled"}': "0x5 1x60"},
        8,
        {},
        [{'deadsure_workers_lost_total{cause="killed"}': "0x5 1x60"}],
    ),
    "DeadsureWorkerNotConsuming": (
        {**IDLE, **WAITING},
        3,
        {"instance": "w1", "job": "deadsure", **JOBS},
        [
            {**IDLE, 'deadsure_oldest_waiting_age_seconds{queue="mails"}': "400x60"},
            {**IDLE, **WAITING, "deadsure_worker_active_jobs": "2x60"},
            {**IDLE, **WAITING, "deadsure_worker_draining": "1x60"},
            {**IDLE, **WAITING, 'deadsure_worker_last_message_age_seconds{queue="jobs"}': "10x60"},
        ],
    ),
    "DeadsureDrainTakesLong": (
        {"deadsure_worker_draining": "1x60"},
        17,
        {"instance": "w1", "job": "deadsure"},
        [{"deadsure_worker_draining": "1x10 _x60"}],
    ),
    "DeadsureJobsWaitLong": (
        {'deadsure_oldest_waiting_age_seconds{queue="jobs"}': "901+60x60"},
        6,
        JOBS,
        [WAITING],
    ),
    "DeadsureQuarantine": (
        {'deadsure_quarantined_jobs{cause="permanent"}': "1x60"},
        12,
        {"cause": "permanent"},
        [{'deadsure_quarantined_jobs{cause="permanent"}': "1x5 0x60"}],
    ),
    "DeadsureQuarantineGrows": (
        {'deadsure_quarantined_jobs{cause="uncertain"}': "0+2x60"},
        20,
        {"cause": "uncertain"},
        [{'deadsure_quarantined_jobs{cause="uncertain"}': "500x60"}],
    ),
    "DeadsureTracesMissing": ({"deadsure_missing_traces": "1x60"}, 12, {}, [{"deadsure_missing_traces": "1x5 0x60"}]),
    "DeadsureCrashes": (
        {'deadsure_jobs_crashed_total{type="a",cause="killed"}': "0x5 3x60"},
        10,
        {"type": "a"},
        [{'deadsure_jobs_crashed_total{type="a",cause="killed"}': "0x5 1x60"}],
    ),
    "DeadsureFailures": (
        {
            'deadsure_jobs_failed_total{type="a",failure="transient"}': "0+6x60",
            'deadsure_jobs_processed_total{type="a",outcome="retried"}': "0+6x60",
            'deadsure_jobs_processed_total{type="a",outcome="succeeded"}': "0+4x60",
            'deadsure_jobs_processed_total{type="a",outcome="skipped"}': "0+90x60",
        },
        20,
        {"type": "a"},
        [
            {
                'deadsure_jobs_failed_total{type="a",failure="transient"}': "0+6x60",
                'deadsure_jobs_processed_total{type="a",outcome="retried"}': "0+6x60",
                'deadsure_jobs_processed_total{type="a",outcome="succeeded"}': "0+14x60",
            },
            {
                'deadsure_jobs_failed_total{type="a",failure="transient"}': "0x5 1x60",
                'deadsure_jobs_processed_total{type="a",outcome="retried"}': "0x5 1x60",
            },
        ],
    ),
    "DeadsureResends": (
        {RESENDS: "0+5x60"},
        20,
        {},
        [{'deadsure_relay_sends_total{kind="first"}': "0+500x60", RESENDS: "0+1x60"}],
    ),
    "DeadsureRepairs": ({"deadsure_repairs_total": "0x5 1x60"}, 10, {}, [{"deadsure_repairs_total": "7x60"}]),
    "DeadsureUnreadableMessages": (
        {'deadsure_messages_intercepted_total{ending="dead_lettered"}': "0x5 1x60"},
        8,
        {},
        [{'deadsure_messages_intercepted_total{ending="parked"}': "0+9x60"}],
    ),
    "DeadsureMessagesParked": (
        {"deadsure_parked_messages": "2x60"},
        32,
        {},
        [{"deadsure_parked_messages": "2x20 0x60"}],
    ),
}


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    if shutil.which("promtool") is None:
        pytest.fail("promtool is not installed: run `python -m app.stack install-promtool` (`make test` does)")
    return subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, check=False)


def scraped(series: str) -> str:
    """The series with the labels that Prometheus adds."""
    name, _, labels = series.rstrip("}").partition("{")
    return name + "{" + ",".join(filter(None, [labels, 'job="deadsure"', 'instance="w1"'])) + "}"


def case(rule: dict[str, Any], series: dict[str, str], minute: int, fires: dict[str, str] | None) -> dict[str, Any]:
    """A test of promtool: at that minute the alert fires with these labels, or (None) it does not."""
    expected = []
    if fires is not None:
        summary = re.sub(r"{{ \$labels\.(\w+) }}", lambda found: fires[found[1]], rule["annotations"]["summary"])
        annotations = {**rule["annotations"], "summary": summary}
        expected = [{"exp_labels": {**rule["labels"], **fires}, "exp_annotations": annotations}]
    return {
        "interval": "1m",
        "input_series": [{"series": scraped(name), "values": values} for name, values in series.items()],
        "alert_rule_test": [{"eval_time": f"{minute}m", "alertname": rule["alert"], "exp_alerts": expected}],
    }


def test_every_alert_has_a_case() -> None:
    assert [rule["alert"] for rule in alerts()] == list(CASES)


def test_each_alert_fires_and_is_quiet(tmp_path: Path) -> None:
    tests = []
    for rule in alerts():
        series, minute, labels, quiet = CASES[rule["alert"]]
        tests.append(case(rule, series, minute, labels))
        tests += [case(rule, other, later, None) for other in quiet for later in (minute, minute + 20)]
        if "for" in rule:
            tests.append(case(rule, series, 0, None))
    file = tmp_path / "tests.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}))
    done = promtool("test", "rules", file)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_wrong_expectation_would_be_noticed(tmp_path: Path) -> None:
    rule = alerts()[0]
    file = tmp_path / "tests.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "tests": [case(rule, {}, 6, None)]}))
    assert promtool("test", "rules", file).returncode != 0


def test_rules_and_configuration_are_valid() -> None:
    for arguments in (("check", "rules", RULES), ("check", "config", CONFIGURATION)):
        done = promtool(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_leads_to_its_section_of_the_runbook() -> None:
    sections = {heading.lower() for heading in re.findall(r"^### (\S+)$", RUNBOOK.read_text(), re.MULTILINE)}
    for rule in alerts():
        path, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert ROOT / path == RUNBOOK
        assert anchor == rule["alert"].lower()
        assert anchor in sections
    assert len(sections) == len(CASES), "a section without an alert"


def test_every_query_is_one_that_prometheus_can_read(tmp_path: Path) -> None:
    rules = [
        {"record": "x:y", "expr": expression.replace("$__rate_interval", "5m").replace("$type", ".*")}
        for expression in expressions()
    ]
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    done = promtool("check", "rules", "--lint=none", file)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboard_is_whole() -> None:
    assert len({panel["id"] for panel in panels()}) == len(panels()) > 20
    for panel in panels():
        assert panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["targets"]
        for target in panel["targets"]:
            assert selectors(target["expr"]), target["expr"]
