"""The keeper: one lease for a worker process, renewed, relocked and lost in good order."""

from __future__ import annotations

import multiprocessing
import os
import uuid
from collections.abc import Iterator
from multiprocessing.synchronize import Event

import psycopg2
import pytest

from app.clock import boottime_s
from app.lease import Keeper, SharedLease
from app.settings import Settings
from db.session import rows
from tests.integration.scene import Scene, kill_sessions
from tests.nodes.waiting import stays_true, wait_for

NODE = "keeper@host"
SESSION = f"deadsure keeper {NODE}"
LEASE_S, RENEW_S = 4.0, 0.2


@pytest.fixture
def keeper(scene: Scene) -> Iterator[Keeper]:
    made = Keeper(Settings(database_url=scene.url, lease_s=LEASE_S, lease_renew_s=RENEW_S), NODE, ["a@1"])
    made.start_lease()
    yield made
    if made.is_alive() or made._connection is not None:
        made.stop()


def test_the_lease_is_registered_with_its_lock(scene: Scene, keeper: Keeper) -> None:
    row = scene.worker_row(keeper.worker_id)
    assert (row["name"], row["pid"], row["pooled"], row["knows"]) == (NODE, os.getpid(), False, ["a@1"])
    assert scene.locked(row["lock_key"])
    assert row["locked_at"] > scene.ask("SELECT pg_postmaster_start_time()")
    left_s = scene.ask("SELECT extract(epoch FROM lease_until - clock_timestamp())::float8 FROM workers")
    assert LEASE_S - 1 < left_s <= LEASE_S
    assert keeper.shared.read()[0] == keeper.worker_id


def test_trust_ends_before_the_lease(scene: Scene, keeper: Keeper) -> None:
    """At every moment, whatever the renewals are doing."""
    keeper.start()

    def margin_s() -> float:
        trusted_until = keeper.shared.read()[1]  # before the row: the row can only be newer
        left_s = scene.ask("SELECT extract(epoch FROM lease_until - clock_timestamp())::float8 FROM workers")
        return float(boottime_s() + left_s - trusted_until)

    stays_true(lambda: margin_s() > -0.001, 1.5, "the database's lease outlasts the trust", poll_s=0.003)


def test_the_lease_is_renewed(scene: Scene, keeper: Keeper) -> None:
    before, trusted = scene.worker_row(keeper.worker_id)["lease_until"], keeper.shared.read()[1]
    keeper.start()
    wait_for(lambda: scene.worker_row(keeper.worker_id)["lease_until"] > before, 10, "a renewal", poll_s=0.01)
    wait_for(lambda: keeper.shared.read()[1] > trusted, 10, "the window moves", poll_s=0.01)


def test_a_killed_session_is_replaced_at_once_under_a_new_key(scene: Scene, keeper: Keeper) -> None:
    slow = Keeper(Settings(database_url=scene.url, lease_s=60, lease_renew_s=20), "slow@host", [])
    slow.start_lease()
    slow.start()
    old = scene.worker_row(slow.worker_id)
    worker_id = slow.worker_id
    started = boottime_s()
    assert kill_sessions(scene.eyes, "deadsure keeper slow@host") == 1
    wait_for(lambda: scene.worker_row(worker_id)["lock_key"] != old["lock_key"], 10, "a new lock key", poll_s=0.005)
    assert boottime_s() - started < 1.5  # long before the renewal was due, and before two looks of a sweeper
    row = scene.worker_row(worker_id)
    assert scene.locked(row["lock_key"])
    assert row["locked_at"] > old["locked_at"]
    wait_for(lambda: scene.worker_row(worker_id)["lease_until"] > old["lease_until"], 5, "renewed", poll_s=0.01)
    assert slow.worker_id == worker_id
    slow.stop()
    assert keeper.worker_id != worker_id


def test_a_lease_that_was_taken_away_begins_again_under_a_new_name(scene: Scene, keeper: Keeper) -> None:
    keeper.start()
    old = keeper.worker_id
    scene.lose_id(old)
    wait_for(lambda: keeper.shared.read()[0] != old, 10, "the keeper notices", poll_s=0.01)
    assert keeper.worker_id != old
    assert keeper.shared.read()[0] == keeper.worker_id
    fresh = scene.worker_row(keeper.worker_id)
    assert (fresh["lost_at"], fresh["stopped_at"]) == (None, None)
    assert scene.locked(fresh["lock_key"])
    assert not scene.locked(scene.worker_row(old)["lock_key"])


def test_a_lease_that_was_taken_while_the_session_was_away(scene: Scene, keeper: Keeper) -> None:
    old = keeper.worker_id
    scene.lose_id(old)
    kill_sessions(scene.eyes, SESSION)
    keeper.start()
    wait_for(lambda: keeper.worker_id != old and keeper.shared.read()[0] == keeper.worker_id, 10, "a new name")
    assert scene.worker_row(old)["lost_cause"] == "stalled"
    assert scene.worker_row(keeper.worker_id)["lost_at"] is None


