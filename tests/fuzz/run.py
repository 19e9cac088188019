"""Fuzz the parsers: `python tests/fuzz/run.py [TARGET ...] --seconds 30 --seed 1`.

With atheris (`pip install -e '.[fuzz]'`) mutation is guided by coverage; without it, or with
`--blind`, only by each target's structure. Findings go to `build/fuzz/TARGET/`, and a line of JSON
for each target to `--log`. Returns 1 where there are findings.
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fuzz import engine

SPARE_S = 120.0
"""Beyond its seconds, a process that fuzzes is ended: an input holds it in native code."""
ROUND_S = 900.0
"""A guided process is started anew after that: libFuzzer's memory grows with its time."""


def main() -> int:
    """Parse the command line, fuzz each target in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(engine.names()))
    parser.add_argument("--seconds", type=float, default=30.0, help="of each target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--blind", action="store_true", help="without coverage")
    parser.add_argument("--log", type=Path, help="a line of JSON for each target is added to it")
    parser.add_argument("--repeat", type=Path, help="run one input of one target and print why")
    parser.add_argument("--shrink", type=Path, help="make a finding of one target smaller")
    parser.add_argument(
        "--collect", action="store_true", help="add what was found before to the corpus"
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    said = parser.parse_args()
    chosen = said.targets or engine.names()
    unknown = set(chosen) - set(engine.names())
    if unknown:
        parser.error(f"no such target: {', '.join(sorted(unknown))}")
    if said.child:
        return blind_child(chosen[0], said.seconds, said.seed)
    if said.repeat or said.shrink:
        return repeat(chosen[0], said.repeat or said.shrink, is_shrunk=said.shrink is not None)
    if said.collect:
        return collect(chosen)
    is_guided = not said.blind and importlib.util.find_spec("atheris") is not None
    failed = 0
    for name in chosen:
        result = fuzzed(name, said.seconds, said.seed, is_guided=is_guided)
        failed += bool(result["findings"])
        print(json.dumps(result), flush=True)
        if said.log is not None:
            with said.log.open("a") as log:
                log.write(json.dumps(result) + "\n")
    return min(failed, 1)


def repeat(name: str, path: Path, *, is_shrunk: bool) -> int:
    """Run one input; where it fails, print why, and keep a smaller one."""
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


def collect(chosen: list[str]) -> int:
    """Record inputs of guided runs that reach what no recorded one does."""
    for name in chosen:
        found = [path.read_bytes() for path in sorted((engine.FOUND / name / "corpus").glob("*"))]
        kept = engine.collect(name, found)
        (engine.CORPUS / name).mkdir(parents=True, exist_ok=True)
        for raw in kept:
            (engine.CORPUS / name / engine.name_of(raw)).write_bytes(raw)
        print(f"{name}: {len(kept)} of {len(found)} inputs, {sum(map(len, kept))} bytes")
    return 0


def blind_child(name: str, seconds: float, seed: int) -> int:
    """Fuzz one target in this process, without coverage."""
    target, last = engine.load(name), engine.LastInput(name)
    findings = engine.Findings(name)
    run = target.run

    def noted(raw: bytes) -> None:
        last.note(raw)
        run(raw)

    count = 0
    for number, finding in engine.fuzz(target._replace(run=noted), seed, None, seconds):
        count = number
        if finding is not None and findings.add(finding):
            print(f"FINDING {findings.found[finding.key]} {finding.key}", flush=True)
    print(f"stat::number_of_executed_units: {count}")
    return 0


def fuzzed(name: str, seconds: float, seed: int, *, is_guided: bool) -> dict[str, Any]:
    """Fuzz one target in processes of its own; return what came of it."""
    result: dict[str, Any] = {"target": name, "guided": is_guided, "seed": seed}
    result |= {"seconds": 0, "executions": 0, "coverage": 0, "findings": []}
    corpus = engine.FOUND / name / "corpus"
    if is_guided:
        corpus.mkdir(parents=True, exist_ok=True)
        for raw in engine.load(name).inputs:
            (corpus / engine.name_of(raw)).write_bytes(raw)
    left = seconds
    while left > 0:
        part = min(left, ROUND_S)
        left -= part
        if is_guided:
            script = f"import sys; sys.path.insert(0, {str(engine.HERE.parent)!r}); "
            script += "from fuzz import guided; guided.main(*sys.argv[1:])"
            command = [sys.executable, "-c", script, name, f"{part:.0f}", str(seed), str(corpus)]
        else:
            command = [sys.executable, __file__, name, "--child", "--seconds", str(part)]
            command += ["--seed", str(seed)]
        began = time.monotonic()
        for line in lines_of(command, part + SPARE_S):
            read_line(line, result)
        result["seconds"] += round(time.monotonic() - began)
        seed += 1000
    return result


def lines_of(command: list[str], seconds: float) -> Iterator[str]:
    """What a process prints; and how it ended, where that is not as it should."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            output += "\nFINDING it did not end: an input holds it in native code"
        yield from output.splitlines()
        if process.returncode:
            tail = " / ".join(output.splitlines()[-3:])
            yield f"FINDING the process ended with {process.returncode}: {tail}"


def read_line(line: str, result: dict[str, Any]) -> None:
    """Take a finding or a number from a line of output."""
    if line.startswith("FINDING "):
        result["findings"].append(line.removeprefix("FINDING "))
    elif line.startswith("stat::number_of_executed_units:"):
        result["executions"] += int(line.rpartition(":")[2])
    elif found := re.search(r"\bcov: (\d+)", line):
        result["coverage"] = max(result["coverage"], int(found[1]))


if __name__ == "__main__":
    sys.exit(main())
