"""Virtual environments of the servers: one for each, because their requirements conflict.

Iskander is installed from its wheel, which is compiled if there is a C compiler. Without its own
environment it runs from the checkout, interpreted.
"""

from __future__ import annotations

import shutil
import subprocess
import sys

from benchmarks.machine import COMMIT_FILE, PEERS, ROOT, describe_commit, installed_version
from benchmarks.systems import REQUIREMENTS

GPU_REQUIREMENTS = {"triton-gpu": REQUIREMENTS["triton"]}
"""Packages of each environment with CUDA, in addition to ONNX Runtime; see `benchmarks.gpu`."""


def install(names: tuple[str, ...]) -> list[str]:
    """Create the named environments, with the ONNX Runtime version of Iskander.

    Returns:
        A line for each failed installation.
    """
    version = installed_version("onnxruntime-gpu")
    failures = []
    for name in names:
        folder = PEERS / name
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        command = [folder / "bin" / "python", "-m", "pip", "install", "--quiet"]
        if name == "iskander":
            packages = [f"{_wheel()}[http]"]
        elif name in GPU_REQUIREMENTS:
            packages = [f"onnxruntime-gpu[cuda,cudnn]=={version}", *GPU_REQUIREMENTS[name]]
        else:
            packages = [f"onnxruntime=={version}", *REQUIREMENTS[name]]
        done = subprocess.run([*command, *packages], capture_output=True, text=True, check=False)
        if done.returncode:
            shutil.rmtree(folder)
            failures.append(f"{name}: {done.stderr.strip().splitlines()[-1]}")
        elif name == "iskander":
            (folder / COMMIT_FILE).write_text(describe_commit(), "utf-8")
    return failures


def _wheel() -> str:
    """Path of this checkout's wheel, built if necessary."""
    command = [sys.executable, ROOT / "scripts" / "build_wheel.py"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip()
