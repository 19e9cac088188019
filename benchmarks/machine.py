"""Description of the machine and the software versions, without names of the machine."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / "build" / "benchmarks" / "peers"
COMMIT_FILE = "commit"
PACKAGES = ("iskander", "pyarrow", "onnxruntime-gpu", "uvloop", "numpy", "msgspec")


def installed_version(package: str) -> str:
    """Version of a package in this environment."""
    return version(package)


def describe_machine() -> dict[str, Any]:
    """Processor, cores, memory, kernel."""
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / (1 << 30)),
        "system": f"{platform.system()} {platform.release()}",
    }


def describe_versions() -> dict[str, str]:
    """Versions of Python and the packages, the commit, and the kind of build."""
    versions = {"python": platform.python_version()}
    versions |= {package: installed_version(package) for package in PACKAGES}
    marker = PEERS / "iskander" / COMMIT_FILE
    if marker.exists():
        return versions | {"iskander's build": "compiled", "commit": marker.read_text("utf-8")}
    return versions | {"iskander's build": "as it is", "commit": describe_commit()}


def describe_commit() -> str:
    """Commit of the checkout."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() or "unknown"
