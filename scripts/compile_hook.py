"""Compiles what every batch goes through, when the wheel is built with this hook enabled.

mypyc makes C of annotated Python; the modules keep their names, their source lies beside them in
the wheel, and whatever is not compiled imports them as before. An editable install stays as it is.

Source: hatch's documentation on custom build hooks, mypyc's on `mypycify`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

COMPILED = (
    "contract/rows.py",
    "gateway/dispatch.py",
    "gateway/frontends/flight_codec.py",
    "gateway/frontends/flight_data.py",
    "gateway/frontends/flight_exchange.py",
    "gateway/http2/call.py",
    "gateway/http2/connection.py",
    "gateway/http2/frames.py",
    "gateway/http2/output.py",
    "gateway/http2/patience.py",
    "gateway/intake.py",
    "gateway/lanes/admission.py",
    "gateway/lanes/batcher.py",
    "gateway/lanes/cadence.py",
    "gateway/lanes/cost.py",
    "gateway/lanes/lane.py",
    "gateway/lanes/layout.py",
    "gateway/lanes/policies.py",
    "gateway/lanes/request.py",
    "gateway/lanes/waiting.py",
    "gateway/recovery.py",
    "gateway/telemetry/histogram.py",
    "gateway/telemetry/recent.py",
    "memory/arena.py",
    "wire/channel.py",
)
BUILD = """
import sys
from mypyc.build import mypycify
from setuptools import setup
modules = mypycify(["--ignore-missing-imports", *sys.argv[1:]], opt_level="3", debug_level="0")
setup(name="iskander", packages=[], ext_modules=modules, script_args=["build_ext", "--inplace"])
"""


class CompileHook(BuildHookInterface[Any]):
    """Adds the compiled modules to a wheel."""

    PLUGIN_NAME = "custom"
    _folder: Path | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile a copy of the package, and name what came of it."""
        if version == "editable":
            return
        self._folder = folder = Path(tempfile.mkdtemp(prefix="iskander-compile-"))
        shutil.copytree(Path(self.root) / "iskander", folder / "iskander")
        files = [f"iskander/{name}" for name in COMPILED]
        environment = os.environ | {"MYPYPATH": ""}
        command = [sys.executable, "-c", BUILD, *files]
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"mypyc: {done.stdout[-4000:]}{done.stderr[-4000:]}")
        for path in (*folder.glob("*.so"), *folder.glob("iskander/**/*.so")):
            build_data["force_include"][str(path)] = path.relative_to(folder).as_posix()
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the copy."""
        del version, build_data, artifact_path
        if self._folder is not None:
            shutil.rmtree(self._folder)
