"""Coverage-guided fuzzing of one target with atheris (libFuzzer).

`run.py` starts it as a child process, because libFuzzer ends its process.
"""

from __future__ import annotations

import sys
from random import Random

import atheris

from fuzz import engine, mutation

STRUCTURED = 0.7
"""Share of mutations by the target; libFuzzer makes the others."""


def main(name: str, seconds: str, seed: str, corpus: str) -> None:
    """Fuzz for a number of seconds; reads inputs from the corpus folder and adds new ones."""
    with atheris.instrument_imports(
        include=["iskander", "hpack", "h11"], enable_loader_override=False
    ):
        target = engine.load(name)
    findings = engine.Findings(name)
    slow = engine.SlowInputs(name)

    def run(raw: bytes) -> None:
        finding = engine.check(target, raw)
        if finding is not None and finding.key.startswith(engine.Costly.__name__):
            slow.add(raw)
        elif finding is not None and findings.add(finding):
            print(f"FINDING {findings.paths[finding.key]} {finding.key}", flush=True)

    def mutate(raw: bytes, size_max: int, number: int) -> bytes:
        random = Random(number)
        if random.random() > STRUCTURED:
            changed: bytes = atheris.Mutate(raw, size_max)
            return changed
        other = random.choice(target.inputs)
        for _ in range(random.choice((1, 1, 2, 4))):
            change = target.mutate if random.random() < 0.8 else mutation.flip
            raw = change(raw, other, random)
        return raw[:size_max]

    options = [
        f"-max_total_time={seconds}",
        f"-seed={seed}",
        f"-max_len={engine.INPUT_BYTES_MAX}",
        "-timeout=60",
        "-rss_limit_mb=4096",
        "-print_final_stats=1",
        f"-artifact_prefix={engine.FINDINGS / name}/",
    ]
    atheris.Setup([sys.argv[0], *options, corpus], run, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    with engine.without_logs():
        main(*sys.argv[1:])
