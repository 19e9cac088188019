"""Runs ONNX's backend suite on gateways: `python tests/onnx_suite/run.py [WORD ...]`.

`--write` replaces the table of `README.md`; it needs all cases. Returns 1 if a result is
wrong, a failure is internal, a worker dies, or a reason has no class.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from pathlib import Path

os.environ["ORT_DISABLE_TELEMETRY"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import onnx
import onnxruntime

from onnx_suite import cases, table
from onnx_suite.comparison import Verdict, judge

MODELS_EACH = 100
"""Models of one gateway."""
LINE_CHARACTERS = 800


def main() -> int:
    """Run the cases, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="replace the table of the page")
    parser.add_argument("words", nargs="*", metavar="WORD", help="only cases with it in the name")
    parser.add_argument("--kind", action="append", choices=cases.KINDS)
    parser.add_argument("--folder", type=Path, help="cases of a folder, not those of the suite")
    parser.add_argument("--log", type=Path, help="file with a line of JSON for each case")
    arguments = parser.parse_args()
    words = tuple(arguments.words)
    if arguments.write and (words or arguments.kind or arguments.folder):
        parser.error("--write needs all cases")
    if arguments.folder:
        collected = cases.folder(arguments.folder, words)
    else:
        collected = cases.suite(tuple(arguments.kind or cases.KINDS), words)
    verdicts: list[Verdict] = []
    log = None
    if arguments.log:
        arguments.log.parent.mkdir(parents=True, exist_ok=True)
        log = arguments.log.open("w")

    def note(verdict: Verdict) -> None:
        verdicts.append(verdict)
        line = json.dumps({key: value for key, value in vars(verdict).items() if value})
        if log:
            log.write(line + "\n")
            log.flush()
        if verdict.is_bad or arguments.folder:
            print(line[:LINE_CHARACTERS], flush=True)

    begun = time.monotonic()
    iterator = iter(collected)
    while chunk := list(itertools.islice(iterator, MODELS_EACH)):
        judge(chunk, note)
        print(f"{len(verdicts)} cases, {time.monotonic() - begun:.0f} s", flush=True)
    summary = table.summarize(verdicts, (onnx.__version__, onnxruntime.__version__))
    if arguments.write:
        table.write(summary)
    print(table.render(summary))
    return 0 if summary.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
