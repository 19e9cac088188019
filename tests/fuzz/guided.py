"""One target under atheris (libFuzzer): inputs that reach new code are kept and mutated further.

Started by `run.py` as a process of its own, since libFuzzer ends the process that it runs in.
"""

from __future__ import annotations

import sys
from random import Random

import atheris

from fuzz import engine, mutation

STRUCTURED = 0.7
"""Of mutations; the others are libFuzzer's own."""


def main(name: str, seconds: str, seed: str, corpus: str) -> None:
    """Fuzz for so many seconds; inputs are read from the corpus folder, and new ones go there."""
    with atheris.instrument_imports(
        include=["iskander", "hpack", "h11", "uvicorn"], enable_loader_override=False
    ):
        target = engine.load(name)
    findings = engine.Findings(name)

    def run(raw: bytes) -> None:
        finding = engine.check(target, raw)
        if finding is not None and findings.add(finding):
            print(f"FINDING {findings.found[finding.key]} {finding.key}", flush=True)

    def mutate(raw: bytes, most: int, number: int) -> bytes:
        random = Random(number)
        if random.random() > STRUCTURED:
            changed: bytes = atheris.Mutate(raw, most)
            return changed
        other = random.choice(target.inputs)
        for _ in range(random.choice((1, 1, 2, 4))):
            change = target.mutate if random.random() < 0.8 else mutation.flip
            raw = change(raw, other, random)
        return raw[:most]

    options = [
        f"-max_total_time={seconds}",
        f"-seed={seed}",
        f"-max_len={engine.INPUT_BYTES_MAX}",
        "-timeout=60",
        "-rss_limit_mb=4096",
        "-print_final_stats=1",
        f"-artifact_prefix={engine.FOUND / name}/",
    ]
    atheris.Setup([sys.argv[0], *options, corpus], run, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
