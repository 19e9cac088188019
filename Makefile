# Commands for development. Start with `make quickstart` and `make test`.

PYTHON ?= python3
BIN := .venv/bin
SIDE_BY_SIDE := -n 3 --dist loadfile --no-loadscope-reorder

.PHONY: setup quickstart serve test test-fast test-all test-engines test-kserve lint fmt bench bench-peers bench-scheduling docs wheel ci clean

setup: .venv/.installed

.venv/.installed: pyproject.toml scripts/setup.sh
	PYTHON=$(PYTHON) sh scripts/setup.sh '.[http]'
	touch $@

# The tests need other clients and trainers; the quickstart does not.
.venv/.installed-tests: .venv/.installed
	PYTHON=$(PYTHON) sh scripts/setup.sh '.[test]'
	touch $@

quickstart: setup
	$(BIN)/python scripts/quickstart.py

serve: setup
	$(BIN)/iskander-gateway --config configs/quickstart.toml

test: .venv/.installed-tests
	$(BIN)/pytest $(SIDE_BY_SIDE)

test-fast: .venv/.installed-tests
	$(BIN)/pytest tests/unit tests/spec tests/tidy

# Slow tests too, clients in other languages, and fuzzing for 30 s a target. Clients whose tools are
# missing are skipped by name: g++, go with golang-google-grpc-dev, node with npm. Fuzzing is guided by
# coverage if the extra `fuzz` is installed, which does not support every Python.
test-all: .venv/.installed-tests
	ISKANDER_SLOW=1 $(BIN)/pytest $(SIDE_BY_SIDE)
	ISKANDER_TEST_ALL=1 $(BIN)/pytest tests/interop
	ISKANDER_SLOW=1 ISKANDER_TEST_ALL=1 $(BIN)/pytest -n 3 tests/fuzz

# Ray, and Spark with Java, on this machine; in an environment of their own, because they are large.
test-engines:
	mkdir -p build
	VENV=build/engines PYTHON=$(PYTHON) sh scripts/setup.sh '.[test,ray,spark]'
	ISKANDER_ENGINES=1 build/engines/bin/pytest tests/engines

# KServe's client needs an older psutil than the server, so it has its own environment.
test-kserve: .venv/.installed-tests
	[ -d build/kserve ] || $(PYTHON) -m venv build/kserve
	build/kserve/bin/python -m pip install --quiet --disable-pip-version-check kserve
	KSERVE_PYTHON=$(CURDIR)/build/kserve/bin/python \
	    $(BIN)/pytest tests/system/test_oip_kserve.py tests/system/test_protocols_page.py

lint: setup
	PYTHON=$(PYTHON) sh scripts/setup.sh '.[test,lint]'
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy
	$(BIN)/python scripts/gen_reference.py --check

fmt: setup
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

bench: setup
	PYTHON=$(PYTHON) sh scripts/setup.sh '.[test,bench]'
	$(BIN)/python -m benchmarks install iskander
	$(BIN)/python -m benchmarks.flight_latency --out build/small.jsonl
	$(BIN)/python -m benchmarks.batch_throughput --out build/large.jsonl
	$(BIN)/python -m benchmarks probe --out build/probe.jsonl

bench-peers: setup
	PYTHON=$(PYTHON) sh scripts/setup.sh '.[test,bench]'
	$(BIN)/python -m benchmarks install
	$(BIN)/python -m benchmarks run goals --out build/goals.jsonl
	$(BIN)/python -m benchmarks run open --out build/open.jsonl
	$(BIN)/python -m benchmarks ramp --out build/ramp.jsonl
	$(BIN)/python -m benchmarks probe --out build/probe.jsonl
	$(BIN)/python -m benchmarks report build/goals.jsonl build/open.jsonl build/ramp.jsonl build/probe.jsonl

bench-scheduling: setup
	PYTHON=$(PYTHON) sh scripts/setup.sh '.[test,bench]'
	mkdir -p build
	$(BIN)/python -m benchmarks.scheduling --json build/scheduling.json --plots build
	$(BIN)/python -m benchmarks.scheduling.overload --json build/overload.json

docs: setup
	$(BIN)/python scripts/gen_reference.py

wheel: setup
	$(BIN)/python scripts/check_wheel.py

# One compile: the wheel runs the slow tests, the sources run the others.
ci: lint wheel test

clean:
	rm -rf .venv dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
