"""Scraping the metrics endpoint of a node, as Prometheus does."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.nodes.node import Node
from tests.nodes.waiting import wait_for

SERVING = re.compile(r'"url": "(http://127\.0\.0\.1:\d+/metrics)"')
SCRAPE_S = 10


@dataclass(frozen=True)
class Scrape:
    """One answer of an endpoint."""

    text: str

    def samples(self, name: str, **labels: str) -> Iterator[float]:
        """The values of the series with this name and, among others, these labels."""
        for family in text_string_to_metric_families(self.text):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    yield sample.value

    def total(self, name: str, **labels: str) -> float:
        """Their sum; 0 without any."""
        return sum(self.samples(name, **labels))

    def names(self) -> set[str]:
        """The names of all series, those without a sample too."""
        found = set()
        for family in text_string_to_metric_families(self.text):
            endings = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}.get(family.type, ("",))
            found |= {family.name + ending for ending in endings}
        return found

    def labels(self, name: str) -> set[str]:
        """The names of the labels of a series that has samples."""
        families = text_string_to_metric_families(self.text)
        return {label for f in families for s in f.samples if s.name == name for label in s.labels}


def url_of(node: Node) -> str:
    """Where a node says that it serves its metrics."""
    found: Any = wait_for(lambda: SERVING.findall(node.logs()), 30, f"{node.name()} serves metrics")
    return str(found[-1])


def fetch(url: str) -> Scrape:
    """Scrape an endpoint; raises OSError when nobody answers."""
    with urllib.request.urlopen(url, timeout=SCRAPE_S) as answer:  # noqa: S310  # our own, on loopback
        return Scrape(answer.read().decode())


def scrape(node: Node) -> Scrape:
    """Scrape a node."""
    return fetch(url_of(node))
