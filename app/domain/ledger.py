"""`ledger.post`: an amount on an account, in the same database and the same commit as the job's success."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

from psycopg2.errorcodes import FOREIGN_KEY_VIOLATION
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from sqlalchemy import insert
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from app.domain.errors import UnknownAccount
from db.business import LedgerEntry

BIGINT_MAX = 2**63 - 1

# A Core insert, inline: one statement without RETURNING and without the unit of work.
INSERT = insert(LedgerEntry.__table__).inline()  # type: ignore[arg-type]  # __table__ is a Table here


def not_zero(amount: int) -> int:
    """Return `amount`; raises ValueError when it is zero."""
    if amount == 0:
        raise ValueError("an entry moves money: the amount must not be 0")
    return amount


def storable(text: str) -> str:
    r"""Return `text`; raises ValueError when it has a NUL character, which PostgreSQL cannot store."""
    if "\0" in text:
        raise ValueError("text must not contain a NUL character")
    return text


class PostEntry(BaseModel):
    """Payload of `ledger.post`; negative amounts are credits, in the currency's minor unit."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    account_id: Annotated[int, Field(gt=0, le=BIGINT_MAX)]
    amount_cents: Annotated[int, Field(ge=-BIGINT_MAX - 1, le=BIGINT_MAX), AfterValidator(not_zero)]
    currency: Annotated[str, Field(pattern=r"^[A-Z]{3}$")]
    memo: Annotated[str, Field(max_length=200), AfterValidator(storable)] = ""


def post(session: Session, job_id: UUID, payload: PostEntry) -> str:
    """Insert one ledger entry in the session's transaction and return its result key.

    Raises UnknownAccount; the transaction is then aborted up to the caller's savepoint.
    """
    row = {"job_id": job_id, **payload.model_dump()}
    try:
        session.execute(INSERT, row)
    except IntegrityError as error:
        if getattr(error.orig, "pgcode", None) == FOREIGN_KEY_VIOLATION:
            raise UnknownAccount(payload.account_id) from error
        raise
    return f"ledger:{job_id}"
