"""Fixtures for tests that need a database, and no broker and no worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest

from app import attempt, coalesced
from app import settings as app_settings
from app.coalesced import CHUNK_JOBS, Pace
from app.job import Job
from app.job_types import REGISTRY
from app.lease import Keeper
from app.seat import Seat
from app.settings import Settings
from app.stack import Postgres
from tests.integration.coalesced_scene import EFFECT, TYPE, Handler
from tests.integration.scene import Number, Scene
from tests.nodes import database as databases

NO_BROKER = "amqp://nobody:nothing@127.0.0.1:9//"  # producers never talk to it


@pytest.fixture(scope="session")
def scene_url(shared_postgres: Postgres, template: str) -> Iterator[str]:
    """One migrated database for all scenes of the run: making one for each test costs half a second."""
    with databases.database(shared_postgres.url, f"scene_{uuid4().hex[:8]}", template) as made:
        yield made


@pytest.fixture
def scene(scene_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    """An empty migrated database, the actors in it, and this process as a producer."""
    monkeypatch.setenv("DATABASE_URL", scene_url)
    monkeypatch.setenv("BROKER_URL", NO_BROKER)
    app_settings.settings.cache_clear()
    made = Scene(scene_url)
    made.empty()
    yield made
    made.close()
    databases.forget_engines(scene_url)
    app_settings.settings.cache_clear()


@pytest.fixture
def producer_settings(scene: Scene) -> Settings:
    """The settings of this process."""
    assert scene.url == app_settings.settings().database_url
    return app_settings.settings()


@pytest.fixture
def jobs(scene: Scene) -> Any:
    """`tests.faults.jobs`: durable tasks to submit."""
    assert scene.url == app_settings.settings().database_url
    import tests.faults.jobs  # noqa: PLC0415  reads the environment when it is imported

    return tests.faults.jobs


@pytest.fixture
def batches(scene: Scene, jobs: Any) -> Any:
    """The scene with coordinators in it; see `tests.integration.batch_scene`."""
    assert jobs
    import tests.faults.jobs_batch  # noqa: PLC0415  reads the environment when it is imported
    from tests.integration.batch_scene import Batches  # noqa: PLC0415

    return Batches(scene, tests.faults.jobs_batch)


@pytest.fixture
def seat(scene: Scene) -> Iterator[Seat]:
    """A pool child's place in a worker with a lease."""
    keeper = Keeper(app_settings.settings(), "seat", [])
    keeper.start_lease()
    made = Seat(keeper.shared, scene.url)
    yield made
    made.drop()
    keeper.stop()


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Handler], None]:
    """Makes a function the handler of `coalesced_scene.TYPE`; full chunks from the start."""
    monkeypatch.setitem(REGISTRY, (TYPE.name, TYPE.version), TYPE)
    monkeypatch.setitem(coalesced._paces, TYPE.name, Pace(CHUNK_JOBS))

    def make(handle: Handler) -> None:
        monkeypatch.setitem(attempt.HANDLERS, (TYPE.name, TYPE.version), handle)

    return make


@pytest.fixture
def handler(use: Callable[[Handler], None]) -> Callable[[Handler], None]:
    """The same, after the handler has left the job's effect."""

    def make(extra: Handler) -> None:
        def handle(job: Job, payload: Number) -> Any:
            job.execute(EFFECT, (str(job.job_id), job.attempt))
            return extra(job, payload)

        use(handle)

    make(lambda _job, _payload: None)
    return make
