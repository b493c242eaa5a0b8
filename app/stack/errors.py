"""Why a private server could not be had."""


class StackError(Exception):
    """A private server could not be installed, started or stopped; the message names the next step.

    Raised by `app.stack`, caught by its command line; no job state follows from it.
    """


class PortTakenError(StackError):
    """Another process took a port between our look and the server's bind; caught by `Server.start`."""


class BusyError(StackError):
    """Remains of the server's previous life are still ending; caught by `Server.start`."""
