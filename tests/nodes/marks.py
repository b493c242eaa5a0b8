"""Marks that choose the servers of a test: `@on_own_rabbitmq`, or `pytestmark = [on_rabbitmq, …]`."""

from __future__ import annotations

import pytest

on_rabbitmq = pytest.mark.parametrize("broker", ["rabbitmq"], indirect=True)
on_valkey = pytest.mark.parametrize("broker", ["valkey"], indirect=True)
on_own_rabbitmq = pytest.mark.parametrize("broker", ["own_rabbitmq"], indirect=True)
on_own_valkey = pytest.mark.parametrize("broker", ["own_valkey"], indirect=True)
on_own_brokers = pytest.mark.parametrize("broker", ["own_rabbitmq", "own_valkey"], indirect=True)
on_own_postgres = pytest.mark.parametrize("postgres", ["own"], indirect=True)
