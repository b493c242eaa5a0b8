"""Fixtures on real servers and real processes.

Nothing starts before a test asks for it. By default all tests share one server of each kind, in a database
and a virtual host of their own; the marks in `tests.nodes.marks` (such as `on_own_rabbitmq`)
give a test a server that it may restart or wipe. `@pytest.mark.environment(DEADSURE_LEASE_S="30")`
changes the settings of all processes of a test.
"""

from __future__ import annotations

import itertools
import signal
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # pytest's importlib mode adds nothing; `tests.*` is imported by its full name
    sys.path.insert(0, str(ROOT))

from celery import Celery  # noqa: E402
from pytest_celery import CeleryBrokerCluster, CeleryWorkerCluster  # noqa: E402
from sqlalchemy import Engine  # noqa: E402

from app import settings as app_settings  # noqa: E402
from app.stack import Postgres, RabbitMQ, Stack, Valkey, ensure_rabbitmq, temporary_stack  # noqa: E402
from db import session  # noqa: E402
from tests.faults.effects import Effects  # noqa: E402
from tests.nodes import database as databases  # noqa: E402
from tests.nodes import servers  # noqa: E402
from tests.nodes.programs import Programs  # noqa: E402
from tests.nodes.servers import BrokerNode, ServerNode  # noqa: E402

SHORT_TIMES = {
    "DEADSURE_LEASE_S": "4",
    "DEADSURE_LEASE_RENEW_S": "0.5",
    "DEADSURE_RESEND_FIRST_S": "2",
    "DEADSURE_POLL_S": "0.2",
}
PROGRAMS = pytest.StashKey[Programs]()
_numbers = itertools.count(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="tests marked soak run at the size that the contract names")
    parser.addoption("--nodes", choices=("process", "docker"), default="process", help="what nodes run in")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "environment(**variables): settings of all processes of the test")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: stop servers and nodes first


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    programs = item.stash.get(PROGRAMS, None)
    if report.failed and programs is not None:
        report.sections.extend(programs.tails())
    return report


# servers


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """One private stack for the whole run, each server started by the first test that needs it."""
    with temporary_stack(ROOT / "var", rabbitmq=False, postgres=False, valkey=False) as made:
        yield made
        made.rabbitmq.kill9()  # an orderly stop takes six seconds


@pytest.fixture(scope="session")
def rabbitmq(stack: Stack) -> RabbitMQ:
    ensure_rabbitmq()
    stack.rabbitmq.start()
    return stack.rabbitmq


@pytest.fixture(scope="session")
def valkey(stack: Stack) -> Valkey:
    stack.valkey.start()
    return stack.valkey


@pytest.fixture(scope="session")
def shared_postgres(stack: Stack) -> Postgres:
    stack.postgres.start()
    return stack.postgres


@pytest.fixture
def own_rabbitmq() -> Iterator[BrokerNode]:
    """A RabbitMQ of this test alone, to be restarted, killed and wiped; its virtual host is `/`."""
    with temporary_stack(ROOT / "var", postgres=False, valkey=False) as made:
        yield BrokerNode(made.rabbitmq, made.rabbitmq.url)
        made.rabbitmq.kill9()  # an orderly stop takes six seconds


@pytest.fixture
def own_valkey() -> Iterator[BrokerNode]:
    """A Valkey of this test alone."""
    with temporary_stack(ROOT / "var", postgres=False, rabbitmq=False) as made:
        yield BrokerNode(made.valkey, made.valkey.url)


@pytest.fixture(scope="session")
def second_postgres() -> Iterator[Postgres]:
    """Handed from test to test: no two use it at once."""
    with temporary_stack(ROOT / "var", rabbitmq=False, valkey=False) as made:
        yield made.postgres


@pytest.fixture
def own_postgres(second_postgres: Postgres) -> ServerNode:
    """A PostgreSQL that this test may restart, kill and wipe."""
    if not second_postgres.running:
        second_postgres.start()
    return ServerNode(second_postgres)


@dataclass(frozen=True)
class Scale:
    """How much the tests marked `soak` do: enough to meet each race, or as much as the contract says."""

    deploys: int = 8  # C24
    load: int = 150  # jobs of each mode that run while workers are replaced
    published: int = 100  # jobs of each mode that are published while the broker dies, C18
    rows: int = 250_000  # of one report
    patience: int = 1  # by how much waits are longer


@pytest.fixture(scope="session")
def scale(request: pytest.FixtureRequest) -> Scale:
    soak = request.config.getoption("--soak")
    return Scale(deploys=30, load=1000, published=5000, rows=1_000_000, patience=10) if soak else Scale()


