# Every target is explained by `make help`. GNU make 3.81 (macOS) is enough.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup demo test soak lint services stop bench lock clean

VENV := .venv
BIN := $(VENV)/bin
LOCKED := $(VENV)/.locked
ARGS ?=
BROKER ?= valkey
# Tests wait for processes more than they compute: three at a time fill two cores.
TEST_PROCESSES ?= 3

help: ## List every target
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(LOCKED) ## Create .venv with the locked dependencies (again only when they changed)

# The environment is built afresh: a package that left the lock must leave the environment too.
$(LOCKED): requirements-dev.lock pyproject.toml
	@set -e; found=; \
	for python in $(PYTHON) python3 python3.14 python3.13 python3.12 python3.11; do \
	  if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found=$$python; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "Deadsure needs Python 3.11 or later, and none was found on PATH ($$(python3 --version 2>&1))." >&2; \
	  echo "Install one (Debian: apt-get install python3 python3-venv; macOS: brew install python)" >&2; \
	  echo "or name it: make setup PYTHON=/path/to/python3.12" >&2; exit 1; \
	fi; \
	if ! $$found -c 'import ensurepip, venv' 2>/dev/null; then \
	  if [ -n "$$CI" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q python3-venv; \
	  else \
	    echo "$$found cannot make virtual environments: install its package python3-venv" >&2; \
	    echo "(Debian: sudo apt-get install python3-venv)" >&2; exit 1; \
	  fi; \
	fi; \
	echo "Installing the locked dependencies into $(VENV) with $$($$found --version) ..."; \
	$$found -m venv --clear $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --require-hashes -r requirements-dev.lock
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

demo: setup ## Kill a worker in the middle of 500 jobs and count (BROKER=valkey|rabbitmq, ARGS=...)
	@$(BIN)/deadsure demo --broker $(BROKER) $(ARGS)

test: setup ## Run all tests on real servers; installs RabbitMQ and promtool if missing (ARGS=... goes to pytest)
	@$(BIN)/python -m app.stack install-rabbitmq
	@$(BIN)/python -m app.stack install-promtool
	@$(BIN)/python -m pytest --numprocesses=$(TEST_PROCESSES) --dist=loadfile $(ARGS)

soak: setup ## Run the tests of deploys and broker deaths at the size that the contract names
	@$(BIN)/python -m app.stack install-rabbitmq
	@$(BIN)/python -m pytest --soak -m soak -rP $(ARGS)

lint: setup ## Check style, types and the direction of imports
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

services: setup ## Start private PostgreSQL, RabbitMQ and Valkey, migrate, write var/dev.env
	@$(BIN)/python -m app.stack up
	@umask 077 && $(BIN)/python -m app.stack env > var/dev.env
	@. var/dev.env && $(BIN)/deadsure db upgrade
	@echo
	@echo "The servers run until 'make stop'; their data stays in var/stack. Next:"
	@echo "  . var/dev.env && . $(BIN)/activate"
	@echo "  celery -A tasks worker --loglevel INFO"

stop: ## Stop what 'make services' started; data stays
	@if [ -x $(BIN)/python ]; then $(BIN)/python -m app.stack down; fi
	@if [ -d var/demo/stack ]; then $(BIN)/python -m app.stack down --root var/demo/stack; fi

bench: setup ## Measure against plain Celery (QUICK=1: shorter)
	@$(BIN)/python -m app.stack install-rabbitmq
	@$(BIN)/python -m bench $(if $(QUICK),--quick) $(ARGS)

lock: ## Resolve the dependencies again and rewrite both lock files
	@set -e; tool=$$(mktemp -d); trap 'rm -rf "$$tool"' EXIT; \
	$(or $(PYTHON),python3) -m venv "$$tool" && "$$tool/bin/pip" install --quiet --disable-pip-version-check uv; \
	lock() { out=$$1; shift; "$$tool/bin/uv" pip compile --quiet --upgrade --universal --python-version 3.11 \
	  --generate-hashes --no-header --no-annotate "$$@" pyproject.toml --output-file "$$out"; }; \
	lock requirements-dev.lock --extra embedded --extra otel --extra dev; \
	lock requirements.lock --constraint requirements-dev.lock
	@echo "Locked. 'make setup' installs the result."

clean: ## Stop the servers and delete .venv, caches and everything below var/
	@if [ -x $(BIN)/python ]; then $(BIN)/python -m app.stack destroy; fi
	@if [ -d var/demo/stack ]; then $(BIN)/python -m app.stack destroy --root var/demo/stack; fi
	@if ls -d var/test-* >/dev/null 2>&1; then echo "A test run is using var/test-*: let it end first." >&2; exit 1; fi
	@rm -rf $(VENV) var build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
