"""What was measured on, and with which versions; nothing that names the machine."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

PACKAGES = ("iskander", "pyarrow", "onnxruntime-gpu", "uvloop", "numpy", "msgspec")


def installed_version(package: str) -> str:
    """Of a package in this environment."""
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
    """Of Python, of what the figures depend on, and the commit."""
    versions = {"python": platform.python_version()}
    versions |= {package: installed_version(package) for package in PACKAGES}
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return versions | {"commit": described.stdout.strip() or "unknown"}
