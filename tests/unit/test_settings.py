"""Settings: read once, cross-checked, and refused with the name of the variable."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from app.errors import ConfigurationError
from app.settings import Settings, convert, read


def test_an_empty_environment_gives_the_defaults() -> None:
    assert read({}) == Settings()
    assert read({"DEADSURE_LEASE_S": "", "UNRELATED": "1"}) == Settings()


@pytest.mark.parametrize(("text", "port"), [("", None), ("0", 0), ("9300", 9300)])
def test_a_metrics_port_may_be_unset_or_any_free_one(text: str, port: int | None) -> None:
    assert read({"DEADSURE_METRICS_PORT": text}).metrics_port == port


def test_each_kind_of_value_is_converted() -> None:
    made = read(
        {
            "DATABASE_URL": "postgresql+psycopg2://a@b/c",
            "REPORTS_DIR": "/srv/reports",
            "DEADSURE_LEASE_S": "60",
            "DEADSURE_WINDOW": "7",
            "DEADSURE_POOLED": "yes",
        }
    )
    assert (made.database_url, made.reports_dir) == ("postgresql+psycopg2://a@b/c", Path("/srv/reports"))
    assert (made.lease_s, made.window, made.pooled) == (60.0, 7, True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DEADSURE_LEASE_S", "soon"),
        ("DEADSURE_LEASE_S", "nan"),
        ("DEADSURE_LEASE_S", "inf"),
        ("DEADSURE_LEASE_S", "0"),
        ("DEADSURE_LEASE_S", "10"),  # less than three renewals
        ("DEADSURE_WINDOW", "1.5"),
        ("DEADSURE_WINDOW", "-1"),
        ("DEADSURE_BATCH", "0"),
        ("DEADSURE_METRICS_PORT", "-1"),
        ("DEADSURE_METRICS_PORT", "65536"),
        ("DEADSURE_METRICS_PORT", "http"),
        ("DEADSURE_POOLED", "maybe"),
        ("DEADSURE_LOG", "xml"),
        ("DEADSURE_LOG_LEVEL", "LOUD"),
        ("DEADSURE_RESEND_FIRST_S", "1000"),  # longer than the longest gap
        ("DEADSURE_RESEND_FIRST_S", "0.5"),  # shorter than the poll
        ("DEADSURE_SWEEP_S", "31"),
        ("DEADSURE_PREFETCH", "1001"),
        ("DEADSURE_CONSUMER_TIMEOUT_S", "29"),
        ("DEADSURE_SHUTDOWN_GRACE_S", "1801"),
        ("DEADSURE_POLL_S", "-0.1"),
        ("DEADSURE_NO_SUCH_THING", "1"),
        ("DEADSURE_lease_s", "30"),
    ],
)
def test_a_wrong_value_names_its_variable(name: str, value: str) -> None:
    with pytest.raises(ConfigurationError, match=name):
        read({name: value})


def test_every_setting_has_a_variable_a_default_and_a_line() -> None:
    described = Settings.describe()
    names = [name for name, _, _ in described]
    assert len(set(names)) == len(names)
    assert all(name.isupper() for name in names)
    assert all(doc for _, _, doc in described)


def test_durations_say_so_in_both_names() -> None:
    for field, (name, _, _) in zip(Settings.__dataclass_fields__, Settings.describe(), strict=True):
        assert field.endswith("_s") is name.endswith("_S")


def test_settings_do_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        Settings().lease_s = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "make services"),
        ("postgresql://a@b/c", "names the driver 'postgresql'"),
        ("mysql://a@b/c", "names the driver 'mysql'"),
        ("::", "cannot be read"),
    ],
)
def test_an_unusable_database_url_says_what_to_do(url: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as refused:
        Settings(database_url=url).need_database()
    assert "secret" not in str(refused.value)


def test_an_unusable_database_url_keeps_its_password() -> None:
    with pytest.raises(ConfigurationError) as refused:
        Settings(database_url="postgresql://a:secret@b:port/c").need_database()
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(("url", "said"), [("", "make services"), ("kafka://x", "'kafka'"), ("nonsense", "no scheme")])
def test_an_unusable_broker_url_says_what_to_do(url: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Settings(broker_url=url).need_broker()


def test_a_broker_url_without_a_scheme_keeps_its_password() -> None:
    with pytest.raises(ConfigurationError) as refused:
        Settings(broker_url="user:secret@host").need_broker()
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "amqp"), [("amqp://x", True), ("amqps://x", True), ("redis://x", False), ("rediss://x", False)]
)
def test_which_broker_has_a_dead_letter_exchange(url: str, amqp: bool) -> None:
    assert Settings(broker_url=url).need_broker() == url
    assert Settings(broker_url=url).broker_is_amqp is amqp


@pytest.mark.parametrize(("text", "value"), [("1", True), ("TRUE", True), ("no", False), ("0", False)])
def test_booleans(text: str, value: bool) -> None:
    assert convert(text, bool) is value
