"""Client connections to each system, each with the system's usual client library.

A session sends a batch and waits for the response, in the library's own form: a record batch, a
response object, or bytes. Requests are prepared in advance, so a call measures only the exchange.
A session belongs to one thread. Calls have no timeouts; `load` abandons a client that hangs.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import onnxruntime as ort
import pyarrow as pa
from pyarrow import flight

from benchmarks.workloads import TOLERANCE, Array, Workload, tensors
from iskander.client.calls.shared_memory import Region
from iskander.interprocess.control.shared_regions import REGION_HEADER

GRPC_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
]
"""Each session has its own connection, without message limits."""

REGION_HEADROOM_BYTES = 1 << 16
REGION_TIMEOUT_S = 10.0

POLLED = "-polled"
"""Suffix of the session kinds whose gRPC client runs without its event engine."""


@dataclass(frozen=True)
class Target:
    """Server and workload of a session.

    Attributes:
        port: Of 127.0.0.1; 0 for a session without a server.
    """

    port: int
    workload: Workload
    rows: int


class Session(Protocol):
    """A connection."""

    def call(self, index: int) -> Any:  # noqa: ANN401 - each library has its own kind of answer.
        """Send batch `index` and wait for its response."""
        ...

    def output(self, answer: Any) -> Array:  # noqa: ANN401
        """The model's output in a response."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


def require_outputs(session: Session, expected: list[Array]) -> None:
    """Compare the responses to all batches with the model's own outputs.

    Raises:
        ValueError: They differ.
    """
    for index, reference in enumerate(expected):
        got = session.output(session.call(index))
        if not np.allclose(got.reshape(reference.shape), reference, atol=TOLERANCE):
            raise ValueError(f"batch {index}: the output is not the model's (±{TOLERANCE})")


class Direct:
    """ONNX Runtime in the client's own process, with reused I/O bindings."""

    def __init__(self, target: Target, session: ort.InferenceSession) -> None:
        self._session = session
        self._bindings = []
        self._outputs = []
        name = session.get_outputs()[0].name
        for batch in target.workload.batches(target.rows):
            binding = session.io_binding()
            inputs = {
                key: ort.OrtValue.ortvalue_from_numpy(value)
                for key, value in tensors(batch).items()
            }
            for key, value in inputs.items():
                binding.bind_ortvalue_input(key, value)
            shape = [target.rows, *session.get_outputs()[0].shape[1:]]
            output = ort.OrtValue.ortvalue_from_shape_and_type(shape, np.float32)
            binding.bind_ortvalue_output(name, output)
            self._bindings.append((binding, inputs))
            self._outputs.append(output)

    def call(self, index: int) -> ort.OrtValue:
        """Run the model."""
        self._session.run_with_iobinding(self._bindings[index][0])
        return self._outputs[index]

    def output(self, answer: ort.OrtValue) -> Array:
        """The output as a NumPy array."""
        return cast(Array, answer.numpy())

    def close(self) -> None:
        """There is no connection."""


class Flight:
    """One long DoExchange stream of pyarrow's client."""

    def __init__(self, target: Target) -> None:
        # Without a local pool, gRPC puts all streams of this process on one connection.
        self._client = flight.FlightClient(
            f"grpc://127.0.0.1:{target.port}",
            generic_options=[("grpc.use_local_subchannel_pool", 1)],
        )
        self._workload = target.workload
        self._batches = target.workload.batches(target.rows)
        descriptor = flight.FlightDescriptor.for_path(target.workload.model)
        self._writer, self._reader = self._client.do_exchange(descriptor, self._options())
        self._writer.begin(self._batches[0].schema)
        self._write, self._read = self._writer.write_batch, self._reader.read_chunk

    def call(self, index: int) -> pa.RecordBatch:
        """Write a batch and read its result."""
        self._write(self._batches[index])
        return self._read().data

    def _options(self) -> flight.FlightCallOptions:
        return flight.FlightCallOptions()

    def output(self, answer: pa.RecordBatch) -> Array:
        """The model's column; for the echo, the output for the returned batch."""
        if self._workload.output not in answer.schema.names:
            return self._workload.expected_of(answer)
        column = answer.column(self._workload.output)
        if pa.types.is_fixed_size_list(column.type):
            column = column.flatten()
        return np.asarray(column)

    def close(self) -> None:
        """End the stream, then close the connection."""
        self._writer.done_writing()
        with contextlib.suppress(StopIteration):
            self._read()
        self._client.close()


