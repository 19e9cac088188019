"""Fuzz the parsers: `python tests/fuzz/run.py [TARGET ...] --seconds 30 --seed 1`.

With atheris (`pip install -e '.[fuzz]'`) coverage guides mutation; without it, or with `--blind`,
only each target's structure does. Instrumented code is slow, so time and memory are judged in a
process without it, which takes the last part of a guided run. Findings go to `build/fuzz/TARGET/`,
and a line of JSON for each target to `--log`. Returns 1 if there are findings.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fuzz import engine, record

GRACE_S = 120.0
"""Grace period before a fuzzing process is killed: an input blocks it in native code."""
ROUND_S = 900.0
"""A guided process is restarted after this time, because libFuzzer's memory grows."""
JUDGED_SHARE = 0.2
"""Share of a guided run without instrumentation."""
SAMPLE_S = 0.5
"""Interval between two samples of the resident memory."""


def main() -> int:
    """Parse the command line, fuzz each target in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(engine.names()))
    parser.add_argument("--seconds", type=float, default=30.0, help="time for each target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--blind", action="store_true", help="without coverage")
    parser.add_argument("--log", type=Path, help="file to append a line of JSON for each target to")
    parser.add_argument(
        "--repeat", type=Path, help="run one input of one target and print its failure"
    )
    parser.add_argument("--shrink", type=Path, help="shrink a finding of one target")
    parser.add_argument(
        "--collect", action="store_true", help="add inputs of earlier runs to the corpus"
    )
    parser.add_argument("--record", type=Path, help="add a log to the table in README.md")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    targets = arguments.targets or engine.names()
    unknown = set(targets) - set(engine.names())
    if unknown:
        parser.error(f"no such target: {', '.join(sorted(unknown))}")
    if arguments.child:
        with engine.without_logs():
            return blind_child(targets[0], arguments.seconds, arguments.seed)
    if arguments.record:
        print(record.add(arguments.record))
        return 0
    if arguments.repeat or arguments.shrink:
        return repeat(
            targets[0], arguments.repeat or arguments.shrink, is_shrunk=arguments.shrink is not None
        )
    if arguments.collect:
        return collect(targets)
    is_guided = not arguments.blind and importlib.util.find_spec("atheris") is not None
    failed = 0
    for name in targets:
        result = fuzz(name, arguments.seconds, arguments.seed, is_guided=is_guided)
        failed += bool(result["findings"])
        print(json.dumps(result), flush=True)
        if arguments.log is not None:
            with arguments.log.open("a") as log:
                log.write(json.dumps(result) + "\n")
    return min(failed, 1)


def repeat(name: str, path: Path, *, is_shrunk: bool) -> int:
    """Run one input; print its failure, and shrink it on request."""
    target = engine.load(name)
    finding = engine.check(target, path.read_bytes())
    if finding is None:
        print("passed")
        return 0
    if is_shrunk:
        finding = engine.shrunk(target, finding)
        path.with_suffix(".small").write_bytes(finding.raw)
    print(finding.text)
    print(finding.raw.hex())
    return 1


def collect(targets: list[str]) -> int:
    """Record inputs of guided runs with new coverage."""
    for name in targets:
        candidates = [
            path.read_bytes() for path in sorted((engine.FINDINGS / name / "corpus").glob("*"))
        ]
        selected = engine.collect(name, candidates)
        (engine.CORPUS / name).mkdir(parents=True, exist_ok=True)
        for raw in selected:
            (engine.CORPUS / name / engine.name_of(raw)).write_bytes(raw)
        print(
            f"{name}: {len(selected)} of {len(candidates)} inputs, {sum(map(len, selected))} bytes"
        )
    return 0


def blind_child(name: str, seconds: float, seed: int) -> int:
    """Fuzz one target in this process, without coverage.

    It starts with the inputs of earlier guided runs, if there are any.
    """
    target, last = engine.load(name), engine.LastInput(name)
    target = target._replace(inputs=[*target.inputs, *engine.guided_inputs(name)])
    findings = engine.Findings(name)
    run = target.run
    memory: list[int] = []
    sample_at = 0.0

    def record_and_run(raw: bytes) -> None:
        last.record(raw)
        run(raw)

    target = target._replace(run=record_and_run)
    count = 0
    for finding in engine.inputs_and_mutations(target, seed, seconds):
        count += 1
        if finding is not None and findings.add(finding):
            print(f"FINDING {findings.paths[finding.key]} {finding.key}", flush=True)
        if time.monotonic() >= sample_at:
            memory.append(psutil.Process().memory_info().rss)
            sample_at = time.monotonic() + SAMPLE_S
    growth = engine.growth_bytes(memory)
    if growth > engine.GROWTH_BYTES_MAX:
        print(f"FINDING {growth:,} bytes of memory grew in {count} executions")
    print(f"stat::number_of_executed_units: {count}")
    return 0


def fuzz(name: str, seconds: float, seed: int, *, is_guided: bool) -> dict[str, Any]:
    """Fuzz one target in child processes; return the result."""
    result: dict[str, Any] = {"target": name, "guided": is_guided, "seed": seed}
    result |= {"seconds": 0, "executions": 0, "coverage": 0, "findings": []}
    corpus = engine.FINDINGS / name / "corpus"
    if is_guided:
        corpus.mkdir(parents=True, exist_ok=True)
        for raw in engine.load(name).inputs:
            (corpus / engine.name_of(raw)).write_bytes(raw)
    guided_s = seconds * (1 - JUDGED_SHARE) if is_guided else 0.0
    for round_s, is_instrumented in (*rounds(guided_s, True), *rounds(seconds - guided_s, False)):
        if is_instrumented:
            script = f"import sys; sys.path.insert(0, {str(engine.HERE.parent)!r}); "
            script += "from fuzz import guided; guided.main(*sys.argv[1:])"
            command = [sys.executable, "-c", script, name, f"{round_s:.0f}", str(seed), str(corpus)]
        else:
            command = [sys.executable, __file__, name, "--child", "--seconds", str(round_s)]
            command += ["--seed", str(seed)]
        started = time.monotonic()
        for line in output_lines(command, round_s + GRACE_S):
            read_line(line, result)
        result["seconds"] += round(time.monotonic() - started)
        seed += 1000
    return result


def rounds(seconds: float, is_instrumented: bool) -> Iterator[tuple[float, bool]]:
    """Cut a time into the times of processes."""
    while seconds > 0:
        round_s = min(seconds, ROUND_S)
        seconds -= round_s
        yield round_s, is_instrumented


def output_lines(command: list[str], seconds: float) -> Iterator[str]:
    """Output lines of a process, and a finding if it hangs or fails."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            output += "\nFINDING the process did not end: an input blocks it in native code"
        yield from output.splitlines()
        if process.returncode:
            tail = " / ".join(output.splitlines()[-3:])
            yield f"FINDING the process ended with {process.returncode}: {tail}"


def read_line(line: str, result: dict[str, Any]) -> None:
    """Add a finding or a number from a line of output to the result."""
    if line.startswith("FINDING "):
        result["findings"].append(line.removeprefix("FINDING "))
    elif line.startswith("stat::number_of_executed_units:"):
        result["executions"] += int(line.rpartition(":")[2])
    elif match := re.search(r"\bcov: (\d+)", line):
        result["coverage"] = max(result["coverage"], int(match[1]))


if __name__ == "__main__":
    sys.exit(main())
