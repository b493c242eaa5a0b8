"""The business side against a real PostgreSQL: seeds, report exports, the ledger."""

from __future__ import annotations

import csv
import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from pydantic import ValidationError
from sqlalchemy import Engine, event, text
from sqlalchemy.orm import Session

from app.domain import reports as domain_reports
from app.domain import vocabulary
from app.domain.atomic_file import atomic_file
from app.domain.errors import UnknownAccount
from app.domain.ledger import PostEntry, post
from app.domain.months import before, bounds
from app.domain.reports import ExportedFile, ExportReport, export_month, record_export
from app.domain.seed import Seeded, seed
from app.errors import UnrecoverableError
from tests.conftest import Scale

ROOT = Path(__file__).parents[2]
MONTH = "2026-10"
WIDE_FORMULA = "\N{FULLWIDTH EQUALS SIGN}1+1"
COLUMNS = [
    "order_id",
    "ordered_at",
    "status",
    "sku",
    "quantity",
    "unit_price_cents",
    "total_cents",
    "currency",
    "note",
]
EXPORT = """
import resource, sys
from pathlib import Path
from uuid import UUID
from sqlalchemy import create_engine
from app.domain.reports import export_month

engine = create_engine(sys.argv[1])
def export(month, **hook):
    with engine.connect() as connection:
        return export_month(connection, Path(sys.argv[2]), UUID(sys.argv[3]), 1, month, **hook)
def wait():
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def reports(tmp_path: Path) -> Path:
    return tmp_path / "reports"


def plant(engine: Engine, accounts: int = 3, orders: int = 300, months: tuple[str, ...] = (MONTH,)) -> Seeded:
    with engine.begin() as connection:
        return seed(connection, accounts, orders, months=months)


def export(engine: Engine, reports: Path, job_id: UUID, account_id: int = 1, **hook: Any) -> ExportedFile:
    with engine.connect() as connection:
        return export_month(connection, reports, job_id, account_id, MONTH, **hook)


def add_order(engine: Engine, *, at: str = "2026-10-05 12:00+00", sku: str = "SKU", note: str = "") -> None:
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO orders"
                " (account_id, ordered_at, sku, quantity, unit_price_cents, total_cents, note)"
                " VALUES (1, :at, :sku, 2, 150, 300, :note)"
            ),
            {"at": at, "sku": sku, "note": note},
        )


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir()) if directory.exists() else []


def neutral(cell: str) -> str:
    formula = cell.lstrip().startswith(("=", "+", "-", "@", WIDE_FORMULA[0]))
    formula = formula or cell.startswith(("\t", "\r", "\n"))
    return "'" + cell if formula else cell


def python(engine: Engine, reports: Path, job_id: UUID, script: str) -> subprocess.Popen[str]:
    url = engine.url.render_as_string(hide_password=False)
    return subprocess.Popen(
        [sys.executable, "-c", EXPORT + script, url, str(reports), str(job_id)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def paused_export(engine: Engine, reports: Path) -> Iterator[Callable[[UUID], subprocess.Popen[str]]]:
    """Start exports in processes of their own that stop between the last byte and the rename."""
    started: list[subprocess.Popen[str]] = []

    def start(job_id: UUID) -> subprocess.Popen[str]:
        process = python(engine, reports, job_id, f"export({MONTH!r}, before_publish=wait)")
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


# Reports


def test_file_holds_exactly_the_orders_of_the_account_and_month(engine: Engine, reports: Path) -> None:
    plant(engine, orders=900, months=("2026-09", MONTH, "2026-11"))
    job_id = uuid4()
    exported = export(engine, reports, job_id, account_id=2)

    start, end = bounds(MONTH)
    with engine.connect() as connection:
        stored = connection.execute(
            text(
                "SELECT order_id, ordered_at, status, sku, quantity, unit_price_cents, total_cents,"
                " currency, note FROM orders JOIN accounts USING (account_id)"
                " WHERE account_id = 2 AND ordered_at >= :start AND ordered_at < :end"
                " ORDER BY ordered_at, order_id"
            ),
            {"start": start, "end": end},
        ).all()
    expected = [
        {
            "order_id": str(row.order_id),
            "ordered_at": row.ordered_at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "status": row.status,
            "sku": neutral(row.sku),
            "quantity": str(row.quantity),
            "unit_price_cents": str(row.unit_price_cents),
            "total_cents": str(row.total_cents),
            "currency": row.currency,
            "note": neutral(row.note),
        }
        for row in stored
    ]
    content = (reports / f"{job_id}.csv").read_bytes()
    assert expected
    assert read(exported.path) == expected
    assert exported == ExportedFile(
        result_key=f"reports/{job_id}.csv",
        rows=len(expected),
        bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        path=reports / f"{job_id}.csv",
    )
    assert names(reports) == [f"{job_id}.csv"]


def test_long_export_tells_how_many_rows_are_written(
    engine: Engine, reports: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(domain_reports, "PROGRESS_ROWS", 2)
    plant(engine, orders=0)
    for note in ("a", "two\nlines", "", "d", "e"):  # rows are counted, not lines
        add_order(engine, at="2026-10-05", note=note)
    told: list[tuple[int, int]] = []
    plain, watched = (
        export(engine, reports, uuid4()),
        export(engine, reports, uuid4(), on_rows=lambda rows, total: told.append((rows, total))),
    )
    assert told == [(0, 5), (2, 5), (4, 5)]
    assert (watched.rows, watched.sha256) == (plain.rows, plain.sha256)


def test_month_without_orders_is_a_header(engine: Engine, reports: Path) -> None:
    plant(engine, orders=0)
    exported = export(engine, reports, uuid4())
    assert exported.rows == 0
    assert exported.path.read_text() == ",".join(COLUMNS) + "\n"


def test_months_begin_at_midnight_utc(engine: Engine, reports: Path) -> None:
    plant(engine, orders=0)
    for at in ("2026-09-30 23:59:59.999999+00", "2026-10-01 00:00+00"):
        add_order(engine, at=at, note="before" if "09-30" in at else "first")
    for at in ("2026-10-31 23:59:59.999999+00", "2026-11-01 00:00+00"):
        add_order(engine, at=at, note="last" if "10-31" in at else "after")
    assert [row["note"] for row in read(export(engine, reports, uuid4()).path)] == ["first", "last"]


@pytest.mark.parametrize(
    "setting",
    ["TimeZone TO 'Pacific/Apia'", "DateStyle TO 'SQL, DMY'", "client_encoding TO 'LATIN1'"],
)
def test_session_settings_do_not_change_a_byte(engine: Engine, reports: Path, setting: str) -> None:
    plant(engine)
    plain = export(engine, reports, uuid4())
    with engine.connect() as connection:
        connection.execute(text(f"SET LOCAL {setting}"))
        other = export_month(connection, reports, uuid4(), 1, MONTH)
    assert (other.sha256, other.rows) == (plain.sha256, plain.rows)


def test_awkward_text_comes_back_through_the_csv_module(engine: Engine, reports: Path) -> None:
    plant(engine, orders=0)
    awkward = [
        *vocabulary.NOTES,
        WIDE_FORMULA,
        "  =1+1",
        "\n+1",
        "a\r\nb\rc\nd",
        "x" * 100_000,
        "\x01\x7f",
        "'=1",
    ]
    for note in awkward:
        add_order(engine, note=note, sku=note[:64])
    rows = read(export(engine, reports, uuid4()).path)
    assert [row["note"] for row in rows] == [neutral(note) for note in awkward]
    assert [row["sku"] for row in rows] == [neutral(note[:64]) for note in awkward]
    assert not any(row["note"].startswith(("=", "+", "-", "@", "\t", "\r", "\n")) for row in rows)


def test_unknown_account_is_permanent_and_writes_no_file(engine: Engine, reports: Path) -> None:
    with pytest.raises(UnknownAccount, match="no account 41") as caught:
        export(engine, reports, uuid4(), account_id=41)
    assert isinstance(caught.value, UnrecoverableError)
    assert names(reports) == []


@pytest.mark.parametrize(
    "month", ["2026-13", "2026-00", "2026-1", "2026-10\n", "26-10", "٢٠٢٦-10", "7; DROP", "../../x", ""]
)
def test_month_that_is_none_is_refused(engine: Engine, reports: Path, month: str) -> None:
    with pytest.raises(ValidationError, match="a month is written YYYY-MM"):
        ExportReport(account_id=7, month=month)
    with engine.connect() as connection, pytest.raises(ValueError, match="YYYY-MM"):
        export_month(connection, reports, uuid4(), 1, month)
    assert names(reports) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"account_id": "7; DROP"},
        {"account_id": "7"},
        {"account_id": 0},
        {"account_id": -1},
        {"account_id": True},
        {"account_id": 7.0},
        {"account_id": 2**63},
        {"month": 202610},
        {"path": "../x"},
    ],
)
def test_export_payload_is_strict(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ExportReport.model_validate({"account_id": 7, "month": MONTH} | wrong)


def test_job_id_that_is_no_uuid_cannot_name_a_file(engine: Engine, reports: Path) -> None:
    plant(engine)
    with pytest.raises(ValueError, match="UUID"):
        export(engine, reports, "../../etc/cron.d/x")  # type: ignore[arg-type]  # what a careless caller does
    assert names(reports) == []


def test_exception_before_the_rename_leaves_the_old_file_and_nothing_else(engine: Engine, reports: Path) -> None:
    plant(engine)
    job_id = uuid4()
    first = export(engine, reports, job_id)
    add_order(engine)

    def lost() -> None:
        assert len(names(reports)) == 2
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(engine, reports, job_id, before_publish=lost)
    assert names(reports) == [f"{job_id}.csv"]
    assert hashlib.sha256(first.path.read_bytes()).hexdigest() == first.sha256
    assert export(engine, reports, job_id).rows == first.rows + 1


def test_full_disk_leaves_no_file_and_a_usable_connection(engine: Engine, reports: Path) -> None:
    plant(engine, accounts=1, orders=50_000)
    script = f"""
