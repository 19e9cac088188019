"""Clients of one protocol in their own process; every process sends the same kind of rows.

Each way imports only its own libraries: those of two ways may conflict in one process.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from support import reference_client
from support.reference_client import TIMEOUT_S, Facts

WAYS = ("flight", "flight stream", "raw", "typed", "json", "binary", "inferential")
CLIENTS = 2
"""Of each way, with one open request each."""
ROWS_MOST = 97
TURN_MS = 50

Rows: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Ask: TypeAlias = Callable[[Rows], Rows]


class Refused(Exception):
    """The server's error."""


class Ended(Exception):
    """The test ended before a response."""


def rows_of(way: str, client: int, number: int) -> Rows:
    """Rows of one request: every other request is the same for all clients, the rest are unique.

    Shape: (rows,); successive requests differ in their rows.
    """
    whose = 1 + WAYS.index(way) * CLIENTS + client if number % 2 else 0
    rows = 1 + (13 * number + 5 * whose) % ROWS_MOST
    return whose * 10**9 + number * 1000 + np.arange(rows, dtype=np.int64)


@contextlib.contextmanager
def by_flight(address: str, _: str, __: threading.Event) -> Iterator[Ask]:
    """A stream for each request."""
    import pyarrow as pa

    from iskander.client import Client
    from iskander.errors import IskanderError

    with Client(address) as client:

        def ask(rows: Rows) -> Rows:
            try:
                table = client.score("ids", pa.record_batch({"x": rows}))
            except IskanderError as error:
                raise Refused(error.code) from error
            return np.asarray(table["y"].to_numpy())

        yield ask


@contextlib.contextmanager
def by_flight_stream(address: str, _: str, __: threading.Event) -> Iterator[Ask]:
    """One stream; each batch is sent after the last result."""
    import pyarrow as pa

    from iskander.client import Client
    from iskander.errors import IskanderError

    offered: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with Client(address) as client:
        results = client.stream("ids", iter(offered.get, None))

        def ask(rows: Rows) -> Rows:
            offered.put(pa.record_batch({"x": rows}))
            try:
                return np.asarray(next(results)["y"])
            except IskanderError as error:
                raise Refused(error.code) from error

        try:
            yield ask
        finally:
            offered.put(None)
            results.close()


@contextlib.contextmanager
def by_raw(address: str, _: str, __: threading.Event) -> Iterator[Ask]:
    """Triton's client over gRPC."""
    import tritonclient.grpc as triton
    from tritonclient.utils import InferenceServerException

    with triton.InferenceServerClient(address) as client:

        def ask(rows: Rows) -> Rows:
            tensor = triton.InferInput("x", list(rows.shape), "INT64")
            tensor.set_data_from_numpy(rows)
            try:
                result = client.infer("ids", [tensor], client_timeout=TIMEOUT_S)
            except InferenceServerException as error:
                raise Refused(said(error)) from error
            return np.asarray(result.as_numpy("y"))

        yield ask


