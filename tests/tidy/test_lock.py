"""Consistency of uv.lock, scripts/constraints.txt and pyproject.toml."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
LOCK = tomllib.loads((ROOT / "uv.lock").read_text())
PIN = re.compile(r"^([\w.-]+)==([^\s;]+)", re.MULTILINE)
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCKED = {(package["name"], package.get("version")) for package in LOCK["package"]}


def test_constraints_are_the_locked_versions() -> None:
    pins = set(PIN.findall((ROOT / "scripts" / "constraints.txt").read_text()))
    assert len(pins) > 50
    assert pins - LOCKED == set()


def test_every_dependency_is_locked() -> None:
    """Checks names only; versions need the network."""
    extras = PYPROJECT["optional-dependencies"].values()
    requirements = [*PYPROJECT["dependencies"], *(each for extra in extras for each in extra)]
    names = {re.match(r"[\w.-]+", each)[0].lower() for each in requirements}  # type: ignore[index]
    assert names - {name for name, _ in LOCKED} == set()


def test_every_locked_file_has_a_hash() -> None:
    for package in LOCK["package"]:
        for file in [*package.get("wheels", ()), *filter(None, [package.get("sdist")])]:
            assert file["hash"].startswith("sha256:")


def test_lock_is_current() -> None:
    """uv resolves pyproject.toml to the same lock; skipped without uv or the network."""
    uv = shutil.which("uv") or shutil.which("uv", path=os.fspath(Path(sys.executable).parent))
    if uv is None:
        pytest.skip("uv is not installed")
    result = subprocess.run(
        [uv, "lock", "--check", "--project", os.fspath(ROOT)],
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode and re.search(r"(?i)network|dns|connect|timed out|fetch", result.stderr):
        pytest.skip("the package index cannot be reached")
    assert result.returncode == 0, result.stderr
