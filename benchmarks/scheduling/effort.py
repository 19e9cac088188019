"""Shared command line options of these benchmarks, and their results file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.runner import Effort


def make_parser(description: str, seconds: float) -> argparse.ArgumentParser:
    """A parser with the shared options."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=3, help="rounds; medians are reported")
    parser.add_argument("--seconds", type=float, default=seconds, help="seconds of each run")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results to this file")
    parser.add_argument("--quick", action="store_true", help="run each only for a moment")
    return parser


def read_effort(arguments: argparse.Namespace) -> Effort:
    """Rounds and durations from the command line."""
    if arguments.quick:
        return Effort(rounds=1, seconds=0.5, warm_up_seconds=0.25)
    return Effort(rounds=arguments.rounds, seconds=arguments.seconds)


def write_results(results: dict[str, Any], path: Path | None) -> None:
    """Write a results file, if `--json` is set."""
    if path is not None:
        path.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