class SharedFlight(Flight):
    """A Flight stream with large batches in a shared-memory region of the server."""

    def _options(self) -> flight.FlightCallOptions:
        action = flight.Action("shared-memory", b"")
        (result,) = self._client.do_action(action)
        path = json.loads(result.body.to_pybytes())["path"]
        length_bytes = 2 * self._batches[0].nbytes + REGION_HEADROOM_BYTES
        self._region = Region(Path(path), length_bytes, REGION_TIMEOUT_S)
        self._region.begin(self._batches[0].schema)
        headers = [(REGION_HEADER.encode(), self._region.name.encode())]
        return flight.FlightCallOptions(headers=headers)

    def call(self, index: int) -> pa.RecordBatch:
        """Write the batch to the region and read its result."""
        located = self._region.put(self._batches[index])
        if located is None:
            return super().call(index)
        self._writer.write_metadata(located)
        answer = self._read().data
        self._region.free()
        return answer

    def close(self) -> None:
        """Close the stream, and release the region."""
        super().close()
        self._region.close()


class Infer:
    """`tritonclient`'s ModelInfer, for Triton and MLServer."""

    def __init__(self, target: Target) -> None:
        import tritonclient.grpc as triton

        self._client = triton.InferenceServerClient(
            f"127.0.0.1:{target.port}",
            channel_args=GRPC_OPTIONS,
        )
        self._model = target.workload.model
        self._output = target.workload.output
        self._requested = [triton.InferRequestedOutput(self._output)]
        types = {"int64": "INT64", "float32": "FP32"}
        self._batches = [
            [(name, value, types[str(value.dtype)]) for name, value in tensors(batch).items()]
            for batch in target.workload.batches(target.rows)
        ]
        self._make_input = triton.InferInput
        self._value_shape = (1,)

    def call(self, index: int) -> Any:  # noqa: ANN401
        """Serialize, send, wait."""
        inputs = []
        for name, value, datatype in self._batches[index]:
            shape = self._shape_of(value)
            tensor = self._make_input(name, shape, datatype)
            tensor.set_data_from_numpy(value.reshape(shape))
            inputs.append(tensor)
        return self._client.infer(self._model, inputs, outputs=self._requested)

    def _shape_of(self, value: Array) -> list[int]:
        return [len(value), *(self._value_shape if value.ndim == 1 else value.shape[1:])]

    def output(self, answer: Any) -> Array:  # noqa: ANN401
        """The output as a NumPy array."""
        return cast(Array, answer.as_numpy(self._output))

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


