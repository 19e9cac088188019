"""`iskander doctor` on the machine of the tests."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from support.models import ROOT, row_ids
from support.processes import BIN, running

from iskander.cli.doctor.diagnosis import CHECKS

STATES = {"ok", "note", "warning", "problem"}


def doctor(*words: object, code: int = 0) -> dict[str, Any]:
    done = subprocess.run(
        [BIN / "iskander", "doctor", "--json", *map(str, words)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == code and not done.stderr, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def by_check(found: dict[str, Any]) -> dict[str, dict[str, str]]:
    return {each["check"]: each for each in found["findings"]}


def test_real_machine() -> None:
    """The gateways of the tests start here, so there is no problem."""
    found = doctor(ROOT / "configs" / "quickstart.toml")
    checks = by_check(found)
    assert len(checks) >= len(CHECKS)
    assert {each["state"] for each in checks.values()} <= STATES - {"problem"}
    assert sum(found["counts"].values()) == len(found["findings"])
    assert checks["memfd"]["state"] == checks["pidfd"]["state"] == "ok"
    assert "arenas 320 MiB" in checks["memory"]["found"]


def test_text_output_of_a_problem() -> None:
    done = subprocess.run(
        [BIN / "iskander", "doctor", ROOT / "configs/quickstart.toml",
         "--set", "arena.input_bytes=100000000000000"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and not done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("problem   memory: arenas ")
    assert any(line.startswith("          fix: ") for line in lines)
    assert any(line.startswith("          undo: ") for line in lines)
    assert all(len(line) <= 100 for line in lines)
    assert lines[-1].startswith("1 problem, ")


def test_another_process(tmp_path: Path) -> None:
    """The limits of a running gateway, whose hard limit of files is its own."""
    served = [{"name": "ids", "path": str(row_ids(tmp_path / "ids"))}]
    prefix = ("prlimit", "--nofile=4000:4000", "--")
    with running(tmp_path, served, prefix=prefix) as gateway:
        checks = by_check(doctor(gateway.config, "--pid", gateway.pid))
    assert "4,000 allowed (hard limit)" in checks["open_files"]["found"]
    assert checks["open_files"]["state"] == "warning"
    assert str(gateway.runtime) in checks["runtime_directory"]["found"]
