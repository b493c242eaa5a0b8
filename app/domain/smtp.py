"""One mail to a mail server, which knows neither idempotency keys nor a question for the status.

So the moment from which on the mail may have been accepted is drawn exactly: whatever goes wrong up to the DATA command
has sent nothing and may be tried again; after it only a reply of the protocol (4xx, 5xx) says no, and a broken
connection is uncertain.
"""

from __future__ import annotations

import smtplib
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from email.message import EmailMessage
from urllib.parse import unquote, urlsplit

from app.domain.errors import MailServerAway, MailUncertain
from app.errors import ConfigurationError
from app.failures import SMTP_REPLIES

PORTS = {"smtp": 25, "smtp+starttls": 587, "smtps": 465}
TAKEN = range(200, 300)


def deliver(message: EmailMessage, url: str, timeout_s: float) -> None:
    """Hand one mail to the server at `url`; returns when it was accepted. `timeout_s` bounds each silence.

    Raises MailServerAway (nothing was sent), MailUncertain (it may have been), smtplib.SMTPResponseException or
    SMTPRecipientsRefused (the server said no).
    """
    to = message["To"].addresses[0].addr_spec
    raw = bytes(message)
    with nothing_sent():
        server = connect(url, timeout_s)
    try:
        with nothing_sent():
            envelope(server, message["From"].addresses[0].addr_spec, to)
        hand_over(server, raw)
        with suppress(OSError):
            server.quit()
    finally:
        server.close()


def hand_over(server: smtplib.SMTP, raw: bytes) -> None:
    """DATA and what follows: only a reply of the protocol says that the mail was not accepted."""
    try:
        code, answer = server.data(raw)
    except smtplib.SMTPDataError as no:
        code, answer = no.smtp_code, no.smtp_error if isinstance(no.smtp_error, bytes) else b""
    except OSError as error:
        raise MailUncertain("the connection broke after DATA") from error
    if code in SMTP_REPLIES:
        raise smtplib.SMTPDataError(code, answer)
    if code not in TAKEN:
        raise MailUncertain("the mail server answered in no known way")


def connect(url: str, timeout_s: float) -> smtplib.SMTP:
    """A session that is ready for an envelope; raises ConfigurationError and what smtplib raises."""
    parts = urlsplit(url)
    if parts.scheme not in PORTS or not parts.hostname:
        raise ConfigurationError(
            "SMTP_URL is missing or unusable: write smtp://, smtp+starttls:// or smtps://user:password@host:port"
        )
    address = (parts.hostname, parts.port or PORTS[parts.scheme])
    if parts.scheme == "smtps":
        server: smtplib.SMTP = smtplib.SMTP_SSL(*address, timeout=timeout_s, context=ssl.create_default_context())
    else:
        server = smtplib.SMTP(*address, timeout=timeout_s)
    try:
        if parts.scheme == "smtp+starttls":
            server.starttls(context=ssl.create_default_context())
        if parts.username:
            server.login(unquote(parts.username), unquote(parts.password or ""))
        server.ehlo_or_helo_if_needed()
    except BaseException:
        server.close()
        raise
    return server


def envelope(server: smtplib.SMTP, sender: str, to: str) -> None:
    """Say who writes to whom; raises what smtplib raises, nothing was sent then."""
    code, answer = server.mail(sender)
    if code in SMTP_REPLIES:
        raise smtplib.SMTPSenderRefused(code, answer, sender)
    if code in TAKEN:
        code, answer = server.rcpt(to)
    if code in SMTP_REPLIES:
        raise smtplib.SMTPRecipientsRefused({to: (code, answer)})
    if code not in TAKEN:
        raise smtplib.SMTPException("the mail server answered in no known way")


@contextmanager
def nothing_sent() -> Iterator[None]:
    """Turn a failure before DATA into MailServerAway, but for a plain no to this sender or recipient."""
    try:
        yield
    except (smtplib.SMTPSenderRefused, smtplib.SMTPRecipientsRefused):
        raise
    except OSError as error:
        # A refused login is of this kind too: it says nothing about the job, and the password may be corrected.
        raise MailServerAway(type(error).__name__) from error
