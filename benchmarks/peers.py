"""Environments of the servers: one for each, since what they need does not go together.

Iskander itself is installed as it is shipped, compiled, where there is a C compiler; without an
environment of its own it is run from the checkout as it is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from benchmarks.machine import COMMIT_FILE, PEERS, ROOT, describe_commit, installed_version
from benchmarks.systems import REQUIREMENTS


def install(names: tuple[str, ...]) -> list[str]:
    """Make the environments that are asked for, with the ONNX Runtime that Iskander runs.

    Returns:
        A line about each that cannot be installed here.
    """
    compiled = {"HATCH_BUILD_HOOK_ENABLE_CUSTOM": "1"} if shutil.which("cc") else {}
    runtime = f"onnxruntime=={installed_version('onnxruntime-gpu')}"
    failures = []
    for name in names:
        folder = PEERS / name
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        command = [folder / "bin" / "python", "-m", "pip", "install", "--quiet"]
        wanted = [f"{ROOT}[http]"] if name == "iskander" else [runtime, *REQUIREMENTS[name]]
        done = subprocess.run(
            [*command, *wanted],
            env=os.environ | compiled,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            shutil.rmtree(folder)
            failures.append(f"{name}: {done.stderr.strip().splitlines()[-1]}")
        elif name == "iskander":
            (folder / COMMIT_FILE).write_text(describe_commit(), "utf-8")
    return failures
