"""The examples of `configs/examples`, built and served in a test's folder."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from support.processes import Gateway, running

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "configs" / "examples"


def module(name: str) -> ModuleType:
    """An example's `make_model.py`, for the expected figures of its model."""
    file = EXAMPLES / name / "make_model.py"
    spec = importlib.util.spec_from_file_location(f"make_{name.replace('-', '_')}", file)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@contextlib.contextmanager
def served(name: str, folder: Path, **sections: Any) -> Iterator[Gateway]:
    """Build an example's model by its command, and serve it with its configuration."""
    copy = folder / name
    shutil.copytree(EXAMPLES / name, copy, ignore=shutil.ignore_patterns("*.onnx"))
    command = [sys.executable, "-W", "ignore", str(copy / "make_model.py")]
    subprocess.run(command, check=True)
    config = tomllib.loads((copy / "config.toml").read_text())
    entries = config.pop("models")
    for entry in entries:
        entry |= {"path": str(copy / entry["path"]), "version": "1"}
    config["server"].pop("address")
    for section, values in sections.items():
        config.setdefault(section, {}).update(values)
    config.setdefault("workers", {}).setdefault("groups", ["0"])
    with running(folder, entries, **config) as gateway:
        yield gateway
    shutil.rmtree(copy)