from sqlalchemy import text
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
with engine.connect() as connection:
    try:
        export_month(connection, Path(sys.argv[2]), UUID(sys.argv[3]), 1, {MONTH!r})
    except OSError as error:
        print(error.errno, connection.scalar(text("SELECT 41 + 1")))
"""
    process = python(engine, reports, uuid4(), script)
    output, _ = process.communicate(timeout=60)
    assert output == f"{errno.EFBIG} 42\n"
    assert names(reports) == []


def test_kill_before_the_rename_leaves_no_report_and_the_next_attempt_cleans_up(
    engine: Engine, reports: Path, paused_export: Callable[[UUID], subprocess.Popen[str]]
) -> None:
    plant(engine)
    job_id = uuid4()
    process = paused_export(job_id)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (left,) = names(reports)
    assert left.startswith(f".{job_id}.")
    export(engine, reports, uuid4())
    assert left in names(reports), "another job's temporary is not this job's business"
    export(engine, reports, job_id)
    assert left not in names(reports)
    assert not [name for name in names(reports) if name.endswith(".tmp")]


def test_second_attempt_leaves_the_temporary_of_a_frozen_first_one(
    engine: Engine, reports: Path, paused_export: Callable[[UUID], subprocess.Popen[str]]
) -> None:
    plant(engine)
    job_id = uuid4()
    process = paused_export(job_id)
    process.send_signal(signal.SIGSTOP)
    exported = export(engine, reports, job_id)
    assert len(names(reports)) == 2
    process.send_signal(signal.SIGCONT)
    process.communicate()
    assert process.returncode == 0
    assert names(reports) == [f"{job_id}.csv"]
    assert hashlib.sha256(exported.path.read_bytes()).hexdigest() == exported.sha256


def test_reader_never_sees_half_a_file(engine: Engine, reports: Path) -> None:
    plant(engine, accounts=1, orders=20_000)
    job_id, seen, done = uuid4(), set[str](), threading.Event()
    path = reports / f"{job_id}.csv"

    def look() -> None:
        while not done.is_set():
            try:
                seen.add(hashlib.sha256(path.read_bytes()).hexdigest())
            except FileNotFoundError:
                seen.add("absent")

    reader = threading.Thread(target=look)
    reader.start()
    try:
        shas = {export(engine, reports, job_id).sha256 for _ in range(10)}
    finally:
        done.set()
        reader.join()
    assert len(shas) == 1
    assert seen - {"absent"} == shas


def test_half_written_bytes_are_not_visible(tmp_path: Path) -> None:
    target = tmp_path / "report.csv"
    with atomic_file(target) as file:
        file.write(b"x" * 5_000_000)
        assert not target.exists()
    assert (target.stat().st_size, file.size) == (5_000_000, 5_000_000)


@pytest.mark.slow
@pytest.mark.soak
def test_memory_is_flat_however_many_rows(engine: Engine, reports: Path, scale: Scale) -> None:
    plant(engine, accounts=1, orders=scale.rows)
    script = f"""
