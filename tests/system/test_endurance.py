"""Endurance runs by the benchmark's command: short ones, a deliberate leak, and a long one.

`ISKANDER_ENDURANCE_MINUTES` enables all but one of them, and sets the duration of the long one;
`make test-all` sets 10.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("inferential")
pytest.importorskip("tritonclient.grpc")

ROOT = Path(__file__).resolve().parent.parent.parent
MINUTES = float(os.environ.get("ISKANDER_ENDURANCE_MINUTES", "0"))
SHORT_MINUTES, LEAK_MINUTES = 0.4, 1.0
EXTRA_S = 300.0
"""For the start, the quiet points and the end of a run on a busy machine."""
long_only = pytest.mark.skipif(
    not MINUTES, reason="long: `make test-all`, or ISKANDER_ENDURANCE_MINUTES"
)
FAMILIES = {"flight", "grpc", "http", "inferential"}


class Run:
    """An endurance run.

    Attributes:
        code: Exit code of the command.
        records: What it wrote.
    """

    def __init__(self, out: Path, minutes: float, *options: str) -> None:
        command = [sys.executable, "-m", "benchmarks.endurance", "--minutes", str(minutes)]
        done = subprocess.run(
            [*command, "--out", str(out), "--no-plots", *options],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60 * minutes + EXTRA_S,
            check=False,
        )
        sys.stderr.write(done.stdout + done.stderr)
        assert done.returncode in (0, 1), done.stderr[-4000:]
        self.code = done.returncode
        lines = (out / "records.jsonl").read_text("utf-8").splitlines()
        self.records: list[dict[str, Any]] = [json.loads(line) for line in lines]
        # A run that ends by an exception has the exit code 1, too.
        assert self.of_kind("verdict"), done.stderr[-4000:]

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [each for each in self.records if each["kind"] == kind]

    def broken(self) -> dict[str, dict[str, Any]]:
        """Broken limits, except those of latencies, which depend on other programs."""
        return {
            f"{each['subject']}: {each['metric']}": each
            for each in self.of_kind("verdict")
            if each["word"] == "broken" and each["metric"] != "p99_ms"
        }


def require_load(run: Run) -> None:
    """Check that every client was answered, and that the run had faults and quiet points."""
    windows = run.of_kind("window")
    assert {each["family"] for each in windows} >= FAMILIES
    right = {
        name
        for window in windows
        for name, count in window["counts"].items()
        if name.endswith(": right") and count
    }
    assert len(right) > 10, right
    assert {each["text"].partition(":")[0] for each in run.of_kind("deed")} >= {"publish", "reset"}
    assert sum(each["is_quiet"] for each in run.of_kind("sample")) > 4


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=long_only)])
def test_short_run_has_only_right_answers(tmp_path: Path, processes: int) -> None:
    """Memory is not judged: it grows in so short a time."""
    run = Run(tmp_path, SHORT_MINUTES, "--processes", str(processes))
    require_load(run)
    for name in run.broken():
        assert not name.startswith(("clients: ", "quiet points: ", "server: tracebacks")), name


@long_only
def test_kept_regions_break_the_limits(tmp_path: Path) -> None:
    """Long enough for quarters with several quiet points."""
    run = Run(tmp_path, LEAK_MINUTES, "--leak")
    assert run.code == 1
    assert run.broken().keys() >= {"gateway 0: regions", "isk-gateway: descriptors"}


@long_only
def test_long_run_breaks_no_limit(tmp_path: Path) -> None:
    run = Run(tmp_path, MINUTES)
    require_load(run)
    assert run.broken() == {}
