"""An SMTP server (aiosmtpd) whose `accepted` mails are what really took effect."""

from __future__ import annotations

import asyncio
import socket
import threading
from dataclasses import dataclass
from email import message_from_bytes
from email.message import EmailMessage
from email.policy import default
from types import TracebackType
from typing import Any, Self

from aiosmtpd.controller import Controller
from aiosmtpd.smtp import SMTP, AuthResult, Envelope, LoginPassword, Session

from tests.faults.far_side.behaviour import Behaviour

USER, PASSWORD = "mailer@example.com", "p@ss/word"
LOST = "421 lost"


@dataclass(frozen=True)
class Mail:
    """One accepted mail."""

    sender: str
    to: tuple[str, ...]
    raw: bytes

    @property
    def message(self) -> EmailMessage:
        return message_from_bytes(self.raw, policy=default)


class MailServer:
    """Behaviours by recipient.

    At RCPT: `450`, `550`, `drop at RCPT`. At DATA: `451 after DATA`, `554 after DATA`, `drop before accepting`,
    `drop after accepting`, `slow` (accepts, answers after the client has given up), `nonsense`.
    """

    def __init__(self) -> None:
        self.behaviour = Behaviour()
        self.accepted: list[Mail] = []
        self.sessions = 0
        self._current: dict[int, str] = {}
        self._go_on = threading.Event()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._controller: Controller | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"smtp://mailer%40example.com:p%40ss%2Fword@127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listen (again) on the same port."""
        self._go_on.clear()
        self._controller = Controller(
            self,
            hostname="127.0.0.1",
            port=self.port,
            authenticator=self._login,
            auth_require_tls=False,
        )
        self._controller.start()

    def stop(self) -> None:
        """Be down: connections are refused."""
        self._go_on.set()
        if self._controller is not None:
            self._controller.stop()
            self._controller = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def to(self, address: str) -> list[Mail]:
        """The mails that this address got."""
        return [mail for mail in self.accepted if address in mail.to]

    @staticmethod
    def _login(_server: SMTP, _session: Session, _envelope: Envelope, _mechanism: str, data: Any) -> AuthResult:
        assert isinstance(data, LoginPassword)
        return AuthResult(success=(data.login, data.password) == (USER.encode(), PASSWORD.encode()))

    # aiosmtpd's hooks

    async def handle_RCPT(  # noqa: N802
        self, server: SMTP, session: Session, envelope: Envelope, address: str, _options: list[str]
    ) -> str:
        self.sessions += 1
        if not session.authenticated:
            return "530 log in first"
        now = self.behaviour.take(address)
        if now in ("450", "550"):
            return f"{now} not now" if now == "450" else "550 no such user"
        if now == "drop at RCPT":
            drop(server)
            return LOST
        self._current[id(session)] = now
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server: SMTP, session: Session, envelope: Envelope) -> str:  # noqa: N802
        now = self._current.pop(id(session))
        if now in ("451 after DATA", "554 after DATA"):
            return f"{now[:3]} not taken"
        if now == "drop before accepting":
            drop(server)
            return LOST
        content = envelope.original_content
        assert content is not None
        assert envelope.mail_from is not None
        self.accepted.append(Mail(envelope.mail_from, tuple(envelope.rcpt_tos), content))
        if now == "drop after accepting":
            drop(server)
        if now == "slow":
            await asyncio.get_running_loop().run_in_executor(None, self._go_on.wait)
        return "OK, I think" if now == "nonsense" else "250 taken"


def drop(server: SMTP) -> None:
    """Reset the connection."""
    assert server.transport is not None
    server.transport.abort()  # type: ignore[attr-defined]  # it is a Transport
