# The developer's verbs. `make quickstart` and `make test` are all that a newcomer needs.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup quickstart serve test test-fast lint fmt bench docs wheel ci clean

setup: .venv/.installed

.venv/.installed: pyproject.toml scripts/setup.sh
	PYTHON=$(PYTHON) sh scripts/setup.sh '.[test]'
	touch $@

quickstart: setup
	$(BIN)/python scripts/quickstart.py

serve: setup
	$(BIN)/iskander-gateway --config configs/quickstart.toml

test: setup
	$(BIN)/pytest

test-fast: setup
	$(BIN)/pytest tests/unit tests/spec tests/tidy

lint: setup
	PYTHON=$(PYTHON) sh scripts/setup.sh '.[test,lint]'
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy
	$(BIN)/python scripts/gen_reference.py --check

fmt: setup
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

bench: setup
	PYTHON=$(PYTHON) sh scripts/setup.sh '.[test,bench]'
	mkdir -p build
	$(BIN)/python benchmarks/scheduling.py --json build/scheduling.json --plots build
	$(BIN)/python benchmarks/overload.py --json build/overload.json
	$(BIN)/python benchmarks/flight_latency.py --json build/flight_latency.json
	$(BIN)/python benchmarks/batch_throughput.py --json build/batch_throughput.json
	$(BIN)/python benchmarks/report.py build/flight_latency.json build/batch_throughput.json

docs: setup
	$(BIN)/python scripts/gen_reference.py

wheel: setup
	$(BIN)/python scripts/check_wheel.py

ci: wheel lint test

clean:
	rm -rf .venv dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