def peak_kib():  # ru_maxrss would start with the peak of the parent
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])
export("2026-09")
before = peak_kib()
exported = export({MONTH!r})
print(exported.rows, exported.bytes, peak_kib() - before)
"""
    process = python(engine, reports, uuid4(), script)
    output, _ = process.communicate(timeout=120)
    rows, size, grown_kib = map(int, output.split())
    assert rows == scale.rows
    assert size > 50 * scale.rows
    assert grown_kib < 8 * 1024


def test_recorded_exports_can_be_counted_double(engine: Engine, reports: Path) -> None:
    plant(engine)
    job_id = uuid4()
    exported = export(engine, reports, job_id)
    for _ in range(2):
        with Session(engine) as session, session.begin():
            record_export(session, job_id, exported)
    with Session(engine) as session:
        record_export(session, job_id, exported)  # rolled back
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT job_id, result_key, rows, bytes, sha256 FROM report_exports"))
        assert [tuple(row) for row in rows] == [
            (job_id, exported.result_key, exported.rows, exported.bytes, exported.sha256)
        ] * 2


# Ledger


def test_post_is_one_statement_in_the_callers_transaction(engine: Engine) -> None:
    plant(engine, orders=0)
    job_id, statements = uuid4(), list[str]()
    entry = PostEntry(account_id=2, amount_cents=-(2**63), currency="EUR", memo='Zoë, "=1+1"\n%s')
    with engine.connect() as connection, Session(connection) as session:
        event.listen(connection, "before_cursor_execute", lambda *a: statements.append(a[2]))
        assert post(session, job_id, entry) == f"ledger:{job_id}"
        session.rollback()
        post(session, job_id, entry)
        session.commit()
    assert [statement.split(" ", 1)[0] for statement in statements] == ["INSERT", "INSERT"]
    assert not any("RETURNING" in statement for statement in statements)
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT job_id, account_id, amount_cents, currency, memo FROM ledger_entries"))
        assert [tuple(row) for row in rows] == [(job_id, 2, -(2**63), "EUR", 'Zoë, "=1+1"\n%s')]


def test_post_to_an_unknown_account_can_go_back_to_the_savepoint(engine: Engine) -> None:
    plant(engine, orders=0)
    with Session(engine) as session, session.begin():
        with pytest.raises(UnknownAccount, match="no account 99"), session.begin_nested():
            post(session, uuid4(), PostEntry(account_id=99, amount_cents=1, currency="EUR"))
        post(session, uuid4(), PostEntry(account_id=1, amount_cents=1, currency="EUR"))
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM ledger_entries")) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"amount_cents": 0},
        {"amount_cents": 2**63},
        {"amount_cents": -(2**63) - 1},
        {"amount_cents": 1.5},
        {"amount_cents": "1"},
        {"currency": "eur"},
        {"currency": "EUR\n"},
        {"memo": "x" * 201},
        {"memo": "a\0b"},
        {"account_id": 0},
        {"rate": 1},
    ],
)
def test_entry_payload_is_strict(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        PostEntry.model_validate({"account_id": 1, "amount_cents": 5, "currency": "EUR"} | wrong)


def test_entry_payload_takes_the_longest_memo_and_the_smallest_amount(engine: Engine) -> None:
    plant(engine, orders=0)
    entry = PostEntry(account_id=1, amount_cents=2**63 - 1, currency="EUR", memo="🎁" * 200)
    with Session(engine) as session, session.begin():
        post(session, uuid4(), entry)


# Seed


def digest(engine: Engine) -> str:
    with engine.connect() as connection:
        rows = [
            tuple(row)
            for table in ("accounts", "orders")
            for row in connection.execute(text(f"SELECT * FROM {table} ORDER BY 1"))  # two constants
        ]
    return hashlib.sha256(repr(rows).encode()).hexdigest()


def test_seed_of_size_zero_is_empty(engine: Engine) -> None:
    assert plant(engine, 0, 0) == Seeded(0, 0, 0, 0, ())


def test_seed_again_adds_nothing_and_more_fills_up(engine: Engine) -> None:
    assert plant(engine, 5, 100) == Seeded(5, 100, 5, 100, (MONTH,))
    first = digest(engine)
    assert plant(engine, 5, 100) == Seeded(5, 100, 0, 0, (MONTH,))
    assert plant(engine, 2, 0) == Seeded(5, 100, 0, 0, (MONTH,))
    assert digest(engine) == first
    assert plant(engine, 8, 150) == Seeded(8, 150, 3, 50, (MONTH,))


def test_same_numbers_give_the_same_rows(engine: Engine) -> None:
    digests = []
    for rng_seed, timezone in ((1, "UTC"), (1, "America/New_York"), (2, "UTC")):
        with engine.begin() as connection:
            connection.execute(text("TRUNCATE accounts RESTART IDENTITY CASCADE"))
            connection.execute(text(f"SET LOCAL TimeZone TO '{timezone}'"))
            seed(connection, 20, 500, rng_seed, months=("2026-03", "2026-11"))
        digests.append(digest(engine))
    assert digests[0] == digests[1]
    assert digests[0] != digests[2]


def test_two_seeds_at_once_make_one(engine: Engine) -> None:
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: plant(engine, 10, 1000), range(2)))
    assert sorted(done.orders_added for done in both) == [0, 1000]


def test_seed_survives_gaps_in_the_numbers_of_accounts(engine: Engine) -> None:
    plant(engine, 6, 0)
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM accounts WHERE account_id IN (2, 5)"))
    assert plant(engine, 10, 200).accounts_added == 6


def test_default_months_are_the_last_twelve_whole_ones(engine: Engine) -> None:
    with engine.begin() as connection:
        done = seed(connection, 2, 240)
        today = connection.execute(text("SELECT clock_timestamp()")).scalar_one().astimezone(UTC)
    assert done.months == before(today, 12)
    newest = today.replace(day=1) - timedelta(days=1)
    assert done.months[-1] == newest.strftime("%Y-%m")


def test_before_crosses_years() -> None:
    assert before(datetime(2026, 1, 31, tzinfo=UTC), 2) == ("2025-11", "2025-12")
    assert before(datetime(2026, 11, 30, tzinfo=UTC), 1) == (MONTH,)


def test_seeded_text_is_as_awkward_as_real_text(engine: Engine) -> None:
    plant(engine, 300, 5000)
    with engine.connect() as connection:
        people = "".join(connection.scalars(text("SELECT name FROM accounts")))
        notes = "".join(connection.scalars(text("SELECT note FROM orders")))
        skus = "".join(connection.scalars(text("SELECT DISTINCT sku FROM orders")))
        emails = list(connection.scalars(text("SELECT email FROM accounts")))
    assert {",", '"', "'", "ü", "山"} <= set(people)
    assert {",", '"', "'", "\n", "\r", "\t", "\\", "=", "🎁"} <= set(notes)
    assert {",", '"', "Ü"} <= set(skus)
    assert all(email.isascii() for email in emails)


@pytest.mark.parametrize(
    ("accounts", "orders", "months"),
    [(-1, 0, (MONTH,)), (1, -1, (MONTH,)), (0, 1, (MONTH,)), (1, 1, ()), (1, 1, ("2026-13",))],
)
def test_impossible_seeds_are_refused(engine: Engine, accounts: int, orders: int, months: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"negative|at least one|YYYY-MM"):
        plant(engine, accounts, orders, months)


def test_seed_command_says_what_it_did(engine: Engine) -> None:
    environment = os.environ | {"DATABASE_URL": engine.url.render_as_string(hide_password=False)}
    command = [sys.executable, "-c", "from app.domain.cli import seed; seed()", "--accounts", "3"]

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *options],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    made = json.loads(run("--orders", "40", "--month", MONTH, "--json").stdout)
    assert made.pop("took_s") >= 0
    assert made == {
        "accounts": 3,
        "orders": 40,
        "accounts_added": 3,
        "orders_added": 40,
        "months": [MONTH],
    }
    assert run("--orders", "40").stdout.startswith("Nothing to add.\nThere are 3 accounts and 40 orders")
    refused = run("--orders", "50", "--month", "7; DROP")
    assert refused.returncode == 2
    assert "YYYY-MM" in refused.stderr
