"""docker-compose.yml, checked as far as that goes without an engine."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
COMPOSE_FILE = REPOSITORY / "docker-compose.yml"
LONG_RUNNING = {"postgres", "rabbitmq", "redis", "worker", "beat", "flower"}
SECRETS = {
    "POSTGRES_PASSWORD": "pgsecret",
    "RABBITMQ_PASSWORD": "mqsecret",
    "REDIS_PASSWORD": "kvsecret",
    "FLOWER_BASIC_AUTH": "ops:flsecret",
}


def compose_command() -> list[str] | None:
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    if shutil.which("docker"):
        asked = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
        if asked.returncode == 0:
            return ["docker", "compose"]
    return None


def render(command: list[str], secrets: dict[str, str]) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in SECRETS}
    return subprocess.run(
        [*command, "--file", str(COMPOSE_FILE), "config"],
        env={**clean, **secrets},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    """Return the services as Compose reads them or, without Compose, as YAML reads them."""
    command = compose_command()
    if command is None:
        text = COMPOSE_FILE.read_text()
    else:
        rendered = render(command, SECRETS)
        assert rendered.returncode == 0, rendered.stderr
        text = rendered.stdout
    found: dict[str, Any] = yaml.safe_load(text)["services"]
    return found


def test_has_every_part_of_the_system(services: dict[str, Any]) -> None:
    assert set(services) == LONG_RUNNING | {"migrate"}
    assert services["migrate"]["command"] == ["deadsure", "db", "upgrade"]
    assert services["worker"]["command"][:4] == ["celery", "-A", "tasks", "worker"]


def test_publishes_on_loopback_only(services: dict[str, Any]) -> None:
    published = [port for service in services.values() for port in service.get("ports", [])]
    assert len(published) == 5
    for port in published:
        host = port["host_ip"] if isinstance(port, dict) else port.rpartition(":")[0].rpartition(":")[0]
        assert host == "127.0.0.1", port


def test_every_server_has_a_healthcheck_and_time_to_stop(services: dict[str, Any]) -> None:
    for name in LONG_RUNNING:
        assert services[name]["healthcheck"]["test"], name
        assert services[name]["stop_grace_period"], name


def test_nothing_runs_before_the_schema_is_there(services: dict[str, Any]) -> None:
    assert services["migrate"]["depends_on"]["postgres"]["condition"] == "service_healthy"
    for name in ("worker", "beat", "flower"):
        needs = services[name]["depends_on"]
        assert needs["migrate"]["condition"] == "service_completed_successfully"
        assert needs["rabbitmq"]["condition"] == "service_healthy"


def test_flower_asks_for_a_password(services: dict[str, Any]) -> None:
    assert services["flower"]["environment"]["FLOWER_BASIC_AUTH"] in (
        SECRETS["FLOWER_BASIC_AUTH"],
        "${FLOWER_BASIC_AUTH:?copy .env.example to .env and fill it in}",
    )


def test_what_flower_has_seen_outlives_it(services: dict[str, Any]) -> None:
    (database,) = [part for part in services["flower"]["command"] if part.startswith("--db=")]
    assert {"--persistent=True", "--state-save-interval=10000"} <= set(services["flower"]["command"])
    (volume,) = services["flower"]["volumes"]
    target = volume["target"] if isinstance(volume, dict) else volume.split(":")[1]
    assert database.removeprefix("--db=").startswith(f"{target}/")


def test_a_missing_secret_is_refused() -> None:
    named = re.findall(r"^(\w+)=$", (REPOSITORY / ".env.example").read_text(), re.MULTILINE)
    text = COMPOSE_FILE.read_text()
    assert set(named) == set(SECRETS) == set(re.findall(r"\$\{(\w+):\?", text))
    assert not re.search(r"\$\{\w+(:-[^}]*)?\}", text), "every variable must be required"
    command = compose_command()
    if command is not None:
        refused = render(command, {**SECRETS, "POSTGRES_PASSWORD": ""})
        assert refused.returncode != 0
        assert "copy .env.example to .env" in refused.stderr
