"""The welcome mail: what people typed adds nothing to it, and when a mail may have been accepted."""

from __future__ import annotations

import smtplib
from collections.abc import Iterator
from email import message_from_bytes
from email.policy import default
from uuid import UUID, uuid4

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sqlalchemy import Engine, create_engine, pool, text
from sqlalchemy.orm import Session

from app.domain.errors import MailServerAway, MailUncertain, UndeliverableAddress, UnknownAccount
from app.domain.mail import Mailbox, compose, one_line, plain_address, recipient
from app.domain.smtp import deliver
from app.errors import ConfigurationError
from tests.faults.far_side.mail_server import MailServer
from tests.integration.scene import Scene

JOB = UUID("01890000-0000-7000-8000-000000000001")
TO = "ada@example.com"
SENDER = "noreply@deadsure.test"
TIMEOUT_S = 1.0
INJECTION = "Ada\r\nBcc: everyone@example.com\r\n\r\nhello\r\n.\r\nMAIL FROM:<x@y>"


@pytest.fixture(scope="module")
def running() -> Iterator[MailServer]:
    with MailServer() as made:
        yield made


@pytest.fixture
def server(running: MailServer) -> MailServer:
    running.accepted.clear()
    return running


@pytest.fixture
def engine(scene: Scene) -> Iterator[Engine]:
    made = create_engine(scene.url, poolclass=pool.NullPool)
    yield made
    made.dispose()


def send(server: MailServer, address: str = TO, name: str = "Ada") -> None:
    deliver(compose(JOB, SENDER, Mailbox(name, address)), server.url, TIMEOUT_S)


def account(engine: Engine, email: str, name: str = "Ada") -> int:
    with engine.begin() as connection:
        return int(
            connection.scalar(
                text("INSERT INTO accounts (name, email, currency) VALUES (:n, :e, 'EUR') RETURNING account_id"),
                {"n": name, "e": email},
            )
        )


# the message


def test_a_mail_arrives(server: MailServer) -> None:
    send(server, name="Zoë, O'Brien & Söhne")
    (mail,) = server.accepted
    assert (mail.sender, mail.to) == (SENDER, (TO,))
    headers = {name: str(value) for name, value in mail.message.items() if name != "Date"}
    assert headers == {
        "From": SENDER,
        "To": TO,
        "Subject": "Welcome",
        "Message-ID": f"<{JOB}@deadsure.test>",
        "Auto-Submitted": "auto-generated",
        "Content-Type": 'text/plain; charset="utf-8"',
        "Content-Transfer-Encoding": "quoted-printable",
        "MIME-Version": "1.0",
    }
    assert mail.message.get_content().splitlines() == ["Hello Zoë, O'Brien & Söhne,", "", "your account is ready."]


def test_the_message_id_is_the_jobs(server: MailServer) -> None:
    send(server)
    send(server)
    assert len({mail.message["Message-ID"] for mail in server.accepted}) == 1
    assert compose(uuid4(), SENDER, Mailbox("Ada", TO))["Message-ID"] != f"<{JOB}@deadsure.test>"


@given(st.text(min_size=1, max_size=200))
@example(INJECTION)
@example("a\u2028b\x0b\x85c\u202ed")
def test_no_name_reaches_a_header_or_ends_the_mail(name: str) -> None:
    name = name.encode(errors="replace").decode()  # PostgreSQL holds no lone surrogates
    raw = bytes(compose(JOB, SENDER, Mailbox(one_line(name), TO)))
    head, _, body = raw.partition(b"\r\n\r\n")
    plain = bytes(compose(JOB, SENDER, Mailbox("x", TO))).partition(b"\r\n\r\n")[0]
    assert [line for line in head.split(b"\r\n") if not line.startswith(b"Date")] == [
        line for line in plain.split(b"\r\n") if not line.startswith(b"Date")
    ]
    assert b"\n" not in body.replace(b"\r\n", b"")
    assert b"\r" not in body.replace(b"\r\n", b"")
    content = message_from_bytes(raw, policy=default).get_content()
    assert content.splitlines()[1:] == ["", "your account is ready."]


def test_a_name_with_a_whole_session_in_it_stays_a_name(server: MailServer) -> None:
    send(server, name=one_line(INJECTION))
    (mail,) = server.accepted
    assert mail.to == (TO,)
    assert mail.message["Bcc"] is None