def test_a_late_renewal_that_nobody_acted_on_is_fine(scene: Scene, keeper: Keeper) -> None:
    rows(scene.eyes, "UPDATE workers SET lease_until = clock_timestamp() - interval '1 s'")
    old = keeper.worker_id
    keeper.start()
    wait_for(lambda: scene.ask("SELECT lease_until > clock_timestamp() FROM workers"), 10, "renewed", poll_s=0.01)
    assert keeper.worker_id == old


def test_trust_runs_out_when_renewals_do_not_come_through(scene: Scene, keeper: Keeper) -> None:
    """Somebody holds the row: the renewal is on its way for longer than the lease, and the worker knows."""
    holder = scene.connect()
    keeper.start()
    rows(holder, "BEGIN; SELECT FROM workers FOR UPDATE")
    wait_for(lambda: keeper.shared.read()[1] < boottime_s(), LEASE_S + 5, "the window is over", poll_s=0.05)
    rows(holder, "ROLLBACK")
    wait_for(lambda: keeper.shared.read()[1] > boottime_s(), 10, "trusted again", poll_s=0.05)


def test_stopping_ends_the_lease(scene: Scene, keeper: Keeper) -> None:
    keeper.start()
    keeper.stop()
    row = scene.worker_row(keeper.worker_id)
    assert row["stopped_at"] is not None
    wait_for(lambda: not scene.locked(row["lock_key"]), 5, "the lock is free")


def test_a_worker_that_still_has_jobs_does_not_leave(scene: Scene, keeper: Keeper) -> None:
    scene.job(state="running", worker_id=str(keeper.worker_id))
    keeper.start()
    keeper.stop()
    assert scene.worker_row(keeper.worker_id)["stopped_at"] is None


def test_stopping_while_the_database_is_away(scene: Scene, keeper: Keeper) -> None:
    keeper.start()
    kill_sessions(scene.eyes, SESSION)
    keeper.stop()
    assert not keeper.is_alive()


def test_a_database_that_is_away_at_the_start_is_told() -> None:
    away = Settings(database_url="postgresql+psycopg2://x@127.0.0.1:1/x")
    made = Keeper(away, NODE, [])
    with pytest.raises(psycopg2.OperationalError):
        made.start_lease()
    made.stop()


def test_a_setting_says_that_sessions_are_pooled(scene: Scene) -> None:
    made = Keeper(Settings(database_url=scene.url, pooled=True), "pooled@host", [])
    made.start_lease()
    assert scene.worker_row(made.worker_id)["pooled"] is True
    made.stop()


# the memory that children share


IDS = [uuid.UUID(int=int(f"{n:02x}" * 16, 16)) for n in range(1, 250)]


def read_until(shared: SharedLease, ended: Event, torn: multiprocessing.Queue[tuple[int, int, bool]]) -> None:
    reads = bad = 0
    seen = set()
    while not ended.is_set() or reads == 0:
        worker_id, trusted_until = shared.read()
        reads += 1
        seen.add(worker_id)
        bad += worker_id != IDS[int(trusted_until) % len(IDS)]
    torn.put((bad, reads, len(seen) > 1))


def test_a_forked_reader_never_sees_a_torn_lease() -> None:
    shared = SharedLease()
    shared.write(IDS[0], 0.0)
    context = multiprocessing.get_context("fork")
    ended, torn = context.Event(), context.Queue()
    readers = [context.Process(target=read_until, args=(shared, ended, torn)) for _ in range(2)]
    for reader in readers:
        reader.start()
    deadline = boottime_s() + 1.5
    number = 0
    while boottime_s() < deadline:
        for _ in range(1000):
            number += 1
            shared.write(IDS[number % len(IDS)], float(number))
    ended.set()
    for bad, reads, moved in [torn.get(timeout=20) for _ in readers]:
        assert bad == 0, f"{bad} of {reads} reads were torn"
        assert moved
    for reader in readers:
        reader.join(10)
        assert reader.exitcode == 0


def test_a_child_that_was_forked_earlier_sees_the_new_name() -> None:
    shared = SharedLease()
    shared.write(IDS[0], 1.0)
    reader, writer = os.pipe()
    asked, ask = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(asked, 1)
        worker_id, trusted_until = shared.read()
        os.write(writer, f"{worker_id} {trusted_until}".encode())
        os._exit(0)
    shared.write(IDS[7], 2.5)
    os.write(ask, b"x")
    assert os.read(reader, 100).decode() == f"{IDS[7]} 2.5"
    os.waitpid(pid, 0)
    for descriptor in (reader, writer, asked, ask):
        os.close(descriptor)
