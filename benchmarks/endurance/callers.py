"""Single requests by each client library; each way imports only its own.

`pyarrow.flight` and grpcio must not be loaded in one process.
"""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from benchmarks.endurance.requests import STRINGS, Request

TIMEOUT_S = 60.0
CANCEL_AFTER_S = 0.003
SHORT_S = 0.02
"""Deadline of the requests that may miss it."""


class Addresses(NamedTuple):
    """Of one server, with the token of its clients."""

    grpc: str
    http: str
    zmq: str
    token: str


class Refused(Exception):
    """The server's error, or that of the connection.

    Attributes:
        code: Of the error.
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


Ask: TypeAlias = Callable[[Request], Any]


@contextlib.contextmanager
def by_flight(
    addresses: Addresses, *, terms: dict[str, Any] | None = None, has_retries: bool = True
) -> Iterator[Ask]:
    """`Client.score`."""
    import pyarrow as pa

    from iskander.client import OFF, Client, Retry
    from iskander.errors import IskanderError

    retry = Retry() if has_retries else OFF
    with Client(addresses.grpc, token=addresses.token, shared_bytes=0, retry=retry) as client:

        def ask(request: Request) -> Any:  # noqa: ANN401
            column = request.texts if request.model == STRINGS else request.values
            try:
                table = client.score(
                    request.model, pa.table({"x": column}), terms=terms, timeout_s=TIMEOUT_S
                )
            except IskanderError as error:
                raise Refused(error.code, str(error)) from error
            answer = table["y"]
            return answer.to_pylist() if request.model == STRINGS else answer.to_numpy()

        yield ask


@contextlib.contextmanager
def by_grpc(
    addresses: Addresses, *, timeout_s: float = TIMEOUT_S, is_cancelled: bool = False
) -> Iterator[Ask]:
    """The Open Inference Protocol with grpcio."""
    import grpc
    from tritonclient.grpc import InferResult, service_pb2, service_pb2_grpc

    metadata = [("authorization", f"Bearer {addresses.token}")]
    with grpc.insecure_channel(addresses.grpc, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

        def ask(request: Request) -> Any:  # noqa: ANN401
            message = service_pb2.ModelInferRequest(model_name=request.model)
            is_text = request.model == STRINGS
            shape = [len(request.values)]
            tensor = message.inputs.add(
                name="x", datatype="BYTES" if is_text else "INT64", shape=shape
            )
            if is_text:
                tensor.contents.bytes_contents.extend(text.encode() for text in request.texts)
            else:
                message.raw_input_contents.append(request.values.tobytes())
            call = stub.ModelInfer.future(message, timeout=timeout_s, metadata=metadata)
            try:
                if is_cancelled:
                    with contextlib.suppress(grpc.FutureTimeoutError):
                        call.result(CANCEL_AFTER_S)
                    call.cancel()
                answer = InferResult(call.result()).as_numpy("y")
            except grpc.FutureCancelledError as error:
                raise Refused("cancelled", "by the client") from error
            except grpc.RpcError as error:
                trailers = dict(error.trailing_metadata() or ())
                code = trailers.get("iskander-code", error.code().name.lower())
                raise Refused(code, str(error.details())) from error
            return [text.decode() for text in answer] if is_text else answer

        yield ask


@contextlib.contextmanager
def by_http(addresses: Addresses) -> Iterator[Ask]:
    """The Open Inference Protocol as JSON over an HTTP connection, opened again if closed."""
    connection = http.client.HTTPConnection(addresses.http, timeout=TIMEOUT_S)
    headers = {"authorization": f"Bearer {addresses.token}", "content-type": "application/json"}

    def ask(request: Request) -> Any:  # noqa: ANN401
        is_text = request.model == STRINGS
        data = request.texts if is_text else request.values.tolist()
        datatype = "BYTES" if is_text else "INT64"
        tensor = {"name": "x", "shape": [len(data)], "datatype": datatype, "data": data}
        path = f"/v2/models/{request.model}/infer"
        try:
            connection.request("POST", path, json.dumps({"inputs": [tensor]}), headers)
            response = connection.getresponse()
            answer = json.loads(response.read())
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise Refused("connection_failed", repr(error)) from error
        if response.status != 200:
            raise Refused(answer.get("code", str(response.status)), str(answer))
        (output,) = answer["outputs"]
        return output["data"] if is_text else np.array(output["data"], np.int64)

    try:
        yield ask
    finally:
        connection.close()


@contextlib.contextmanager
def by_inferential(addresses: Addresses, *, name: str) -> Iterator[Ask]:
    """Inferential's own client."""
    from inferential import Connection

    connection = Connection(server=addresses.zmq, client_id=name)
    models: dict[str, Any] = {}

    def ask(request: Request) -> Any:  # noqa: ANN401
        model = models.get(request.model)
        if model is None:
            model = models[request.model] = connection.model(request.model)
        model.observe(x=request.values)
        result = model.get_result(timeout_ms=int(TIMEOUT_S * 1000))
        if result is None:
            raise Refused("unanswered", f"nothing within {TIMEOUT_S:g} s")
        if "error" in result:
            raise Refused(str(result["error_code"]), str(result["error"]))
        return np.atleast_1d(result["y"])

    try:
        yield ask
    finally:
        connection.close()
