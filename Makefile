# Everything a developer runs. `make demo` and `make test` set up what they need on a machine that has
# Python >= 3.11, JDK 17 and Maven; nothing is started that is not stopped again (`make up` excepted).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST_ARGS ?=
SEEDS ?= 1..200

.PHONY: help setup demo webhooks up down check lint typecheck imports test unit simulate bench docs lock wheel clean

help:
	@echo "make demo    the airports example on a local Kafka and Cassandra, everything started for it"
	@echo "make webhooks the webhooks example: deliveries to receivers that misbehave, their retries and replays"
	@echo "make test    all tests; starts Kafka and Cassandra itself"
	@echo "make simulate SEEDS=1..500  the whole system in memory under faults drawn from seeds; SEEDS=17 repeats one"
	@echo "make check   lint, formatting, types, import rules"
	@echo "make up      Kafka and Cassandra on 127.0.0.1, kept running (make down stops them)"
	@echo "make bench   what a task costs, stage by stage"
	@echo "make docs    regenerate docs/settings.md"
	@echo "make lock    resolve requirements.lock anew"

# The lock decides every version; a changed lock or pyproject.toml sets up again.
$(VENV)/.ready: requirements.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

setup: $(VENV)/.ready

demo: setup
	$(BIN)/python -m examples.airports.demo

webhooks: setup
	$(BIN)/python -m examples.webhooks.demo

up: setup
	$(BIN)/taskline local up

down: setup
	$(BIN)/taskline local down

check: lint typecheck imports

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: setup
	$(BIN)/mypy .typing/taskline examples bench

# The import rules are checked on a plain copy, from inside it: the tool follows neither links nor editable installs.
imports: setup
	rm -rf build/imports && mkdir -p build && cp -rL .typing build/imports
	cd build/imports && ../../$(BIN)/lint-imports --no-logo ../../pyproject.toml

test: setup
	scripts/ci-packages
	$(BIN)/pytest $(PYTEST_ARGS)

unit: setup
	$(BIN)/pytest tests/unit $(PYTEST_ARGS)

simulate: setup
	PYTHONPATH=tests/support $(BIN)/python -m simulation $(SEEDS) $(SIMULATE_ARGS)

bench: setup
	$(BIN)/python -m bench

docs: setup
	$(BIN)/python scripts/settings_page.py > docs/settings.md

lock: setup
	$(BIN)/uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 --generate-hashes \
	    --no-emit-index-url --no-annotate --no-header --quiet --output-file requirements.lock

wheel: setup
	$(BIN)/python -m build --wheel --no-isolation --outdir dist

clean:
	rm -rf build dist $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
