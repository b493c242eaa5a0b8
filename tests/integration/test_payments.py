"""The payment service over real HTTP: each way to fail, its class, and what the status question says after it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import httpx
import pytest
from pydantic import ValidationError

from app import settings as app_settings
from app.domain.errors import UnreadableCharge
from app.domain.payments import ChargeAccount, charge, check, classify
from app.effects import Answer
from app.errors import ConfigurationError
from app.failures import Failure, retry_after_s
from app.failures import classify as classify_failure
from tests.faults.far_side.payment_service import PaymentService


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[PaymentService]:
    with PaymentService() as made:
        monkeypatch.setenv("PAYMENTS_URL", made.url)
        monkeypatch.setenv("DEADSURE_CALL_TIMEOUT_S", "1")
        app_settings.settings.cache_clear()
        yield made
    app_settings.settings.cache_clear()


def payload(**changed: Any) -> ChargeAccount:
    return ChargeAccount(**{"charge_id": "c-1", "account_id": 7, "amount_cents": 1250, "currency": "EUR", **changed})


def ask(key: str) -> Answer:
    return check("charge", key, payload()).answer


def test_a_charge_and_the_same_key_again(service: PaymentService) -> None:
    key = f"{uuid4()}:charge"
    assert ask(key) is Answer.NOT_DONE
    first = charge(payload(), key)
    assert charge(payload(), key) == first == {"reference": "ch_0"}
    assert check("charge", key, payload()).result == first
    (made,) = service.applied
    assert (made.key, made.charge_id, made.amount_cents, made.currency) == (key, "c-1", 1250, "EUR")


@pytest.mark.parametrize(
    ("behaviour", "error", "failure", "after"),
    [
        ("500", httpx.HTTPStatusError, Failure.TRANSIENT, Answer.NOT_DONE),
        ("503 5", httpx.HTTPStatusError, Failure.TRANSIENT, Answer.NOT_DONE),
        ("429 5", httpx.HTTPStatusError, Failure.TRANSIENT, Answer.NOT_DONE),
        ("409", httpx.HTTPStatusError, Failure.UNCERTAIN, Answer.NOT_DONE),
        ("422", httpx.HTTPStatusError, Failure.PERMANENT, Answer.NOT_DONE),
        ("401", httpx.HTTPStatusError, Failure.PERMANENT, Answer.NOT_DONE),
        ("drop before applying", httpx.TransportError, Failure.UNCERTAIN, Answer.NOT_DONE),
        ("500 after applying", httpx.HTTPStatusError, Failure.TRANSIENT, Answer.DONE),
        ("drop after applying", httpx.TransportError, Failure.UNCERTAIN, Answer.DONE),
        ("time out after applying", httpx.ReadTimeout, Failure.UNCERTAIN, Answer.DONE),
        ("nonsense after applying", UnreadableCharge, Failure.UNCERTAIN, Answer.DONE),
    ],
)
def test_how_it_ends(
    service: PaymentService, behaviour: str, error: type[Exception], failure: Failure, after: Answer
) -> None:
    service.behaviour.then("c-1", behaviour)
    with pytest.raises(error) as caught:
        charge(payload(), "key")
    assert classify_failure(caught.value, classify) is failure
    assert retry_after_s(caught.value) == (5 if behaviour.endswith(" 5") else None)
    assert ask("key") is after
    assert len(service.applied) == (after is Answer.DONE)
    charge(payload(), "key")
    assert len(service.applied) == 1


def test_a_service_that_is_down(service: PaymentService) -> None:
    service.stop()
    with pytest.raises(httpx.ConnectError) as caught:
        charge(payload(), "key")
    assert classify_failure(caught.value) is Failure.TRANSIENT
    assert ask("key") is Answer.UNKNOWN


@pytest.mark.parametrize("status", ["500", "429", "401", "302"])
def test_a_status_question_that_gets_no_answer_is_unknown(service: PaymentService, status: str) -> None:
    charge(payload(), "key")
    service.behaviour.always("GET c-1", status)
    assert ask("key") is Answer.UNKNOWN


def test_the_password_of_the_service_is_not_logged(service: PaymentService, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        charge(payload(), "key")
    assert service.url.partition("@")[2] in caplog.text
    for secret in ("t0ken", "merchant", "1250", "EUR"):
        assert secret not in caplog.text


@pytest.mark.parametrize("url", ["", "payments.example.com", "ftp://x/y", "http://"])
def test_a_url_that_names_no_service(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAYMENTS_URL", url)
    app_settings.settings.cache_clear()
    with pytest.raises(ConfigurationError, match="PAYMENTS_URL"):
        charge(payload(), "key")
    app_settings.settings.cache_clear()


@pytest.mark.parametrize(
    "wrong",
    [
        {"amount_cents": 0},
        {"amount_cents": -1},
        {"amount_cents": 2**63},
        {"amount_cents": 1.5},
        {"amount_cents": "1"},
        {"currency": "eur"},
        {"currency": "EUR\n"},
        {"charge_id": ""},
        {"charge_id": "../x"},
        {"charge_id": "a\r\nb"},
        {"charge_id": "x" * 65},
        {"account_id": 0},
        {"card": "4242"},
    ],
)
def test_payloads_that_are_refused_at_submit(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        payload(**wrong)
