"""All fuzzing targets: the recorded inputs, and a fixed number of reproducible mutations.

With ISKANDER_TEST_ALL=1 each target is also fuzzed for 60 s, guided if atheris is installed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from random import Random

import pytest

from fuzz import engine, record

SECONDS = 60
SEED = 1


@pytest.fixture(autouse=True)
def no_logs() -> Iterator[None]:
    with engine.without_logs():
        yield


@pytest.mark.parametrize("name", engine.names())
def test_parser_matches_reference_for_inputs_and_mutations(name: str) -> None:
    target = engine.load(name)
    assert engine.corpus_of(name) or target.inputs
    for raw in target.inputs:
        finding = engine.check(target, raw)
        assert finding is None, f"{engine.name_of(raw)}: {finding.text}"
    for number, finding in engine.fuzz(target, SEED, target.iterations, None):
        if finding is not None:
            engine.Findings(name).add(finding)
            raise AssertionError(f"mutation {number}, {finding.raw.hex()}: {finding.text}")


@pytest.mark.parametrize("name", engine.names())
def test_any_bytes_can_be_mutated(name: str) -> None:
    """libFuzzer's own mutations follow no format."""
    target, random = engine.load(name), Random(1)
    for size in (0, 1, 2, 3, 40):
        for _ in range(40):
            target.mutate(random.randbytes(size), random.randbytes(size), random)


@pytest.mark.skipif("ISKANDER_TEST_ALL" not in os.environ, reason="ISKANDER_TEST_ALL is not set")
@pytest.mark.parametrize("name", engine.names())
def test_a_minute_of_fuzzing_finds_nothing(name: str) -> None:
    command = [sys.executable, str(engine.HERE / "run.py"), name, "--seconds", str(SECONDS)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]


def target_of(run: Callable[[bytes], None]) -> engine.Target:
    return engine.Target("none", run, lambda raw, other, random: raw, [b"x"], 1)


def test_input_without_an_end_is_interrupted() -> None:
    def run(raw: bytes) -> None:
        while True:
            pass

    with pytest.raises(engine.Hang), engine.bounded(0.05):
        run(b"")


def test_slow_input_is_a_finding_by_its_fastest_execution(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.2, 0.15, 0.3, 0.5, 0.01, 0.05])
    measured = lambda target, raw: engine.Cost(next(times), 0)  # noqa: E731
    monkeypatch.setattr(engine, "_measured", measured)
    target = target_of(lambda raw: None)
    finding = engine.check(target, b"x")
    assert finding is not None and "150 ms for 1 bytes, limit 20 ms" in finding.text
    assert engine.check(target, b"x") is None
    assert engine.check(target, bytes(engine.INPUT_BYTES_MAX)) is None


def test_only_the_marked_part_of_an_execution_has_a_cost() -> None:
    def spin() -> None:
        until = time.process_time() + 0.05
        while time.process_time() < until:
            pass

    def run(raw: bytes) -> None:
        if raw == b"reference":
            with engine.product():
                pass
            spin()
        else:
            with engine.product():
                spin()

    assert engine.check(target_of(run), b"reference") is None
    finding = engine.check(target_of(run), b"product")
    assert finding is not None and "limit 20 ms" in finding.text


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="no peak of memory")
def test_peak_of_memory_above_a_multiple_of_the_size_is_a_finding() -> None:
    def run(raw: bytes) -> None:
        if raw == b"charged":
            engine.charge(40 << 20)
        with engine.product():
            pass  # Only the memory counts.
        bytearray(40 << 20)  # Freed at once.

    target = target_of(run)
    finding = engine.check(target, b"x")
    assert finding is not None and re.search(r"4\d,\d+ KiB of memory for 1 bytes", finding.text)
    assert engine.check(target, b"charged") is None
    assert engine.check(target, bytes(160_000)) is None


def test_growth_of_memory_is_that_after_the_first_half() -> None:
    assert engine.growth_bytes([10, 90, 80, 90, 90, 85, 95, 90]) == 0
    assert engine.growth_bytes([10, 20, 30, 40, 50, 60, 70, 80]) == 30
    assert engine.growth_bytes([10, 20, 30]) == 0


def test_leak_is_a_finding() -> None:
    """A target without a leak is every other test here."""
    script = "from fuzz import engine, run; from fuzz.targets import oip_strings; kept = []\n"
    script += "oip_strings.run = lambda raw: kept.append(bytes(100_000) + raw)\n"
    script += "run.SAMPLE_S = 0.02; run.blind_child('oip_strings', 1.0, 1)"
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True, text=True, check=True, cwd=engine.HERE.parent,
    )  # fmt: skip
    assert re.search(r"^FINDING [\d,]+ bytes of memory grew", result.stdout, re.M), result.stdout


def test_runs_are_added_to_the_record() -> None:
    text = "| target |\n| `a` | m | r | 1,000 | 5 | 7 | none |\n| `b` | m | r | 1 | 1 | | x |\n"
    text += "\n1,001 executions in 6 s (0 minutes). More."
    runs = [
        {"target": "a", "executions": 500, "seconds": 60, "coverage": 6},
        {"target": "b", "executions": 2, "seconds": 60, "coverage": 3},
    ]
    added, total = record.added(text, runs)
    assert "| `a` | m | r | 1,500 | 65 | 7 | none |\n| `b` | m | r | 3 | 61 | 3 | x |\n" in added
    assert total == "1,503 executions in 126 s (2 minutes)" and f"{total}. More." in added
    with pytest.raises(ValueError, match="no row for the target c"):
        record.added(text, [{**runs[0], "target": "c"}])


def test_each_target_has_a_row_in_the_record() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", record.README.read_text(), re.M)
    assert sorted(rows) == engine.names()


def test_shrunk_finding_keeps_its_key() -> None:
    def run(raw: bytes) -> None:
        assert b"!" not in raw, "an exclamation"

    target = target_of(run)
    finding = engine.check(target, b"a" * 100 + b"!" + b"b" * 50)
    assert finding is not None
    assert engine.shrunk(target, finding).raw == b"!"
    other = engine.check(target, b"!!")
    assert other is not None and other.key == finding.key


def test_inputs_with_new_coverage_are_collected() -> None:
    recorded = engine.load("flight_data").inputs
    recorded_input = recorded[1]
    assert engine.collect("flight_data", [recorded_input, recorded_input + recorded_input]) == []
    assert engine.reached(engine.load("flight_data"), b"\x12\x80")