@given(st.text(max_size=60))
@example("ada@example.com, eve@example.com")
@example("ada@example.com\r\nBcc: eve@example.com")
@example("Ada <ada@example.com>")
@example("group: ada@example.com;")
@example('"a b"@example.com')
@example("ada(comment)@example.com")
@example("ada@[127.0.0.1]")
@example("ada@exa mple.com")
@example("ada@example.com>, <eve@example.com")
@example("<ada@example.com")
@example("@example.com")
@example("ada@")
@example("ada@..")
@example("ada@eve@example.com")
@example("=?utf-8?q?a=0d=0aBcc:_b?=@example.com")
def test_an_address_is_one_address_or_none(typed: str) -> None:
    try:
        address = plain_address(typed)
    except ValueError:
        return
    parsed = message_from_bytes(bytes(compose(JOB, SENDER, Mailbox("Ada", address))), policy=default)
    assert [found.addr_spec for found in parsed["To"].addresses] == [address]
    assert address.count("@") == 1
    assert not set(address) & set(' \r\n\t<>,;:"()[]')


@pytest.mark.parametrize(
    ("typed", "address"),
    [
        ("ada@example.com", "ada@example.com"),
        ("ada.b+tag@example.com", "ada.b+tag@example.com"),
        ("ada@bücher.example", "ada@xn--bcher-kva.example"),
        ("o'brien@example.com", "o'brien@example.com"),
    ],
)
def test_addresses_that_are_fine(typed: str, address: str) -> None:
    assert plain_address(typed) == address


# the account


def test_the_recipient_is_the_account(engine: Engine) -> None:
    account_id = account(engine, "ada@bücher.example", " Ada\n  Lovelace ")
    with Session(engine) as session:
        assert recipient(session, account_id) == Mailbox("Ada Lovelace", "ada@xn--bcher-kva.example")
        with pytest.raises(UnknownAccount):
            recipient(session, account_id + 1)


@pytest.mark.parametrize(
    "email",
    [
        "a@b, c@d",
        "a@b\nBcc: c@d",
        "a b@c",
        "x <a@b>",
        "a@" + "b" * 70,
        "a@b..c",
        "a@xn--\u00fc",
        "a@b;c",
        "a..b@c",
        ".a@c",
        "a@(c)",
        "a@[",
        "a,b@c",
        "zoë@example.com",
        "a" * 65 + "@c",
        "a@-b.c",
        "a@b.",
        '"a"@c',
        "a@[127.0.0.1]",
    ],
)
def test_an_address_that_no_mail_can_go_to_is_permanent_and_not_named(engine: Engine, email: str) -> None:
    account_id = account(engine, email)
    with Session(engine) as session, pytest.raises(UndeliverableAddress) as caught:
        recipient(session, account_id)
    assert email not in str(caught.value)


# the moment from which on it may have been accepted


def test_a_server_that_is_down(server: MailServer) -> None:
    server.stop()
    with pytest.raises(MailServerAway, match="ConnectionRefusedError"):
        send(server)
    server.start()
    send(server)


@pytest.mark.parametrize(
    ("behaviour", "error", "accepted"),
    [
        ("450", smtplib.SMTPRecipientsRefused, 0),
        ("550", smtplib.SMTPRecipientsRefused, 0),
        ("drop at RCPT", MailServerAway, 0),
        ("451 after DATA", smtplib.SMTPDataError, 0),
        ("554 after DATA", smtplib.SMTPDataError, 0),
        ("drop before accepting", MailUncertain, 0),
        ("drop after accepting", MailUncertain, 1),
        ("slow", MailUncertain, 1),
        ("nonsense", MailUncertain, 1),
    ],
)
def test_how_it_ends(server: MailServer, behaviour: str, error: type[Exception], accepted: int) -> None:
    address = f"{uuid4()}@example.com"
    server.behaviour.then(address, behaviour)
    with pytest.raises(error):
        send(server, address)
    assert len(server.to(address)) == accepted
    send(server, address)
    assert len(server.to(address)) == accepted + 1


def test_a_refused_login_says_nothing_about_the_mail(server: MailServer) -> None:
    wrong = server.url.replace("p%40ss", "guess")
    with pytest.raises(MailServerAway):
        deliver(compose(JOB, SENDER, Mailbox("Ada", TO)), wrong, TIMEOUT_S)


@pytest.mark.parametrize("scheme", ["smtps", "smtp+starttls"])
def test_a_server_without_the_tls_that_was_asked_for_gets_nothing(server: MailServer, scheme: str) -> None:
    url = server.url.replace("smtp:", f"{scheme}:")
    with pytest.raises(MailServerAway):
        deliver(compose(JOB, SENDER, Mailbox("Ada", TO)), url, TIMEOUT_S)
    assert server.accepted == []


@pytest.mark.parametrize("url", ["", "mail.example.com", "http://mail.example.com", "smtp://"])
def test_a_url_that_names_no_mail_server(url: str) -> None:
    with pytest.raises(ConfigurationError, match="SMTP_URL"):
        deliver(compose(JOB, SENDER, Mailbox("Ada", TO)), url, TIMEOUT_S)
