"""`emails.welcome`: the mail itself. What people typed can neither add a header nor another recipient.

The Message-ID is derived from the job, so that a mail that was sent twice all the same can be recognized.
"""

from __future__ import annotations

import email.utils
import re
import unicodedata
from dataclasses import dataclass
from email.headerregistry import Address
from email.message import EmailMessage
from email.policy import SMTP
from typing import Annotated
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import insert, select
from sqlalchemy.orm import Session

from app.domain.errors import UndeliverableAddress, UnknownAccount
from db.business import Account, SentMail

# RFC 5321's dot-string and domain: no quoting, no comments, no literals, nothing that separates addresses.
ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
ADDRESS = re.compile(rf"{ATOM}(?:\.{ATOM})*@(?=.{{1,253}}$){LABEL}(?:\.{LABEL})*")
LOCAL_LIMIT = 64
SUBJECT = "Welcome"
BODY = """\
Hello {name},

your account is ready.
"""

# A welcome that comes weeks late is worse than none; one that was just missed is still on its way.
EXPECTED = """
SELECT '' AS scope, account_id::text AS key, jsonb_build_object('account_id', account_id) AS payload
  FROM accounts
 WHERE active AND created_at > clock_timestamp() - interval '7 days'
   AND created_at < clock_timestamp() - interval '10 minutes'
 ORDER BY created_at DESC
"""


class WelcomeMail(BaseModel):
    """Payload of `emails.welcome`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    account_id: Annotated[int, Field(gt=0, le=2**63 - 1)]


@dataclass(frozen=True)
class Mailbox:
    """Who gets the mail: `address` is one plain address, `name` one line of text."""

    name: str
    address: str


def recipient(session: Session, account_id: int) -> Mailbox:
    """The mailbox of an account, which stays while the transaction lasts.

    Raises UnknownAccount, UndeliverableAddress.
    """
    query = select(Account.name, Account.email).where(Account.account_id == account_id)
    row = session.execute(query.with_for_update(read=True, key_share=True)).one_or_none()
    if row is None:
        raise UnknownAccount(account_id)
    try:
        return Mailbox(one_line(row.name), plain_address(row.email))
    except ValueError:
        raise UndeliverableAddress(f"the e-mail of account {account_id} is no single address") from None


def one_line(text: str) -> str:
    """`text` with each run of white space and control characters made one space."""
    printable = (" " if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp") else c for c in text)
    return " ".join("".join(printable).split())


def plain_address(text: str) -> str:
    """One `local@domain`, the domain in ASCII (IDNA); raises ValueError for whatever could be read as anything else."""
    local, _, domain = text.rpartition("@")
    address = f"{local}@{domain.encode('idna').decode('ascii')}"
    if ADDRESS.fullmatch(address) is None or "=?" in local or len(local) > LOCAL_LIMIT:
        raise ValueError("no plain address")
    return address


def compose(job_id: UUID, sender: str, to: Mailbox) -> EmailMessage:
    """The mail; what people typed stands in no header but `To`, and there only as a checked address."""
    message = EmailMessage(policy=SMTP)
    message["From"] = sender
    message["To"] = Address(addr_spec=to.address)
    message["Subject"] = SUBJECT
    message["Date"] = email.utils.localtime()
    message["Message-ID"] = f"<{job_id}@{sender.rpartition('@')[2]}>"
    message["Auto-Submitted"] = "auto-generated"
    message.set_content(BODY.format(name=to.name), cte="quoted-printable")
    return message


def record_mail(session: Session, job_id: UUID, account_id: int, message_id: str) -> None:
    """Note the accepted mail in `sent_mails`, in the session's (the finishing) transaction."""
    session.execute(
        insert(SentMail.__table__).inline(),  # type: ignore[arg-type]  # __table__ is a Table here
        {"job_id": job_id, "account_id": account_id, "message_id": message_id},
    )
