"""Faults installed from outside, in processes of their own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.inject import Fault, dump, install
from tests.nodes.node import Node, NodeContainer
from tests.nodes.process import ProcessContainer
from tests.nodes.waiting import wait_for

WORDS = "import textwrap; print(textwrap.shorten('one two', 20), flush=True); print('end', flush=True)"
FORK = """
import ctypes, os, signal, textwrap, time
if os.fork() == 0:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # as Celery's children do: die with the parent
    textwrap.shorten('one', 20)
    print('child went on', flush=True)
time.sleep(60)
"""
Start = Callable[..., Node]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    nodes: list[Node] = []

    def start(code: str, *faults: Fault) -> Node:
        container = ProcessContainer(
            [sys.executable, "-m", "tests.faults.run_with_faults", "-c", code],
            name=f"probe{len(nodes)}",
            environment={**os.environ, "FAULTS": dump(faults)},
            log=tmp_path / f"probe{len(nodes)}.log",
        )
        nodes.append(Node(NodeContainer(container)))
        return nodes[-1]

    yield start
    for node in nodes:
        node.teardown()


def test_without_faults_nothing_changes(start: Start) -> None:
    node = start(WORDS)
    assert node.wait() == 0
    assert node.logs() == "one two\nend\n"


def test_kill_before_and_after(start: Start) -> None:
    before = start(WORDS, Fault("before:textwrap.shorten", "kill"))
    after = start(WORDS, Fault("after:textwrap.TextWrapper.wrap", "kill"))
    assert (before.wait(), after.wait()) == (137, 137)
    assert "FAULT kill before:textwrap.shorten" in before.logs()
    assert "one two" not in after.logs()


def test_once_file_and_match(start: Start, tmp_path: Path) -> None:
    once = Fault("before:textwrap.shorten", "kill", once_file=str(tmp_path / "once"), match="one")
    other = Fault("before:textwrap.shorten", "kill", match="three")
    assert start(WORDS, once, other).wait() == 137
    assert start(WORDS, once, other).wait() == 0


def test_main_dies_and_the_child_with_it(start: Start) -> None:
    node = start(FORK, Fault("before:textwrap.shorten", "kill", who="main"))
    assert node.wait() == 137
    wait_for(lambda: not node.children(), 5, "child is gone")
    assert "child went on" not in node.logs()


def test_stop_freezes_until_continued(start: Start) -> None:
    node = start(WORDS, Fault("before:textwrap.shorten", "stop", who="group"))
    node.wait_for_log("FAULT stop")
    wait_for(lambda: stopped(node.pid), 5, "process is stopped")
    node.sigcont()
    assert node.wait() == 0


def stopped(pid: int) -> bool:
    return "State:\tT" in Path(f"/proc/{pid}/status").read_text()


def test_wait_file_announces_and_waits(start: Start, tmp_path: Path) -> None:
    there, go = tmp_path / "there", tmp_path / "go"
    node = start(WORDS, Fault("after:textwrap.shorten", "wait_file", announce=str(there), until=str(go)))
    wait_for(there.exists, 10, "announced")
    assert "one two" not in node.logs()
    go.touch()
    assert node.wait() == 0


def test_raise_names_its_class(start: Start) -> None:
    node = start(WORDS, Fault("after:textwrap.shorten", "raise", error="builtins.ConnectionError"))
    assert node.wait() == 1
    assert "ConnectionError: injected after:textwrap.shorten" in node.logs()


def test_a_fault_that_hits_nothing_is_refused() -> None:
    with pytest.raises(AttributeError, match="no_such_function"):
        install(Fault("before:textwrap.no_such_function", "kill"))
