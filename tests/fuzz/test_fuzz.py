"""All fuzzing targets: the recorded inputs, and a fixed number of reproducible mutations.

With ISKANDER_TEST_ALL=1 each target is also fuzzed for 30 s, guided if atheris is installed.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fuzz import engine

SECONDS = 30
SEED = 1


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


@pytest.mark.skipif("ISKANDER_TEST_ALL" not in os.environ, reason="ISKANDER_TEST_ALL is not set")
@pytest.mark.parametrize("name", engine.names())
def test_thirty_seconds_of_fuzzing_find_nothing(name: str) -> None:
    command = [sys.executable, str(engine.HERE / "run.py"), name, "--seconds", str(SECONDS)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]


def test_slow_input_is_a_finding() -> None:
    def run(raw: bytes) -> None:
        while True:
            pass

    with pytest.raises(engine.Hang), engine.bounded(0.05):
        run(b"")


def test_shrunk_finding_keeps_its_key() -> None:
    def run(raw: bytes) -> None:
        assert b"!" not in raw, "an exclamation"

    target = engine.Target("none", run, lambda raw, other, random: raw, [b"x"], 1)
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