@contextlib.contextmanager
def by_typed(address: str, _: str, __: threading.Event) -> Iterator[Ask]:
    """A plain stub over gRPC, with typed contents."""
    import grpc
    import tritonclient.grpc as triton
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    with grpc.insecure_channel(address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

        def ask(rows: Rows) -> Rows:
            request = service_pb2.ModelInferRequest(model_name="ids")
            tensor = request.inputs.add(name="x", datatype="INT64", shape=rows.shape)
            tensor.contents.int64_contents.extend(rows.tolist())
            try:
                response = stub.ModelInfer(request, timeout=TIMEOUT_S)
            except grpc.RpcError as error:
                trailers = dict(error.trailing_metadata() or ())
                raise Refused(trailers.get("iskander-code", str(error))) from error
            return np.asarray(triton.InferResult(response).as_numpy("y"))

        yield ask


@contextlib.contextmanager
def by_http(address: str, way: str, _: threading.Event) -> Iterator[Ask]:
    """Triton's client over HTTP, with JSON or binary tensors, both ways."""
    import tritonclient.http as triton
    from tritonclient.utils import InferenceServerException

    is_binary = way == "binary"
    with triton.InferenceServerClient(address, network_timeout=TIMEOUT_S) as client:

        def ask(rows: Rows) -> Rows:
            tensor = triton.InferInput("x", list(rows.shape), "INT64")
            tensor.set_data_from_numpy(rows, binary_data=is_binary)
            wanted = triton.InferRequestedOutput("y", binary_data=is_binary)
            try:
                result = client.infer("ids", [tensor], outputs=[wanted])
            except InferenceServerException as error:
                raise Refused(said(error)) from error
            return np.asarray(result.as_numpy("y"))

        yield ask


@contextlib.contextmanager
def by_inferential(address: str, way: str, is_over: threading.Event) -> Iterator[Ask]:
    """Inferential's own client. A server may ignore a rejected message, so it waits to the end."""
    from inferential import Connection

    connection = Connection(server=address, client_id=f"{way}-{threading.get_ident()}")
    model = connection.model("ids")

    def ask(rows: Rows) -> Rows:
        model.observe(x=rows)
        result = None
        while result is None:
            was_over = is_over.is_set()
            result = model.get_result(timeout_ms=TURN_MS)
            if result is None and was_over:
                raise Ended
        if "error" in result:
            raise Refused(result["error_code"])
        return np.asarray(result["y"])

    try:
        yield ask
    finally:
        connection.close()


def said(error: Any) -> str:
    """The error code in the text of Triton's client."""
    return "draining" if "the server is stopping" in error.message() else str(error)


BY_WAY: dict[str, Callable[[str, str, threading.Event], Any]] = {
    "flight": by_flight,
    "flight stream": by_flight_stream,
    "raw": by_raw,
    "typed": by_typed,
    "json": by_http,
    "binary": by_http,
    "inferential": by_inferential,
}


class Client(threading.Thread):
    """Sends one request after the other, until it is stopped or rejected.

    Attributes:
        enough: Set after the wanted number of responses, or if no more will arrive.
        facts: Results.
    """

    def __init__(
        self, way: str, address: str, number: int, wanted: int, is_over: threading.Event
    ) -> None:
        super().__init__(daemon=True)
        self._way, self._address, self._number = way, address, number
        self._wanted, self._is_over = wanted, is_over
        self.enough = threading.Event()
        self.facts: dict[str, Any] = {"sent": 0, "answered": 0, "wrong": [], "end": "told"}

    def run(self) -> None:
        try:
            with BY_WAY[self._way](self._address, self._way, self._is_over) as ask:
                self._ask(ask)
        except Refused as error:
            self.facts["end"] = str(error)
        except Ended:
            self.facts["end"] = "unanswered"
        except Exception:
            self.facts["end"] = traceback.format_exc()
        self.enough.set()

    def _ask(self, ask: Ask) -> None:
        same, facts = hashlib.sha256(), self.facts
        for number in itertools.count():
            if self._is_over.is_set():
                return
            rows = rows_of(self._way, self._number, number)
            facts["sent"] += 1
            got = ask(rows)
            facts["answered"] += 1
            if got.dtype != rows.dtype or not np.array_equal(got, 3 * rows + 1):
                facts["wrong"].append([number, rows.tolist(), got.tolist()])
            if number < self._wanted and number % 2 == 0:
                same.update(got.tobytes())
            if number + 1 == self._wanted:
                facts["same"] = same.hexdigest()
                self.enough.set()


def load(way: str, address: str, requests: int) -> Facts:
    """Run clients past `requests` each, until they are stopped or rejected."""
    is_over = threading.Event()
    clients = [Client(way, address, number, requests, is_over) for number in range(CLIENTS)]
    for client in clients:
        client.start()
    for client in clients:
        client.enough.wait(TIMEOUT_S)
    reference_client.send({"facts": "enough"})
    if json.loads(sys.stdin.readline()) == "until refused":
        for client in clients:
            client.join(TIMEOUT_S)
    is_over.set()
    for client in clients:
        client.join()
    return [client.facts for client in clients]


def one(way: str, address: str, number: int) -> Facts:
    """One request with the shared rows of all ways."""
    with BY_WAY[way](address, way, threading.Event()) as ask:
        return ask(rows_of(way, 0, 2 * number)).tolist()


if __name__ == "__main__":
    reference_client.serve(load, one)
