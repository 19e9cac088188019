"""One client's connection to each system, by the client library that its users take.

A session sends a batch and waits for the answer, in the form in which that library gives it: a
record batch, a response object, or bytes. What is sent is made before, so that a call costs what
sending costs. A session belongs to one thread. Calls have no timeouts of their own; `load` gives
up on a client that does not come back.
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
from iskander.client.shared_memory import Region
from iskander.control.shared_regions import REGION_HEADER

GRPC_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
]
"""A connection of its own for each session, and no bound on what it carries."""

SHARED_ROOM_BYTES = 1 << 16
SHARE_S = 10.0

POLLED = "-polled"
"""Ends the kinds of sessions whose gRPC client is without its event engine."""


@dataclass(frozen=True)
class Target:
    """Whom to ask for what.

    Attributes:
        port: Of 127.0.0.1; 0 for a session that computes by itself.
    """

    port: int
    workload: Workload
    rows: int


class Session(Protocol):
    """A connection."""

    def call(self, index: int) -> Any:  # noqa: ANN401 - each library has its own kind of answer.
        """Send batch `index` and wait for its answer."""
        ...

    def output(self, answer: Any) -> Array:  # noqa: ANN401
        """The model's output in an answer."""
        ...

    def close(self) -> None:
        """Hang up."""
        ...


def require_outputs(session: Session, expected: list[Array]) -> None:
    """Compare the answers to all batches with the model's own: a fast wrong answer is no result.

    Raises:
        ValueError: They differ.
    """
    for index, wanted in enumerate(expected):
        got = session.output(session.call(index))
        if not np.allclose(got.reshape(wanted.shape), wanted, atol=TOLERANCE):
            raise ValueError(f"the answer to batch {index} is not the model's")


class Direct:
    """ONNX Runtime in the client's own process, over a binding that stays."""

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
        """Run."""
        self._session.run_with_iobinding(self._bindings[index][0])
        return self._outputs[index]

    def output(self, answer: ort.OrtValue) -> Array:
        """As NumPy sees it."""
        return cast(Array, answer.numpy())

    def close(self) -> None:
        """Nothing to hang up."""


class Flight:
    """One long DoExchange stream of pyarrow's client."""

    def __init__(self, target: Target) -> None:
        # Without a pool of its own, gRPC would put all streams of this process on one connection.
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
        """Write and read."""
        self._write(self._batches[index])
        return self._read().data

    def _options(self) -> flight.FlightCallOptions:
        return flight.FlightCallOptions()

    def output(self, answer: pa.RecordBatch) -> Array:
        """The model's column; of the echo, the batch that it sends back."""
        if self._workload.output not in answer.schema.names:
            return self._workload.expected_of(answer)
        column = answer.column(self._workload.output)
        if pa.types.is_fixed_size_list(column.type):
            column = column.flatten()
        return np.asarray(column)

    def close(self) -> None:
        """End the stream in order, then the connection."""
        self._writer.done_writing()
        with contextlib.suppress(StopIteration):
            self._read()
        self._client.close()


class SharedFlight(Flight):
    """The same, where the server lends memory: what is large is handed over in it."""

    def _options(self) -> flight.FlightCallOptions:
        action = flight.Action("shared-memory", b"")
        (said,) = [json.loads(each.body.to_pybytes()) for each in self._client.do_action(action)]
        length_bytes = 2 * self._batches[0].nbytes + SHARED_ROOM_BYTES
        self._region = Region(Path(said["path"]), length_bytes, SHARE_S)
        self._region.begin(self._batches[0].schema)
        headers = [(REGION_HEADER.encode(), self._region.name.encode())]
        return flight.FlightCallOptions(headers=headers)

    def call(self, index: int) -> pa.RecordBatch:
        """Hand over and read."""
        located = self._region.put(self._batches[index])
        if located is None:
            return super().call(index)
        self._writer.write_metadata(located)
        answer = self._read().data
        self._region.free()
        return answer

    def close(self) -> None:
        """As any other, and give the memory back."""
        super().close()
        self._region.close()


class Infer:
    """`tritonclient`'s ModelInfer: what Triton and MLServer are asked by."""

    def __init__(self, target: Target) -> None:
        import tritonclient.grpc as triton

        self._client = triton.InferenceServerClient(
            f"127.0.0.1:{target.port}",
            channel_args=GRPC_OPTIONS,
        )
        self._model = target.workload.model
        self._output = target.workload.output
        self._asked = [triton.InferRequestedOutput(self._output)]
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
        return self._client.infer(self._model, inputs, outputs=self._asked)

    def _shape_of(self, value: Array) -> list[int]:
        return [len(value), *(self._value_shape if value.ndim == 1 else value.shape[1:])]

    def output(self, answer: Any) -> Array:  # noqa: ANN401
        """As NumPy sees it."""
        return cast(Array, answer.as_numpy(self._output))

    def close(self) -> None:
        """Hang up."""
        self._client.close()


class RowsInfer(Infer):
    """The same, with columns of single values as tensors of one axis, as the graph has them."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._value_shape: tuple[int, ...] = ()


class SerializedInfer:
    """ModelInfer with requests that were serialized once, over grpcio."""

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
        """The one output's bytes."""
        return np.frombuffer(answer.raw_output_contents[0], np.float32)

    def close(self) -> None:
        """Hang up."""
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
    """`tritonclient` with inputs in a region that it registers: written before each request."""

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
        """Write, say where, wait."""
        inputs, start = [], 0
        values = self._batches[index]
        self._memory.set_shared_memory_region(self._region, [value for _, value, _ in values])
        for name, value, datatype in values:
            tensor = self._make_input(name, self._shape_of(value), datatype)
            tensor.set_shared_memory(self._name, value.nbytes, start)
            inputs.append(tensor)
            start += value.nbytes
        return self._client.infer(self._model, inputs, outputs=self._asked)

    def close(self) -> None:
        """Hang up, and take the region away."""
        from tritonclient.utils import InferenceServerException

        # For a moment after the last answer the server may say that it is in use.
        with contextlib.suppress(InferenceServerException):
            self._client.unregister_system_shared_memory(self._name)
        self._memory.destroy_shared_memory_region(self._region)
        super().close()


class Http:
    """The standard library's HTTP client, a connection kept open, tensors as raw bytes."""

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
        """The one output's bytes."""
        return np.frombuffer(answer, np.float32)

    def close(self) -> None:
        """Hang up."""
        self._connection.close()


class Inferential:
    """The `inferential` package's own client; its server answers in the order asked."""

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
        """Observe, and poll for the result."""
        self._model.observe(**self._batches[index])
        answer = self._model.get_result(timeout_ms=10_000)
        if answer is None:
            raise TimeoutError("no result in 10 s")
        return cast(dict[str, Any], answer)

    def output(self, answer: dict[str, Any]) -> Array:
        """The named tensor."""
        return cast(Array, answer[self._output])

    def close(self) -> None:
        """Hang up."""
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
    """What a client's process has in its environment before its first session.

    Where gRPC's event engine is left out, the thread that waits for an answer reads the socket by
    itself; with it, threads of gRPC's own do, and a batch is handed over four times.
    """
    return {"GRPC_EXPERIMENTS": "-event_engine_client"} if kind.endswith(POLLED) else {}


def opener(kind: str, target: Target) -> Callable[[], Session]:
    """A call that opens one session after another; direct ones share the model."""
    if kind == "direct":
        model = target.workload.open_session()
        return lambda: Direct(target, model)
    session = SESSIONS[kind.removesuffix(POLLED)]
    return lambda: session(target)