class RowsInfer(Infer):
    """ModelInfer with columns of single values as tensors of one axis, as in the graph."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._value_shape: tuple[int, ...] = ()


class SerializedInfer:
    """ModelInfer with requests that are serialized once, over grpcio."""

    def __init__(self, target: Target) -> None:
        import grpc
        from tritonclient.grpc import service_pb2

        self._response = service_pb2.ModelInferResponse
        self._channel = grpc.insecure_channel(
            f"127.0.0.1:{target.port}",
            options=GRPC_OPTIONS,
        )
        self._infer = self._channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=None,
            response_deserializer=self._response.FromString,
        )
        self._requests = [
            _infer_request(service_pb2, target.workload, batch).SerializeToString()
            for batch in target.workload.batches(target.rows)
        ]

    def call(self, index: int) -> Any:  # noqa: ANN401
        """Send and wait."""
        return self._infer(self._requests[index])

    def output(self, answer: Any) -> Array:  # noqa: ANN401
        """The bytes of the only output."""
        return np.frombuffer(answer.raw_output_contents[0], np.float32)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


def _infer_request(messages: Any, workload: Workload, batch: pa.RecordBatch) -> Any:  # noqa: ANN401
    request = messages.ModelInferRequest(model_name=workload.model)
    for name, value in tensors(batch).items():
        tensor = request.inputs.add()
        tensor.name = name
        tensor.datatype = {"int64": "INT64", "float32": "FP32"}[str(value.dtype)]
        tensor.shape.extend([len(value), 1] if value.ndim == 1 else value.shape)
        request.raw_input_contents.append(value.tobytes())
    request.outputs.add().name = workload.output
    return request


class SharedInfer(Infer):
    """`tritonclient` with inputs in a registered region, written before each request."""

    _count = 0

    def __init__(self, target: Target) -> None:
        import os

        from tritonclient.utils import shared_memory

        super().__init__(target)
        type(self)._count += 1
        self._name = f"isk-bench-{os.getpid()}-{self._count}"
        self._memory = shared_memory
        values = self._batches[0]
        length_bytes = sum(value.nbytes for _, value, _ in values)
        self._region = shared_memory.create_shared_memory_region(
            self._name, f"/{self._name}", length_bytes
        )
        self._client.register_system_shared_memory(self._name, f"/{self._name}", length_bytes)

    def call(self, index: int) -> Any:  # noqa: ANN401
        """Write the inputs, send their location, wait."""
        inputs, start = [], 0
        values = self._batches[index]
        self._memory.set_shared_memory_region(self._region, [value for _, value, _ in values])
        for name, value, datatype in values:
            tensor = self._make_input(name, self._shape_of(value), datatype)
            tensor.set_shared_memory(self._name, value.nbytes, start)
            inputs.append(tensor)
            start += value.nbytes
        return self._client.infer(self._model, inputs, outputs=self._requested)

    def close(self) -> None:
        """Unregister and destroy the region, and close the connection."""
        from tritonclient.utils import InferenceServerException

        # Shortly after the last response the server may report the region as in use.
        with contextlib.suppress(InferenceServerException):
            self._client.unregister_system_shared_memory(self._name)
        self._memory.destroy_shared_memory_region(self._region)
        super().close()


class Http:
    """The standard library's HTTP client: a persistent connection, tensors as raw bytes."""

    def __init__(self, target: Target) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", target.port)
        self._connection.connect()
        self._connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._bodies = [
            b"".join(value.tobytes() for value in tensors(batch).values())
            for batch in target.workload.batches(target.rows)
        ]

    def call(self, index: int) -> bytes:
        """Post and read."""
        self._connection.request("POST", "/inference", self._bodies[index])
        response = self._connection.getresponse()
        body = response.read()
        if response.status != http.client.OK:
            raise ConnectionError(f"HTTP {response.status}: {body[:100]!r}")
        return body

    def output(self, answer: bytes) -> Array:
        """The bytes of the only output."""
        return np.frombuffer(answer, np.float32)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class Inferential:
    """The `inferential` package's own client; its server responds in order."""

    _count = 0

    def __init__(self, target: Target) -> None:
        import os

        from inferential.client import Connection

        type(self)._count += 1
        self._connection = Connection(
            f"127.0.0.1:{target.port}", client_id=f"{os.getpid()}-{self._count}"
        )
        self._model = self._connection.model(target.workload.model)
        self._output = target.workload.output
        self._batches = [tensors(batch) for batch in target.workload.batches(target.rows)]

    def call(self, index: int) -> dict[str, Any]:
        """Send an observation, and poll for the result."""
        self._model.observe(**self._batches[index])
        answer = self._model.get_result(timeout_ms=10_000)
        if answer is None:
            raise TimeoutError("no result in 10 s")
        return cast(dict[str, Any], answer)

    def output(self, answer: dict[str, Any]) -> Array:
        """The output tensor."""
        return cast(Array, answer[self._output])

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


SESSIONS: dict[str, Callable[[Target], Session]] = {
    "flight": Flight,
    "shared-flight": SharedFlight,
    "infer": Infer,
    "rows-infer": RowsInfer,
    "serialized-infer": SerializedInfer,
    "shared-infer": SharedInfer,
    "http": Http,
    "inferential": Inferential,
}


def environment(kind: str) -> dict[str, str]:
    """Environment variables of a client's process, set before its first session.

    Without gRPC's event engine the waiting thread reads the socket itself. With it, gRPC's own
    threads read, and a batch passes between threads four times.
    """
    return {"GRPC_EXPERIMENTS": "-event_engine_client"} if kind.endswith(POLLED) else {}


def opener(kind: str, target: Target) -> Callable[[], Session]:
    """A function that opens one session after another; direct sessions share the model."""
    if kind == "direct":
        model = target.workload.open_session()
        return lambda: Direct(target, model)
    session = SESSIONS[kind.removesuffix(POLLED)]
    return lambda: session(target)
