"""Named tensors over the Open Inference Protocol by gRPC and HTTP, and over Flight."""

from __future__ import annotations

import http.client
import json
import struct
from typing import Any, Protocol

import grpc
import ml_dtypes
import numpy as np
import pyarrow as pa
from pyarrow import flight
from tritonclient.grpc import service_pb2, service_pb2_grpc

from iskander.arrow.types import BFloat16

TIMEOUT_S = 60.0
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DATATYPES = {
    np.dtype(name): datatype
    for name, datatype in {
        "bool": "BOOL", "int8": "INT8", "int16": "INT16", "int32": "INT32", "int64": "INT64",
        "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32", "uint64": "UINT64",
        "float16": "FP16", "float32": "FP32", "float64": "FP64", "object": "BYTES",
    }.items()
} | {BFLOAT16: "BF16"}  # fmt: skip
DTYPES = {datatype: dtype for dtype, datatype in DATATYPES.items()}

Feeds = dict[str, np.ndarray]


class Refused(Exception):
    """A request that the server, or the protocol, rejects.

    Attributes:
        code: Code of the error; `inexpressible` if the protocol has no form for the tensors.
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class Caller(Protocol):
    """A client of one protocol."""

    def infer(self, model: str, feeds: Feeds) -> Feeds:
        """Return the outputs by name, or raise `Refused`."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


