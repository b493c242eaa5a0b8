"""`payments.charge`: an HTTP call with an idempotency key, and a question for its status by the same key.

POST /charges         Idempotency-Key: k   -> 2xx {"id": …}; the same key again answers the same, and charges nothing
GET  /charges/{key}                        -> 200 {"id": …} it was made, 404 it was not
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any
from urllib.parse import quote, urlsplit, urlunsplit
from uuid import UUID

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from sqlalchemy import insert, select
from sqlalchemy.orm import Session

from app.domain.errors import UnknownAccount, UnreadableCharge
from app.effects import Answer, Checked
from app.errors import ConfigurationError
from app.failures import Failure
from app.settings import settings
from db.business import Account, Charge

BIGINT_MAX = 2**63 - 1


class ChargeAccount(BaseModel):
    """Payload of `payments.charge`; the amount is in the currency's minor unit."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    charge_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,64}$")]
    account_id: Annotated[int, Field(gt=0, le=BIGINT_MAX)]
    amount_cents: Annotated[int, Field(gt=0, le=BIGINT_MAX)]
    currency: Annotated[str, Field(pattern=r"^[A-Z]{3}$")]


class ChargeMade(BaseModel):
    """What the payment service tells of a charge that it made; whatever else it tells is left alone."""

    id: Annotated[str, Field(min_length=1, max_length=200)]


def hold_account(session: Session, account_id: int) -> None:
    """Keep the account from being deleted until the session's transaction ends; raises UnknownAccount."""
    query = (
        select(Account.account_id).where(Account.account_id == account_id).with_for_update(read=True, key_share=True)
    )
    if session.scalar(query) is None:
        raise UnknownAccount(account_id)


def charge(payload: ChargeAccount, key: str) -> dict[str, Any]:
    """Charge the account under the idempotency key: `{"reference": …}`.

    Raises httpx.HTTPStatusError for any answer but success, another httpx.HTTPError when there was none, and
    UnreadableCharge.
    """
    with client() as http:
        answer = http.post("charges", json=payload.model_dump(), headers={"Idempotency-Key": key})
        answer.raise_for_status()
        return read(answer)


def check(_name: str, key: str, _payload: ChargeAccount) -> Checked:
    """Ask the payment service what became of a charge; anything but a clear answer is unknown."""
    try:
        with client() as http:
            answer = http.get(f"charges/{quote(key, safe='')}")
        if answer.status_code == HTTPStatus.NOT_FOUND:
            return Checked(Answer.NOT_DONE)
        if answer.status_code == HTTPStatus.OK:
            return Checked(Answer.DONE, read(answer))
    except (httpx.HTTPError, UnreadableCharge):
        pass
    return Checked(Answer.UNKNOWN)


def classify(error: BaseException) -> Failure | None:
    """A conflict means that an earlier request with this key is still at work: come back later and ask."""
    conflict = isinstance(error, httpx.HTTPStatusError) and error.response.status_code == HTTPStatus.CONFLICT
    return Failure.UNCERTAIN if conflict else None


def read(answer: httpx.Response) -> dict[str, Any]:
    """The result of the call; raises UnreadableCharge."""
    try:
        return {"reference": ChargeMade.model_validate_json(answer.content).id}
    except ValidationError:
        raise UnreadableCharge("the payment service named no charge") from None


def client() -> httpx.Client:
    """A client for PAYMENTS_URL; each silence is bounded. Raises ConfigurationError."""
    parts = urlsplit(settings().payments_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigurationError("PAYMENTS_URL is missing or unusable: write https://user:password@host/path")
    credentials, _, place = parts.netloc.rpartition("@")  # out of the URL, which httpx logs
    user, _, password = credentials.partition(":")
    return httpx.Client(
        base_url=urlunsplit(parts._replace(netloc=place)),
        auth=(user, password) if user else None,
        timeout=settings().call_timeout_s,
    )


def record_charge(session: Session, job_id: UUID, payload: ChargeAccount, reference: str) -> None:
    """Note the charge in `charges`, in the session's (the finishing) transaction."""
    session.execute(
        insert(Charge.__table__).inline(),  # type: ignore[arg-type]  # __table__ is a Table here
        {"job_id": job_id, "reference": reference, **payload.model_dump()},
    )
