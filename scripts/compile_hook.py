"""Build hook: compiles the modules on the path of a batch when it is enabled.

mypyc compiles annotated Python to C. The modules keep their names, their sources are next to them
in the wheel, and interpreted modules import them as before. An editable install stays interpreted.

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
    "iskander/auth/grants.py",
    "iskander/contract/rows.py",
    "iskander/control/channel.py",
    "iskander/control/zmq_channel.py",
    "iskander/measurement/histogram.py",
    "iskander/memory/arena.py",
    "iskander/memory/chunked_copy.py",
    "iskander/memory/client_segment.py",
    "iskander/memory/heartbeat.py",
    "iskander/protocols/flight/codec.py",
    "iskander/protocols/flight/data.py",
    "iskander/protocols/flight/exchange.py",
    "iskander/protocols/flight/shared_memory.py",
    "iskander/protocols/grpc_server.py",
    "iskander/protocols/inferential/session.py",
    "iskander/protocols/oip/infer.py",
    "iskander/protocols/oip/request.py",
    "iskander/protocols/oip/service.py",
    "iskander/protocols/oip/tensors.py",
    "iskander/protocols/oip/unary.py",
    "iskander/protocols/oip/wire.py",
    "iskander/protocols/stream_terms.py",
    "iskander/protocols/submit.py",
    "iskander/protocols/tensors.py",
    "iskander/protocols/window.py",
    "iskander/repository/models.py",
    "iskander/scheduling/admission.py",
    "iskander/scheduling/arrivals.py",
    "iskander/scheduling/batcher.py",
    "iskander/scheduling/completion.py",
    "iskander/scheduling/cost.py",
    "iskander/scheduling/dispatch.py",
    "iskander/scheduling/fair_share.py",
    "iskander/scheduling/input_arena.py",
    "iskander/scheduling/lane.py",
    "iskander/scheduling/layout.py",
    "iskander/scheduling/metrics.py",
    "iskander/scheduling/policies.py",
    "iskander/scheduling/queue.py",
    "iskander/scheduling/request.py",
    "iskander/scheduling/results.py",
    "iskander/scheduling/retry.py",
    "iskander/scheduling/wakeup.py",
    "iskander/scheduling/worker_slot.py",
    "iskander/supervision/worker.py",
    "iskander/supervision/worker_messages.py",
    "iskander/telemetry/tracing/recorder.py",
    "iskander/telemetry/tracing/sampling.py",
    "iskander/transport/cpu_allowance.py",
    "iskander/transport/http2/call.py",
    "iskander/transport/http2/call_receiver.py",
    "iskander/transport/http2/connection.py",
    "iskander/transport/http2/frame_sender.py",
    "iskander/transport/http2/frames.py",
    "iskander/transport/http2/header_block_reader.py",
    "iskander/transport/http2/rate_limit.py",
    "iskander/transport/http2/request_headers.py",
    "iskander/transport/http2/response_headers.py",
    "iskander/transport/http2/streams.py",
    "iskander/transport/turn_scheduler.py",
    "iskander/transport/zmtp/connection.py",
    "iskander/transport/zmtp/frames.py",
    "iskander/transport/zmtp/received.py",
    "iskander/varint.py",
    "iskander_worker/attachments.py",
    "iskander_worker/backends/onnx_binding.py",
    "iskander_worker/cancellation.py",
    "iskander_worker/executor.py",
    "iskander_worker/loop.py",
)
FLAGS = "-fvisibility=hidden"
"""No other library calls these functions, so calls between them are direct, without a table."""
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
        """Compile a copy of the packages, and add the results to the wheel."""
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
            raise RuntimeError(f"mypyc failed: {done.stdout[-4000:]}{done.stderr[-4000:]}")
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
