"""Copy of the client distribution's files, run by an isolated Python that resembles a laptop's."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "scripts"
PLATFORMS = ("linux", "darwin", "win32")
REFUSED = (
    "fcntl",
    "resource",
    "msgspec",
    "uvloop",
    "zmq",
    "onnxruntime",
    "iskander_worker",
    "grpc",
)
"""Modules that macOS, Windows or the client's dependencies lack."""
TIMEOUT_S = 60.0
# The libraries are those of Linux, so they are imported before the platform changes. On Linux,
# asyncio imports fcntl itself.
LAPTOP = f"""
import asyncio, json, sys
sys.modules |= dict.fromkeys({REFUSED!r})
sys.path += [sys.argv[1], sys.argv[2]]
import pyarrow, pyarrow.compute, pyarrow.flight
sys.platform = sys.argv[3]
arguments = json.loads(sys.argv[4])
import iskander.client
assert iskander.client.__file__.startswith(sys.argv[1]), iskander.client.__file__
"""


def build_client() -> ModuleType:
    """The script that builds the client distribution, as a module."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        spec = importlib.util.spec_from_file_location("build_client", SCRIPTS / "build_client.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(SCRIPTS))


def run(folder: Path, platform: str, script: str, **arguments: Any) -> Any:
    """Run a script after `import iskander.client` from a copy; return the JSON that it prints."""
    libraries = str(Path(pyarrow.__file__).parent.parent)
    command = [sys.executable, "-I", "-S", "-c", LAPTOP + script]
    done = subprocess.run(
        [*command, str(folder), libraries, platform, json.dumps(arguments)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        cwd=folder,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
