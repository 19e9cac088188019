"""Environments of the other servers: one for each, since what they need does not go together."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.machine import installed_version
from benchmarks.systems import PEERS, REQUIREMENTS


def install(names: tuple[str, ...]) -> list[str]:
    """Make the environments that are asked for, with the ONNX Runtime that Iskander runs.

    Returns:
        A line about each that cannot be installed here.
    """
    runtime = f"onnxruntime=={installed_version('onnxruntime-gpu')}"
    failures = []
    for name in names:
        folder = PEERS / name
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        command = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", runtime]
        done = subprocess.run(
            [*command, *REQUIREMENTS[name]], capture_output=True, text=True, check=False
        )
        if done.returncode:
            (folder / "pyvenv.cfg").unlink()
            failures.append(f"{name}: {done.stderr.strip().splitlines()[-1]}")
    return failures
