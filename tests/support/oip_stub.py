"""Server of the Open Inference Protocol in its own process, with faults that a request selects.

The first value of the input `x` is the index of a mode in `MODES`. The server writes one JSON line
for each call to its log. It uses grpcio, which must not share a process with pyarrow.flight.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from iskander._generated import oip_pb2

MODES = (
    "double", "typed", "slow", "unavailable", "exhausted", "too large", "invalid", "missing",
    "denied", "failed", "no output", "wrong name", "wrong type", "wrong shape", "wrong rows",
    "short", "garbage", "huge", "exit",
)  # fmt: skip
STATUSES = {
    "unavailable": ("UNAVAILABLE", "Exceeds maximum queue size", (("retry-after", "2"),)),
    "exhausted": ("RESOURCE_EXHAUSTED", "busy", (("grpc-retry-pushback-ms", "250"),)),
    "too large": ("RESOURCE_EXHAUSTED", "Received message larger than max (9 vs. 4)", ()),
    "invalid": ("INVALID_ARGUMENT", "x is out of range", ()),
    "missing": ("NOT_FOUND", "unknown model", ()),
    "denied": ("UNAUTHENTICATED", "no token", ()),
    "failed": ("INTERNAL", "the model raised an error", ()),
}
HUGE = 1 << 16
SLOW_S = 60.0
PREFIX = "/inference.GRPCInferenceService/"


class Stub:
    """The process, from the test's view.

    Args:
        folder: Of its log.
        port: 0 for any.
        token: Bearer token that every call needs.
        tls: Paths of certificate, key and client authority.
        metadata: Inputs and outputs as (name, datatype, shape); None: ModelMetadata and ModelReady
            are not implemented, as in an application of Ray Serve.
    """

    def __init__(
        self,
        folder: Path,
        port: int = 0,
        *,
        token: str = "",
        tls: tuple[str, ...] = (),
        metadata: tuple[list[Any], list[Any]] | None = None,
    ) -> None:
        self._log = folder / f"stub-{os.urandom(4).hex()}.jsonl"
        options = {"port": port, "log": str(self._log), "token": token, "tls": tls}
        self.process = subprocess.Popen(
            [sys.executable, __file__, json.dumps({**options, "metadata": metadata})],
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        self.address = f"127.0.0.1:{self.port}"

    def events(self, name: str) -> list[dict[str, Any]]:
        """Calls of a method, or the `cancelled` of slow calls."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def wait_for(self, name: str, count: int = 1) -> list[dict[str, Any]]:
        from support.processes import eventually

        found: list[dict[str, Any]] = eventually(
            lambda: (events := self.events(name))[count - 1 :] and events, what=name
        )
        return found

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def __enter__(self) -> Stub:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def answer(mode: str, x: np.ndarray) -> bytes:
    """A ModelInferResponse."""
    rows = {"wrong rows": len(x) + 1, "huge": HUGE}.get(mode, len(x))
    shape = [rows, 1] if mode == "wrong shape" else [rows]
    response = oip_pb2.ModelInferResponse(model_name="stub")
    if mode == "garbage":
        return b"\x3a\xff"
    if mode == "no output":
        return response.SerializeToString()
    output = response.outputs.add(
        name="z" if mode == "wrong name" else "y",
        datatype="FP32" if mode == "wrong type" else "FP64",
        shape=shape,
    )
    if mode == "typed":
        output.contents.fp64_contents.extend(2 * x)
    else:
        y = np.resize(2 * x, rows).tobytes()
        response.raw_output_contents.append(y[:-1] if mode == "short" else y)
    return response.SerializeToString()


def main() -> None:
    import grpc

    options = json.loads(sys.argv[1])
    lock = threading.Lock()

    def note(event: str, context: grpc.ServicerContext) -> None:
        headers = {key: str(value) for key, value in context.invocation_metadata()}
        remaining_s = context.time_remaining()
        line = json.dumps({"event": event, "headers": headers, "remaining_s": remaining_s})
        with lock, open(options["log"], "a") as log:
            log.write(line + "\n")

    def infer(raw: bytes, context: grpc.ServicerContext) -> bytes:
        request = oip_pb2.ModelInferRequest.FromString(raw)
        x = np.frombuffer(request.raw_input_contents[0])
        mode = MODES[int(x[0])]
        if mode in STATUSES:
            status, text, trailers = STATUSES[mode]
            context.set_trailing_metadata(trailers)
            context.abort(grpc.StatusCode[status], text)
        if mode == "exit":
            os._exit(1)
        if mode == "slow":
            is_over = threading.Event()
            context.add_callback(is_over.set)
            is_over.wait(SLOW_S)
            note("cancelled", context)
        return answer(mode, x)

    def ready(raw: bytes, context: grpc.ServicerContext) -> bytes:
        return oip_pb2.ModelReadyResponse(ready=True).SerializeToString()

    def metadata(raw: bytes, context: grpc.ServicerContext) -> bytes:
        kind = oip_pb2.ModelMetadataResponse
        sides = [
            [kind.TensorMetadata(name=n, datatype=d, shape=s) for n, d, s in side]
            for side in options["metadata"]
        ]
        return kind(name="stub", inputs=sides[0], outputs=sides[1]).SerializeToString()

    methods: dict[str, Callable[[bytes, grpc.ServicerContext], bytes]] = {"ModelInfer": infer}
    if options["metadata"] is not None:
        methods |= {"ModelReady": ready, "ModelMetadata": metadata}

    class Handler(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
            name = details.method.removeprefix(PREFIX)
            method = methods.get(name)
            if method is None:
                return None

            def serve(raw: bytes, context: grpc.ServicerContext) -> bytes:
                note(name, context)
                shown = dict(context.invocation_metadata()).get("authorization", "")
                if options["token"] and shown != f"Bearer {options['token']}":
                    context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong token")
                return method(raw, context)

            return grpc.unary_unary_rpc_method_handler(serve)

    server = grpc.server(futures.ThreadPoolExecutor(16))
    server.add_generic_rpc_handlers((Handler(),))
    address = f"127.0.0.1:{options['port']}"
    if options["tls"]:
        certificate, key, authority = (Path(each).read_bytes() for each in options["tls"])
        credentials = grpc.ssl_server_credentials([(key, certificate)], authority, True)
        port = server.add_secure_port(address, credentials)
    else:
        port = server.add_insecure_port(address)
    server.start()
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    server.wait_for_termination()


if __name__ == "__main__":
    main()
