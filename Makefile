# Commands for development. Start with `make quickstart` and `make test`.

PYTHON ?= python3
BIN := .venv/bin
SIDE_BY_SIDE := -n 4 --dist loadfile --no-loadscope-reorder

.PHONY: setup quickstart serve test test-fast test-sources test-all test-engines test-kserve test-onnx test-deb deb lint fmt test-gpu bench bench-gpu bench-peers bench-scheduling endurance docs wheel ci clean

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

# Without servers, and with fewer random examples: the first thing to run after a change.
test-fast: .venv/.installed-tests
	$(BIN)/pytest -q -n auto --hypothesis-profile=fast -m 'not long' tests/unit tests/spec tests/tidy

# What the wheel does not run (`make wheel`): together they run each test once.
test-sources: .venv/.installed-tests
	$(BIN)/pytest $(SIDE_BY_SIDE) tests/system/test_client_distribution.py \
	    $(filter-out tests/system/ tests/process/ tests/support/ tests/__pycache__/,$(wildcard tests/*/))

# Slow tests too, clients in other languages, fuzzing for 60 s a target, alerts in a real Prometheus, and
# ten minutes of mixed load. Tests whose tools are missing are skipped by name: g++, go with
# golang-google-grpc-dev, node with npm, prometheus. Fuzzing is guided by coverage if the extra `fuzz` is
# installed, which does not support every Python.
test-all: .venv/.installed-tests
	ISKANDER_SLOW=1 $(BIN)/pytest $(SIDE_BY_SIDE)
	ISKANDER_TEST_ALL=1 $(BIN)/pytest tests/interop
	ISKANDER_SLOW=1 ISKANDER_TEST_ALL=1 $(BIN)/pytest -n 3 tests/fuzz
	ISKANDER_SLOW=1 ISKANDER_TEST_ALL=1 $(BIN)/pytest tests/system/test_alarms.py
	ISKANDER_SLOW=1 ISKANDER_ENDURANCE_MINUTES=10 $(BIN)/pytest tests/system/test_endurance.py

# Ray, and Spark with Java, on this machine; in an environment of their own, because they are large.
test-engines:
	mkdir -p build
	VENV=build/engines PYTHON=$(PYTHON) sh scripts/setup.sh '.[engines]'
	ISKANDER_ENGINES=1 build/engines/bin/pytest tests/engines

# KServe's client needs an older psutil than the server, so it has its own environment.
test-kserve: .venv/.installed-tests
	[ -d build/kserve ] || $(PYTHON) -m venv build/kserve
	build/kserve/bin/python -m pip install --quiet --disable-pip-version-check kserve
	KSERVE_PYTHON=$(CURDIR)/build/kserve/bin/python \
	    $(BIN)/pytest tests/system/test_oip_kserve.py tests/system/test_protocols_page.py

# ONNX's backend suite over gRPC, HTTP and Flight, compared with ONNX Runtime in process; 6 minutes on two
# cores. It replaces the table of tests/onnx_suite/README.md.
test-onnx: .venv/.installed-tests
	$(BIN)/python tests/onnx_suite/run.py --write --log build/onnx-suite.jsonl

# On a machine with an NVIDIA GPU; without a card each test is skipped by name, and those of TensorRT also
# without its libraries (`pip install 'tensorrt-cu13-libs>=10,<11'`).
test-gpu: .venv/.installed-tests
	PYTHON=$(PYTHON) sh scripts/setup.sh '.[test,gpu,torch]'
	$(BIN)/pytest tests/gpu

# The Debian package on a small machine with systemd. It needs root and Debian's tools: systemd-container,
# mmdebstrap, debhelper, dpkg-dev, python3-venv, and lintian.
test-deb: .venv/.installed-tests
	PYTHON=$(PYTHON) sh scripts/setup.sh '.[test,deb]'
	ISKANDER_DEB=1 $(BIN)/pytest tests/packaging

deb: setup
	PYTHON=$(PYTHON) sh scripts/setup.sh '.[http,deb]'
	$(BIN)/python scripts/build_deb.py

lint: setup
	PYTHON=$(PYTHON) sh scripts/setup.sh '.[test,lint]'
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/gen_reference.py --check
	$(BIN)/python scripts/gen_dashboards.py --check
	$(BIN)/python scripts/licences.py --check
	$(BIN)/python scripts/sbom.py --check

fmt: setup
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

bench: setup
	PYTHON=$(PYTHON) sh scripts/setup.sh '.[test,bench]'
	$(BIN)/python -m benchmarks install iskander
	$(BIN)/python -m benchmarks.flight_latency --out build/small.jsonl
	$(BIN)/python -m benchmarks.batch_throughput --out build/large.jsonl
	$(BIN)/python -m benchmarks probe --out build/probe.jsonl

# ONNX Runtime by itself, a server with four clients, and Triton, on a GPU; then a trace of the copies.
# Without Triton's wheel for this Python its rows are missing.
bench-gpu: setup
	PYTHON=$(PYTHON) sh scripts/setup.sh '.[test,bench,gpu,torch]'
	-$(BIN)/python -m benchmarks install triton-gpu
	$(BIN)/python -m benchmarks.gpu --out build/gpu.jsonl
	$(BIN)/python -m benchmarks.gpu.trace

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

# Two hours, each with one gateway process and with two; alone on the machine, because it judges latencies.
endurance: setup
	PYTHON=$(PYTHON) sh scripts/setup.sh '.[test,bench]'
	$(BIN)/python -m benchmarks.endurance --minutes 120 --out build/endurance
	$(BIN)/python -m benchmarks.endurance --minutes 120 --processes 2 --out build/endurance-2

docs: setup
	PYTHON=$(PYTHON) sh scripts/setup.sh '.[http,lint]'
	$(BIN)/python scripts/gen_reference.py
	$(BIN)/python scripts/gen_dashboards.py
	$(BIN)/python scripts/licences.py
	$(BIN)/python scripts/sbom.py

wheel: setup
	$(BIN)/python scripts/check_wheel.py

# Each test once: on the compiled wheel those with processes, on the sources the others.
ci: lint wheel test-sources

clean:
	rm -rf .venv dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
