"""The fixtures on real servers, with a Celery app that needs nothing of ours."""

from __future__ import annotations

from pathlib import Path

import psycopg2
import pytest
from sqlalchemy import text

from db.session import connect, engine, one
from tests.nodes.marks import on_own_postgres, on_rabbitmq
from tests.nodes.node import WorkerCluster
from tests.nodes.programs import Programs
from tests.nodes.proxy import Proxy
from tests.nodes.servers import BrokerNode, ServerNode
from tests.nodes.waiting import wait_for

PLAIN_APP = """
import os
from celery import Celery
app = Celery("plain", broker=os.environ["BROKER_URL"])
app.conf.task_default_queue = "plain"
app.conf.broker_connection_retry_on_startup = True
@app.task(name="plain.append")
def append(path, word):
    open(path, "a").write(word)
"""
SEND = "import sys, plain; plain.append.delay(*sys.argv[1:])"


@pytest.fixture
def plain(programs: Programs, tmp_path: Path) -> Programs:
    (tmp_path / "plain.py").write_text(PLAIN_APP)
    programs.environment["PYTHONPATH"] = str(tmp_path)
    return programs


def test_a_cluster_of_workers_runs_tasks(plain: Programs, broker: BrokerNode, tmp_path: Path) -> None:
    cluster = plain.workers(2, app="plain", concurrency=1)
    assert isinstance(cluster, WorkerCluster)
    assert [node.hostname().partition("@")[0] for node in cluster] == ["worker1", "worker2"]
    cluster[0].sigkill()
    wait_for(lambda: not cluster[0].children(), 5, "children die with their parent")
    out = tmp_path / "out"
    assert plain.producer(SEND, str(out), "word").wait() == 0
    wait_for(out.exists, 20, "the task has run")
    assert cluster[1].terminate() == 0
    plain.producer(SEND, str(out), "more").wait()
    assert wait_for(lambda: broker.depth("plain"), 10, "a message waits") == 1
    assert broker.purge("plain") == 1


def test_every_test_has_an_empty_migrated_database(database_url: str) -> None:
    connection = connect(database_url)
    assert one(connection, "SELECT count(*) FROM test_effects") == (0,)
    assert one(connection, "SELECT count(*) FROM jobs") == (0,)
    connection.close()


@on_own_postgres
def test_a_killed_postgres_comes_back_with_its_data(postgres: ServerNode, database_url: str) -> None:
    with engine(database_url).begin() as connection:
        connection.execute(text("CREATE TABLE kept AS SELECT 1 AS n"))
    postgres.sigkill()
    with pytest.raises(psycopg2.OperationalError):
        connect(database_url)
    postgres.start()
    with engine(database_url).connect() as connection:
        assert connection.scalar(text("SELECT n FROM kept")) == 1


@on_rabbitmq
def test_a_proxy_cuts_a_worker_off(plain: Programs, broker: BrokerNode) -> None:
    with Proxy.before(broker.url) as proxy:
        worker = plain.worker("plain", concurrency=1, environment={"BROKER_URL": proxy.url(broker.url)})
        assert proxy.cut() > 0
        worker.wait_for_log("Connection to broker lost")
        wait_for(lambda: proxy.connections, 30, "the worker is back")
