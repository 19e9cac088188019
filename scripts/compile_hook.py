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
    "iskander/contract/processing/rows.py",
    "iskander/foundation/measurement/histogram.py",
    "iskander/foundation/varint.py",
    "iskander/gateway/auth/grants.py",
    "iskander/gateway/protocols/flight/batch_message.py",
    "iskander/gateway/protocols/flight/codec.py",
    "iskander/gateway/protocols/flight/data.py",
    "iskander/gateway/protocols/flight/exchange.py",
    "iskander/gateway/protocols/flight/shared_memory.py",
    "iskander/gateway/protocols/grpc_server.py",
    "iskander/gateway/protocols/inferential/session.py",
    "iskander/gateway/protocols/oip/infer.py",
    "iskander/gateway/protocols/oip/pending.py",
    "iskander/gateway/protocols/oip/request.py",
    "iskander/gateway/protocols/oip/service.py",
    "iskander/gateway/protocols/oip/streamed.py",
    "iskander/gateway/protocols/oip/tensors.py",
    "iskander/gateway/protocols/oip/unary.py",
    "iskander/gateway/protocols/oip/wire.py",
    "iskander/gateway/protocols/stream_terms.py",
    "iskander/gateway/protocols/submit.py",
    "iskander/gateway/protocols/tensors.py",
    "iskander/gateway/protocols/window.py",
    "iskander/gateway/repository/models.py",
    "iskander/gateway/scheduling/completion.py",
    "iskander/gateway/scheduling/dispatch.py",
    "iskander/gateway/scheduling/entry.py",
    "iskander/gateway/scheduling/hooks.py",
    "iskander/gateway/scheduling/input_arena.py",
    "iskander/gateway/scheduling/lanes/admission.py",
    "iskander/gateway/scheduling/lanes/arrivals.py",
    "iskander/gateway/scheduling/lanes/batcher.py",
    "iskander/gateway/scheduling/lanes/cost.py",
    "iskander/gateway/scheduling/lanes/fair_share.py",
    "iskander/gateway/scheduling/lanes/lane.py",
    "iskander/gateway/scheduling/lanes/layout.py",
    "iskander/gateway/scheduling/lanes/metrics.py",
    "iskander/gateway/scheduling/lanes/policies.py",
    "iskander/gateway/scheduling/lanes/queue.py",
    "iskander/gateway/scheduling/request.py",
    "iskander/gateway/scheduling/results.py",
    "iskander/gateway/scheduling/retry.py",
    "iskander/gateway/scheduling/wakeup.py",
    "iskander/gateway/scheduling/worker_slot.py",
    "iskander/gateway/supervision/worker.py",
    "iskander/gateway/supervision/worker_messages.py",
    "iskander/gateway/telemetry/tracing/recorder.py",
    "iskander/gateway/telemetry/tracing/sampling.py",
    "iskander/gateway/transport/http2/call.py",
    "iskander/gateway/transport/http2/call_receiver.py",
    "iskander/gateway/transport/http2/connection.py",
    "iskander/gateway/transport/http2/frame_sender.py",
    "iskander/gateway/transport/http2/frames.py",
    "iskander/gateway/transport/http2/header_block_reader.py",
    "iskander/gateway/transport/http2/rate_limit.py",
    "iskander/gateway/transport/http2/request_headers.py",
    "iskander/gateway/transport/http2/response_headers.py",
    "iskander/gateway/transport/http2/streams.py",
    "iskander/gateway/transport/limits/cpu_allowance.py",
    "iskander/gateway/transport/limits/turn_scheduler.py",
    "iskander/gateway/transport/zmtp/connection.py",
    "iskander/gateway/transport/zmtp/frames.py",
    "iskander/gateway/transport/zmtp/received.py",
    "iskander/interprocess/control/channel.py",
    "iskander/interprocess/control/zmq_channel.py",
    "iskander/interprocess/memory/arena.py",
    "iskander/interprocess/memory/chunked_copy.py",
    "iskander/interprocess/memory/client_segment.py",
    "iskander/interprocess/memory/heartbeat.py",
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
