"""The alert rules and the dashboard as the repository has them, and what they ask Prometheus for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy/prometheus/alerts.yml"
CONFIGURATION = ROOT / "deploy/prometheus/prometheus.yml"
DASHBOARD = ROOT / "deploy/grafana/deadsure.json"
SELECTOR = re.compile(r"\b((?:deadsure|process)_\w+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)(=~|!=|=)"([^"]*)"')
BY = re.compile(r"\b(?:by|on) ?\(([^)]*)\)")
ADDED_BY_PROMETHEUS = {"job", "instance"}


@dataclass(frozen=True)
class Selector:
    """One series that an expression reads; `equal` are the label values that it asks for, `used` all label names."""

    name: str
    equal: tuple[tuple[str, str], ...]
    used: frozenset[str]


def alerts() -> list[dict[str, Any]]:
    """Every alert rule."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    """Every panel of the dashboard that shows something."""
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[str]:
    """Every query of the rules and of the dashboard."""
    yield from (rule["expr"] for rule in alerts())
    yield from (target["expr"] for panel in panels() for target in panel["targets"])


def grouped_by(expression: str) -> set[str]:
    """The labels that an expression groups or matches by, but those that Prometheus adds."""
    lists = BY.findall(expression)
    return {label.strip() for found in lists for label in found.split(",")} - ADDED_BY_PROMETHEUS - {""}


def selectors(expression: str) -> set[Selector]:
    """What an expression reads."""
    found = set()
    for name, matchers in SELECTOR.findall(expression):
        parts = MATCHER.findall(matchers)
        equal = tuple((label, value) for label, how, value in parts if how == "=" and not value.startswith("$"))
        used = frozenset(label for label, _, _ in parts) - ADDED_BY_PROMETHEUS
        found.add(Selector(name, equal, used))
    return found
