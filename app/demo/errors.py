"""Why a demo could not be played to its end."""

from __future__ import annotations

from app.errors import DeadsureError


class DemoError(DeadsureError):
    """Raised by the demo's own parts, caught by its command; the message names the log to read or what to run."""
