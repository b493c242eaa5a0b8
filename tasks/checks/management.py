"""RabbitMQ's management API, read only."""

from __future__ import annotations

import json
import re
import urllib.request
from base64 import b64encode
from collections.abc import Mapping
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote, unquote, urlsplit

from app.errors import ConfigurationError

TIMEOUT_S = 5.0
QUEUE_KINDS = ("all", "queues")


class Management:
    """The API at `url` (user and password inside), for one virtual host."""

    def __init__(self, url: str, virtual_host: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigurationError("RABBITMQ_MANAGEMENT_URL: write http://user:password@host:15672")
        port = f":{parts.port}" if parts.port else ""
        self._base = f"{parts.scheme}://{parts.hostname}{port}{parts.path.rstrip('/')}/api/"
        user, password = unquote(parts.username or "guest"), unquote(parts.password or "guest")
        self._login = b64encode(f"{user}:{password}".encode()).decode()
        self._virtual_host = quote(virtual_host, safe="")
        self._policies: list[dict[str, Any]] | None = None
        self._away: OSError | None = None

    def get(self, path: str) -> Any:
        """The JSON at `path`. Raises OSError (HTTPError among them) and ValueError; a silent server is asked once."""
        if self._away is not None:
            raise self._away
        headers = {"Authorization": f"Basic {self._login}"}
        request = urllib.request.Request(self._base + path, headers=headers)  # noqa: S310  # the scheme was checked
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310  # as above
                return json.load(answer)
        except HTTPError:
            raise
        except OSError as away:
            self._away = away
            raise

    def nodes(self) -> list[dict[str, Any]]:
        """Every node of the cluster."""
        found: list[dict[str, Any]] = self.get("nodes")
        return found

    def queue(self, name: str) -> dict[str, Any]:
        """One queue; its numbers are up to five seconds old, and absent in a young queue's first seconds."""
        found: dict[str, Any] = self.get(f"queues/{self._virtual_host}/{quote(name, safe='')}")
        return found

    def bound(self, exchange: str, queue: str, key: str) -> bool:
        """Whether `exchange` routes `key` to `queue`."""
        bindings = self.get(f"exchanges/{self._virtual_host}/{quote(exchange, safe='')}/bindings/source")
        wanted = (queue, key)
        return any((entry["destination"], entry["routing_key"]) == wanted for entry in bindings)

    def policies(self) -> list[dict[str, Any]]:
        """Policies and operator policies of the virtual host; the latter carry `operator`."""
        if self._policies is None:
            own = self.get(f"policies/{self._virtual_host}")
            operators = [{**found, "operator": True} for found in self.get(f"operator-policies/{self._virtual_host}")]
            self._policies = [*own, *operators]
        return self._policies

    def policies_of(self, queue: str, kind: str) -> list[dict[str, Any]]:
        """The policy and the operator policy in force for a queue: of each the one with the highest priority.

        The queue's own `effective_policy_definition` lags by seconds, so it is worked out from the definitions.
        """
        best: dict[bool, dict[str, Any]] = {}
        for found in self.policies():
            operator = bool(found.get("operator"))
            applies = found["apply-to"] in (*QUEUE_KINDS, f"{kind}_queues") and re.search(found["pattern"], queue)
            if applies and found["priority"] >= best.get(operator, found)["priority"]:
                best[operator] = found
        return list(best.values())


def difference(wanted: Mapping[str, Any], there: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that are not as wanted, with what they are (None: absent)."""
    return {name: there.get(name) for name, value in wanted.items() if there.get(name) != value}
