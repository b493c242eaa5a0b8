"""The process-backed container and the nodes above it, with programs that need no app."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pytest_celery import CeleryTestCluster
from pytest_docker_tools.exceptions import ContainerFailed

from tests.nodes.node import Node, NodeContainer
from tests.nodes.process import ProcessContainer
from tests.nodes.waiting import WaitTimeoutError, stays_true, wait_for

FAMILY = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("asked to stop", flush=True), sys.exit(3)))
children = [os.fork()]
if children == [0]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True: time.sleep(60)
print("family ready", flush=True)
while True: time.sleep(60)
"""


def node(tmp_path: Path, code: str, prompt: str | None = None) -> Node:
    container = ProcessContainer(
        [sys.executable, "-c", code], name="probe", environment=dict(os.environ), log=tmp_path / "probe.log"
    )
    return Node(NodeContainer(container, prompt))


@pytest.fixture
def family(tmp_path: Path) -> Iterator[Node]:
    made = node(tmp_path, FAMILY, "family ready")
    assert made.ready()
    yield made
    made.teardown()
    assert made.children() == []


def test_kill_reaches_the_main_process_alone(family: Node) -> None:
    (child,) = family.children()
    family.sigkill()
    assert family.exit_code() == 137
    assert family.children() == [child]


def test_group_kill_takes_the_children_too(family: Node) -> None:
    family.sigkill_group()
    wait_for(lambda: not family.children(), 5, "children are gone")


def test_terminate_returns_the_exit_code(family: Node) -> None:
    assert family.terminate() == 3
    assert "asked to stop" in family.logs()


def test_a_frozen_node_is_paused_and_goes_on(family: Node) -> None:
    family.sigstop()
    assert family.container.status == "paused"
    family.kill("SIGTERM")
    stays_true(family.is_running, 0.2)
    family.sigcont()
    assert family.wait() == 3


def test_restart_starts_anew_and_waits_for_the_new_log(family: Node) -> None:
    first = family.pid
    family.restart()
    assert family.pid != first
    assert family.logs().count("family ready") == 2
    assert family.container.current_logs().count("family ready") == 1


def test_a_node_that_ends_before_it_is_ready_fails_at_once(tmp_path: Path) -> None:
    made = node(tmp_path, "raise SystemExit('no luck')", "ready")
    with pytest.raises(ContainerFailed):
        wait_for(made.ready, 20)
    assert made.exit_code() == 1
    with pytest.raises(AssertionError, match="ended"):
        made.wait_for_log("ready")
    made.teardown()


def test_exec_run_shares_the_environment(family: Node) -> None:
    code, output = family.raw.exec_run([sys.executable, "-c", "import os; print(os.getcwd())"])
    assert (code, output.decode().strip()) == (0, str(family.raw.cwd))


def test_nodes_form_pytest_celery_clusters(family: Node) -> None:
    cluster = CeleryTestCluster(family)
    assert cluster.ready()
    assert cluster[0].name() == "probe"
    cluster[0].assert_log_exists("family ready", timeout=1)
    cluster[0].assert_log_does_not_exist("no such line", timeout=1)


def test_wait_for_returns_the_value_or_says_what_it_saw() -> None:
    assert wait_for(lambda: 7, 1) == 7
    with pytest.raises(WaitTimeoutError, match=r"not within 0\.1 s: a full list; last seen: \[\]"):
        wait_for(list, 0.1, "a full list")
    with pytest.raises(WaitTimeoutError, match="KeyError"):
        wait_for(lambda: os.environ["NOT_SET"], 0.1, retry_on=(KeyError,))
