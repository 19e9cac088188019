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

PACKAGES = {"iskander": "iskander", "iskander_worker": "workers/iskander_worker"}
COMPILED = (
    "iskander/contract/rows.py",
    "iskander/gateway/access/grants.py",
    "iskander/gateway/asking.py",
    "iskander/gateway/cpu_allowance.py",
    "iskander/gateway/dispatch.py",
    "iskander/gateway/ending.py",
    "iskander/gateway/frontends/flight_checks.py",
    "iskander/gateway/frontends/flight_codec.py",
    "iskander/gateway/frontends/flight_data.py",
    "iskander/gateway/frontends/flight_exchange.py",
    "iskander/gateway/frontends/flight_pending.py",
    "iskander/gateway/frontends/flight_shared.py",
    "iskander/gateway/frontends/flight_target.py",
    "iskander/gateway/frontends/grpc_server.py",
    "iskander/gateway/frontends/inferential_session.py",
    "iskander/gateway/frontends/oip_infer.py",
    "iskander/gateway/frontends/oip_request.py",
    "iskander/gateway/frontends/oip_service.py",
    "iskander/gateway/frontends/oip_tensors.py",
    "iskander/gateway/frontends/oip_unary.py",
    "iskander/gateway/frontends/oip_wire.py",
    "iskander/gateway/frontends/stream_terms.py",
    "iskander/gateway/http2/call.py",
    "iskander/gateway/http2/call_input.py",
    "iskander/gateway/http2/connection.py",
    "iskander/gateway/http2/frames.py",
    "iskander/gateway/http2/header_blocks.py",
    "iskander/gateway/http2/headers.py",
    "iskander/gateway/http2/output.py",
    "iskander/gateway/http2/rate_limit.py",
    "iskander/gateway/http2/request_head.py",
    "iskander/gateway/http2/streams.py",
    "iskander/gateway/intake.py",
    "iskander/gateway/lanes/admission.py",
    "iskander/gateway/lanes/batcher.py",
    "iskander/gateway/lanes/cadence.py",
    "iskander/gateway/lanes/cost.py",
    "iskander/gateway/lanes/fair_share.py",
    "iskander/gateway/lanes/lane.py",
    "iskander/gateway/lanes/layout.py",
    "iskander/gateway/lanes/measures.py",
    "iskander/gateway/lanes/policies.py",
    "iskander/gateway/lanes/request.py",
    "iskander/gateway/lanes/waiting.py",
    "iskander/gateway/models.py",
    "iskander/gateway/offered.py",
    "iskander/gateway/recovery.py",
    "iskander/gateway/results.py",
    "iskander/gateway/supervision/hearing.py",
    "iskander/gateway/supervision/workers.py",
    "iskander/gateway/telemetry/histogram.py",
    "iskander/gateway/turns.py",
    "iskander/gateway/waking.py",
    "iskander/gateway/zmtp/backlog.py",
    "iskander/gateway/zmtp/connection.py",
    "iskander/gateway/zmtp/frames.py",
    "iskander/gateway/zmtp/partial.py",
    "iskander/memory/arena.py",
    "iskander/memory/beat.py",
    "iskander/memory/loan.py",
    "iskander/memory/pieces.py",
    "iskander/wire/channel.py",
    "iskander/wire/varint.py",
    "iskander_worker/abort.py",
    "iskander_worker/backends/onnx_binding.py",
    "iskander_worker/executor.py",
    "iskander_worker/gateways.py",
    "iskander_worker/loop.py",
)
FLAGS = "-fvisibility=hidden"
"""Nobody else calls these functions: so they call each other directly, and not by a table."""
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
        for package, source in PACKAGES.items():
            shutil.copytree(Path(self.root) / source, folder / package)
        flags = f"{os.environ.get('CFLAGS', '')} {FLAGS}".strip()
        environment = os.environ | {"MYPYPATH": "", "CFLAGS": flags}
        command = [sys.executable, "-c", BUILD, *COMPILED]
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"mypyc: {done.stdout[-4000:]}{done.stderr[-4000:]}")
        inside = [path for package in PACKAGES for path in folder.glob(f"{package}/**/*.so")]
        for path in (*folder.glob("*.so"), *inside):
            build_data["force_include"][str(path)] = path.relative_to(folder).as_posix()
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the copy."""
        del version, build_data, artifact_path
        if self._folder is not None:
            shutil.rmtree(self._folder)