# what one test uses of them


@pytest.fixture(params=servers.KINDS)
def broker(request: pytest.FixtureRequest) -> Iterator[BrokerNode]:
    """The broker of the test: once on RabbitMQ, once on Valkey; see `tests.nodes.marks` to choose."""
    number = next(_numbers)
    match request.param:
        case "rabbitmq":
            server: RabbitMQ = request.getfixturevalue("rabbitmq")
            yield servers.new_vhost(server, f"test-{number}")
            servers.delete_vhost(server, f"test-{number}")
        case "valkey":
            yield servers.fresh_database_number(request.getfixturevalue("valkey"), 1 + number % 15)
        case own:
            yield request.getfixturevalue(own)


@pytest.fixture
def postgres(request: pytest.FixtureRequest) -> Iterator[ServerNode]:
    """The PostgreSQL of the test: the shared one, or `own_postgres` by `on_own_postgres`."""
    if getattr(request, "param", "shared") == "own":
        yield request.getfixturevalue("own_postgres")
    else:
        yield ServerNode(request.getfixturevalue("shared_postgres"))


@pytest.fixture(scope="session")
def template(shared_postgres: Postgres) -> str:
    return databases.make_template(shared_postgres.url)


@pytest.fixture
def database_url(postgres: ServerNode, request: pytest.FixtureRequest) -> Iterator[str]:
    """A migrated database of the test's own, with the table `test_effects`."""
    url = postgres.server.url
    own = getattr(request.node, "callspec", None) and request.node.callspec.params.get("postgres") == "own"
    made = databases.make_template(url) if own else request.getfixturevalue("template")
    with databases.database(url, f"test_{next(_numbers)}", made) as fresh:
        yield fresh


@pytest.fixture
def empty_database_url(postgres: ServerNode) -> Iterator[str]:
    """A database that was never migrated."""
    with databases.database(postgres.server.url, f"test_{next(_numbers)}", "template0") as fresh:
        yield fresh


@pytest.fixture
def engine(database_url: str) -> Engine:
    return session.engine(database_url)


@pytest.fixture
def effects(engine: Engine) -> Effects:
    return Effects(engine)


# processes


@pytest.fixture
def environment(
    request: pytest.FixtureRequest, database_url: str, broker: BrokerNode, tmp_path: Path
) -> dict[str, str]:
    """What every process of the test is told: servers, reports directory, short times, then the mark's."""
    made = {
        "DATABASE_URL": database_url,
        **broker.environment(),
        "REPORTS_DIR": str(tmp_path / "reports"),
        **SHORT_TIMES,
    }
    for mark in reversed(list(request.node.iter_markers("environment"))):
        made.update(mark.kwargs)
    return made


@pytest.fixture
def settings(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[app_settings.Settings]:
    """Make this process part of the test: it may submit and read as a producer does."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    app_settings.settings.cache_clear()
    yield app_settings.settings()
    app_settings.settings.cache_clear()


@pytest.fixture
def programs(request: pytest.FixtureRequest, environment: dict[str, str], tmp_path: Path) -> Iterator[Programs]:
    """Starts processes; at the end of the test all are killed, and a failure shows their logs."""
    made = Programs(tmp_path / "logs", environment, request.config.getoption("--nodes"))
    request.node.stash[PROGRAMS] = made
    yield made
    made.close()


@pytest.fixture
def start_worker(programs: Programs) -> Any:
    """`Programs.worker`."""
    return programs.worker


@pytest.fixture
def start_relay(programs: Programs) -> Any:
    """`Programs.relay`."""
    return programs.relay


@pytest.fixture
def start_producer(programs: Programs) -> Any:
    """`Programs.producer`."""
    return programs.producer


# pytest-celery's names: `celery_setup.worker`, `.broker`, `.app`, and `celery_setup.ready()`


@pytest.fixture
def celery_worker_cluster(programs: Programs) -> CeleryWorkerCluster:
    """One worker, ready."""
    return programs.workers(1, alone=False)


@pytest.fixture
def celery_broker_cluster(broker: BrokerNode) -> CeleryBrokerCluster:
    return CeleryBrokerCluster(broker)


@pytest.fixture
def celery_backend_cluster() -> None:
    """None: results are answered from the job row."""


@pytest.fixture
def celery_setup_app(settings: app_settings.Settings) -> Celery:
    """The project's own app, pointed at the test's broker."""
    import tests.faults.jobs  # noqa: PLC0415, F401  both read the environment when they are imported
    from tasks import app  # noqa: PLC0415

    app.conf.broker_url = settings.broker_url
    app.pool.force_close_all()
    return app
