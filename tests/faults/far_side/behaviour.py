"""What a server is to do with the next requests about something."""

from __future__ import annotations

import threading
from collections import defaultdict, deque


class Behaviour:
    """A queue of behaviours for each subject (an address, a charge); when it is empty the server behaves well."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next: defaultdict[str, deque[str]] = defaultdict(deque)
        self._always: dict[str, str] = {}

    def then(self, subject: str, *behaviours: str) -> None:
        """The next requests about `subject` are answered so, in this order."""
        with self._lock:
            self._next[subject].extend(behaviours)

    def always(self, subject: str, behaviour: str) -> None:
        """Every request about `subject` is answered so, once its queue is empty."""
        with self._lock:
            self._always[subject] = behaviour

    def take(self, subject: str) -> str:
        """What to do now; `well` by default."""
        with self._lock:
            queue = self._next[subject]
            return queue.popleft() if queue else self._always.get(subject, "well")