class Grpc:
    """Client of the Open Inference Protocol over gRPC, with a connection of its own."""

    def __init__(self, address: str) -> None:
        options = [
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        self._channel = grpc.insecure_channel(address, options=options)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def infer(self, model: str, feeds: Feeds) -> Feeds:
        return self.result(self.send(model, feeds))

    def send(self, model: str, feeds: Feeds) -> Any:
        """Start a request; `result` waits for it."""
        request = service_pb2.ModelInferRequest(model_name=model)
        for name, array in feeds.items():
            request.inputs.add(name=name, datatype=_datatype(array), shape=array.shape)
            request.raw_input_contents.append(to_bytes(array))
        return self._stub.ModelInfer.future(request, timeout=TIMEOUT_S)

    @staticmethod
    def result(call: Any) -> Feeds:
        try:
            answer = call.result()
        except grpc.RpcError as error:
            trailers = dict(error.trailing_metadata() or ())  # type: ignore[attr-defined]
            code = trailers.get("iskander-code", error.code().name)  # type: ignore[attr-defined]
            raise Refused(code, error.details()) from None  # type: ignore[attr-defined]
        return {
            each.name: from_bytes(raw, each.datatype, tuple(each.shape))
            for each, raw in zip(answer.outputs, answer.raw_output_contents, strict=True)
        }

    def close(self) -> None:
        self._channel.close()


class Http:
    """Client of the same over HTTP, with binary tensors."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._connection = http.client.HTTPConnection(host, int(port), timeout=TIMEOUT_S)

    def infer(self, model: str, feeds: Feeds) -> Feeds:
        inputs, tail = [], []
        for name, array in feeds.items():
            raw = to_bytes(array)
            tail.append(raw)
            tensor = {"name": name, "datatype": _datatype(array), "shape": array.shape}
            inputs.append({**tensor, "parameters": {"binary_data_size": len(raw)}})
        head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
        headers = {"Inference-Header-Content-Length": str(len(head))}
        body = b"".join((head, *tail))
        self._connection.request("POST", f"/v2/models/{model}/infer", body, headers)
        response = self._connection.getresponse()
        raw = response.read()
        if response.status != 200:
            error = json.loads(raw)
            raise Refused(error.get("code", str(response.status)), error["error"])
        length = int(response.headers.get("Inference-Header-Content-Length", len(raw)))
        answer, offset, results = json.loads(raw[:length]), length, {}
        for each in answer["outputs"]:
            size = each["parameters"]["binary_data_size"]
            shape = tuple(each["shape"])
            results[each["name"]] = from_bytes(raw[offset : offset + size], each["datatype"], shape)
            offset += size
        return results

    def close(self) -> None:
        self._connection.close()


class Flight:
    """Client of Arrow Flight: a column for each tensor, a stream for each request."""

    def __init__(self, address: str) -> None:
        self._client = flight.FlightClient(f"grpc://{address}")

    def infer(self, model: str, feeds: Feeds) -> Feeds:
        batch = to_batch(feeds)
        options = flight.FlightCallOptions(timeout=TIMEOUT_S)
        descriptor = flight.FlightDescriptor.for_path(model)
        try:
            writer, reader = self._client.do_exchange(descriptor, options)
            with writer:
                writer.begin(batch.schema)
                writer.write_batch(batch)
                writer.done_writing()
                chunks = [chunk.data for chunk in reader if chunk.data is not None]
        except (flight.FlightError, pa.ArrowException, OSError) as error:
            raise Refused(_flight_code(error), str(error)) from None
        (scored,) = chunks
        return {name: to_array(scored[name]) for name in scored.schema.names}

    def close(self) -> None:
        self._client.close()


def to_bytes(array: np.ndarray) -> bytes:
    """A tensor in the protocol's raw form."""
    if array.dtype != object:
        return np.ascontiguousarray(array).tobytes()
    texts = [each if isinstance(each, bytes) else str(each).encode() for each in array.reshape(-1)]
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


def from_bytes(raw: bytes, datatype: str, shape: tuple[int, ...]) -> np.ndarray:
    """The tensor of a raw form; strings are `str`."""
    if datatype != "BYTES":
        return np.frombuffer(raw, DTYPES[datatype]).reshape(shape)
    texts, offset = [], 0
    while offset < len(raw):
        (size,) = struct.unpack_from("<I", raw, offset)
        texts.append(raw[offset + 4 : offset + 4 + size].decode())
        offset += 4 + size
    return np.array(texts, object).reshape(shape)


def to_batch(feeds: Feeds) -> pa.RecordBatch:
    """A record batch with a column for each tensor."""
    if any(array.ndim == 0 for array in feeds.values()):
        raise Refused("inexpressible", "a column has no scalars")
    if len({len(array) for array in feeds.values()}) > 1:
        raise Refused("inexpressible", "columns have one number of rows")
    return pa.record_batch({name: to_column(array) for name, array in feeds.items()})


def to_column(array: np.ndarray) -> pa.Array:
    """A column of fixed-size lists for each axis beside the rows."""
    _datatype(array)
    flat = np.ascontiguousarray(array).reshape(-1)
    if array.dtype == object:
        flat = np.array([t.decode() if isinstance(t, bytes) else str(t) for t in flat], object)
        column = pa.array(flat, pa.utf8())
    elif array.dtype == BFLOAT16:
        column = pa.ExtensionArray.from_storage(BFloat16(), pa.array(flat.view(np.uint16)))
    else:
        column = pa.array(flat)
    for size in reversed(array.shape[1:]):
        if size == 0:
            raise Refused("inexpressible", "a fixed-size list of no values")
        column = pa.FixedSizeListArray.from_arrays(column, size)
    return column


def to_array(column: pa.Array) -> np.ndarray:
    """The tensor of a column."""
    shape = [len(column)]
    while pa.types.is_fixed_size_list(column.type):
        shape.append(column.type.list_size)
        column = column.flatten()
    if isinstance(column, pa.ExtensionArray):
        return column.storage.to_numpy(zero_copy_only=False).view(BFLOAT16).reshape(shape)
    values: np.ndarray = column.to_numpy(zero_copy_only=False)
    return values.reshape(shape)


def _datatype(array: np.ndarray) -> str:
    found = DATATYPES.get(array.dtype)
    if found is None:
        raise Refused("inexpressible", f"no protocol has the type {array.dtype}")
    return found


def _flight_code(error: BaseException) -> str:
    """Code of an error: in `extra_info`, or by the class that pyarrow chose."""
    details = getattr(error, "extra_info", b"")
    if details:
        code = json.loads(details).get("code")
        if isinstance(code, str):
            return code
    return "contract" if isinstance(error, pa.ArrowInvalid) else type(error).__name__
