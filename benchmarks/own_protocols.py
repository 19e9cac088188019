"""Cost of this repository's protocol code, next to the library that could replace it.

    protobuf   google.protobuf (upb), and onnx for the file of a model
    arrow      pyarrow's IPC functions
    zmtp       libzmq's ROUTER by pyzmq: through zmq.asyncio, and read directly from its descriptor
    http1      uvicorn's H11Protocol without the budgets of `transport/http1`

Both sides of a case run in one process, in turn, and first show that they return the same. A figure
is the least of all rounds: CPU of the calling thread for protobuf and Arrow, CPU of the whole
server process (with libzmq's I/O thread) for the other two. Their client is a child process.

The library gets its fastest use: the head of a response is kept, an encapsulated Arrow message is
one piece already, and the results are views where the library offers any. Modules run as they are
imported: an editable install is interpreted, a wheel may be compiled.

Command: `python -m benchmarks.own_protocols [--rounds 9] [--only zmtp]`.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import onnx
import pyarrow as pa
import uvicorn
import uvloop
import zmq
import zmq.asyncio
from iskander_worker.loading.onnx_external import external_tensors
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from iskander._generated import flight_pb2, oip_pb2
from iskander.arrow import ipc
from iskander.config.schema import Config, LimitsConfig
from iskander.contract.column_types import parse_column_type
from iskander.contract.tensors import Contract, TensorSpec
from iskander.foundation import varint
from iskander.gateway.protocols.flight.batch_message import BatchMessage
from iskander.gateway.protocols.flight.codec import StreamCodec
from iskander.gateway.protocols.flight.data import data_head, read_flight_data
from iskander.gateway.protocols.flight.plan import Plan
from iskander.gateway.protocols.oip.request import ParsedRequest, read_head, tensors_of
from iskander.gateway.protocols.oip.wire import raw_head, scan, with_id
from iskander.gateway.transport.http1.framing import HEAD_BYTES_MAX
from iskander.gateway.transport.http1.listener import Http1Listener
from iskander.gateway.transport.http1.sites import SitePolicy
from iskander.gateway.transport.limits.allocator import keep_large_blocks
from iskander.gateway.transport.limits.connection_limits import ConnectionLimits
from iskander.gateway.transport.zmtp.connection import Connection
from iskander.gateway.transport.zmtp.frames import Part
from iskander.gateway.transport.zmtp.listener import Listener

ROUNDS = 9
ROUND_S = 0.02
"""CPU of one side in one round."""
ROWS, COLUMNS = 128, 10
LARGE_BYTES = 8 << 20
LIMITS = LimitsConfig()
REQUESTS = 1000
WINDOW = 32
"""Requests in flight of a client that does not wait for each."""
BODY_BYTES = 1024


class Case(NamedTuple):
    """One piece of work. Both sides return comparable values."""

    row: str
    name: str
    ours: Callable[[], Any]
    library: Callable[[], Any]


class Figures(NamedTuple):
    """Results of one case in microseconds, or of one server in requests/s."""

    row: str
    name: str
    ours: float
    library: float
    unit: str = "us"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print one table row for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", choices=("protobuf", "arrow", "zmtp", "http1"))
    parser.add_argument("--client", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.client:
        return _client(options.client)
    keep_large_blocks()  # As in the gateway; without it, the library's copies cost far more.
    is_compiled = str(varint.__file__).endswith(".so")
    print(f"# protocol modules: {'compiled' if is_compiled else 'interpreted'}")
    print("| row | case | ours | library | unit | library / ours |\n|---|---|---:|---:|---|---:|")
    for figures in _all(options.only, options.rounds):
        ratio = figures.library / figures.ours
        print(
            f"| {figures.row} | {figures.name} | {figures.ours:,.2f} | {figures.library:,.2f} "
            f"| {figures.unit} | {ratio:.2f} |",
            flush=True,
        )
    return 0


def _all(only: str | None, rounds: int) -> Iterator[Figures]:
    if only in (None, "protobuf"):
        for case in (*_request_cases(), *_response_cases(), *_flight_cases(), *_model_cases()):
            yield _measure(case, rounds)
    if only in (None, "arrow"):
        for case in _arrow_cases():
            yield _measure(case, rounds)
    if only in (None, "zmtp", "http1"):
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            yield from runner.run(_serve(only, rounds))


def _measure(case: Case, rounds: int) -> Figures:
    """Compare the values of both sides, then time them in turn."""
    if _plain(case.ours()) != _plain(case.library()):
        raise AssertionError(f"{case.name}: the results differ")
    sides = (case.ours, case.library)
    loops = [max(int(ROUND_S / _time(side, 3)), 3) for side in sides]
    best = [float("inf"), float("inf")]
    for _ in range(rounds):
        for index, side in enumerate(sides):
            best[index] = min(best[index], _time(side, loops[index]))
    return Figures(case.row, case.name, best[0] * 1e6, best[1] * 1e6)


def _time(work: Callable[[], Any], loops: int) -> float:
    began = time.thread_time()
    for _ in range(loops):
        work()
    return max(time.thread_time() - began, 1e-9) / loops


def _plain(value: Any) -> Any:  # noqa: ANN401 (compares whatever a case returns)
    """Views as bytes, so that equal contents are equal."""
    if isinstance(value, memoryview | bytearray):
        return bytes(value)
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return value


def _request_cases() -> Iterator[Case]:
    """Requests with raw and typed contents: model, id, descriptions, and the tensors' bytes."""
    request = oip_pb2.ModelInferRequest
    heads: dict[bytes, ParsedRequest] = {}

    def scanned(raw: bytes) -> Any:  # noqa: ANN401
        found = scan(raw, LIMITS)
        parsed = heads.get(found.head)
        if parsed is None:
            parsed = heads[found.head] = read_head(found.head, LIMITS.columns)
        return parsed.model, found.id, parsed.inputs, found.raw

    def first(raw: bytes) -> Any:  # noqa: ANN401
        found = scan(raw, LIMITS)
        parsed = read_head(found.head, LIMITS.columns)
        return parsed.model, found.id, parsed.inputs, found.raw

    def library(raw: bytes) -> Any:  # noqa: ANN401
        message = request.FromString(raw)
        inputs = [(each.name, each.datatype, tuple(each.shape)) for each in message.inputs]
        return message.model_name, message.id.encode(), inputs, list(message.raw_input_contents)

    for what, rows in ((f"{ROWS} x 16 FP32", ROWS), ("8 MB FP32", LARGE_BYTES // 64)):
        raw = request(
            model_name="two-tower",
            id="request-17",
            inputs=[{"name": "x", "datatype": "FP32", "shape": [rows, 16]}],
            raw_input_contents=[np.ones((rows, 16), "f4").tobytes()],
        ).SerializeToString()
        yield Case(
            "protobuf",
            f"raw request, {what}",
            lambda raw=raw: scanned(raw),  # type: ignore[misc]
            lambda raw=raw: library(raw),  # type: ignore[misc]
        )
        yield Case(
            "protobuf",
            f"raw request, {what}, first of its kind",
            lambda raw=raw: first(raw),  # type: ignore[misc]
            lambda raw=raw: library(raw),  # type: ignore[misc]
        )
    yield from _typed_cases()


def _typed_cases() -> Iterator[Case]:
    request = oip_pb2.ModelInferRequest
    kinds = (
        ("FP32", "fp32_contents", "float32", np.linspace(0, 1, ROWS * 16, dtype="f4")),
        ("INT64", "int64_contents", "int64", np.arange(ROWS * 16, dtype="i8") * 37),
    )
    for oip, field, arrow, values in kinds:
        contract = Contract((_spec("x", f"fixed_size_list<{arrow}>[16]"),), (_spec("y", arrow),))
        raw = request(
            model_name="two-tower",
            id="request-17",
            inputs=[
                {
                    "name": "x",
                    "datatype": oip,
                    "shape": [ROWS, 16],
                    "contents": {field: values.tolist()},
                }
            ],
        ).SerializeToString()
        parsed = read_head(scan(raw, LIMITS).head, LIMITS.columns)

        def ours(
            raw: bytes = raw, parsed: ParsedRequest = parsed, contract: Contract = contract
        ) -> Any:  # noqa: ANN401
            found = scan(raw, LIMITS)
            return [each.data for each in tensors_of(parsed, found, contract, LIMITS)]

        def library(raw: bytes = raw, field: str = field, dtype: Any = values.dtype) -> Any:  # noqa: ANN401
            message = request.FromString(raw)
            found = [getattr(each.contents, field) for each in message.inputs]
            return [np.fromiter(each, dtype, len(each)).data for each in found]

        yield Case("protobuf", f"typed request, {ROWS} x 16 {oip}", ours, library)


def _response_cases() -> Iterator[Case]:
    """Responses from the results of a batch, behind a head that both sides keep."""
    for what, rows in ((f"{ROWS} x 16 FP32", ROWS), ("8 MB FP32", LARGE_BYTES // 64)):
        results = np.ones((rows, 16), "f4").tobytes()
        head = oip_pb2.ModelInferResponse(
            model_name="two-tower",
            model_version="1",
            outputs=[{"name": "y", "datatype": "FP32", "shape": [rows, 16]}],
        ).SerializeToString()
        prefix = raw_head(len(results))

        def ours(head: bytes = head, prefix: bytes = prefix, results: bytes = results) -> list[Any]:
            return [with_id(head, b"request-17"), prefix, results]

        def library(head: bytes = head, results: bytes = results) -> list[bytes]:
            # Of the fields that change; a kept message would keep the memory of all its values.
            changed = oip_pb2.ModelInferResponse(id="request-17", raw_output_contents=[results])
            return [head, changed.SerializeToString()]

        parse = oip_pb2.ModelInferResponse.FromString
        if parse(b"".join(ours())) != parse(b"".join(library())):
            raise AssertionError("the responses differ")
        # The pieces have another order of fields, so `_measure` compares their lengths.
        yield Case("protobuf", f"response, {what}", _same(ours), _same(library))


def _same(work: Callable[[], list[bytes]]) -> Callable[[], int]:
    return lambda: sum(map(len, work()))


def _flight_cases() -> Iterator[Case]:
    """FlightData messages; a stream's codec skips the walk if only the body differs."""
    header, body, batch = _batch(ROWS)
    codec, whole = _codec(batch.schema), data_head(header, b"", len(body)) + body

    def like_the_last() -> list[tuple[int, int]]:
        parsed = codec.repeated(whole)
        if parsed is None:  # The first time.
            parsed = codec.decode(codec.locate(whole))
        assert parsed is not None
        return parsed.tensors

    def parse_each() -> list[tuple[int, int]]:
        message = flight_pb2.FlightData.FromString(whole)
        header, body = memoryview(message.data_header), memoryview(message.data_body)
        parsed = codec.decode(BatchMessage(whole, header, body, message.app_metadata))
        assert parsed is not None
        return parsed.tensors

    name = f"FlightData, {ROWS} rows: to tensors, header as before"
    yield Case("protobuf", name, like_the_last, parse_each)
    for what, data in ((f"{ROWS} rows", body), ("8 MB", bytes(LARGE_BYTES))):
        raw = data_head(header, b"", len(data)) + data

        def read(raw: bytes = raw) -> tuple[memoryview, memoryview]:
            found = read_flight_data(raw)
            return found.header, found.body

        def parse(raw: bytes = raw) -> tuple[bytes, bytes]:
            message = flight_pb2.FlightData.FromString(raw)
            return message.data_header, message.data_body

        def write(data: bytes = data) -> list[bytes]:
            return [data_head(header, b"", len(data)), data]

        def serialize(data: bytes = data) -> list[bytes]:
            message = flight_pb2.FlightData(data_header=header, data_body=data)
            return [message.SerializeToString()]

        yield Case("protobuf", f"FlightData, {what}: read", read, parse)
        yield Case("protobuf", f"FlightData, {what}: write", _same(write), _same(serialize))


def _model_cases() -> Iterator[Case]:
    """References of an ONNX file to other files; the library's walk covers one graph only."""
    for what, embedded in (("200 external tensors", 0), ("the same and 64 MB inside", 64 << 20)):
        raw = _model(embedded).SerializeToString()

        def ours(raw: bytes = raw) -> list[str]:
            return [each.location for each in external_tensors(memoryview(raw), "model.onnx")]

        def library(raw: bytes = raw) -> list[str]:
            model = onnx.ModelProto.FromString(raw)
            return [
                entry.value
                for tensor in model.graph.initializer
                for entry in tensor.external_data
                if entry.key == "location"
            ]

        yield Case("protobuf", f"ONNX file of 400 nodes, {what}", ours, library)


def _model(embedded: int) -> onnx.ModelProto:
    initializers = []
    for number in range(200):
        tensor = onnx.TensorProto(name=f"weight_{number}", data_type=1, dims=[64, 64])
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (("location", f"w{number}.bin"), ("offset", "0"), ("length", "16384")):
            tensor.external_data.add(key=key, value=value)
        initializers.append(tensor)
    if embedded:
        size = embedded // 4
        initializers.append(
            onnx.TensorProto(name="inside", data_type=1, dims=[size], raw_data=bytes(embedded))
        )
    names = [f"value_{number}" for number in range(401)]
    nodes = [
        onnx.helper.make_node("Gemm", [names[n], f"weight_{n % 200}"], [names[n + 1]], alpha=0.5)
        for n in range(400)
    ]
    graph = onnx.helper.make_graph(nodes, "graph", [], [], initializers)
    return onnx.helper.make_model(graph)


def _arrow_cases() -> Iterator[Case]:
    """Header of a batch of ten columns: positions of the values, checks, and a response header."""
    header, body, batch = _batch(ROWS)
    schema, raw = batch.schema, pa.py_buffer(ipc.encapsulate(header, body))
    start = len(raw) - len(body) + raw.address
    codec, view, data = _codec(schema), memoryview(header), memoryview(body)

    def positions() -> list[int]:
        read = ipc.read_batch(header, ipc.read_message(header))
        return list(read.buffers[2::4])

    def arrow_positions() -> list[int]:
        read = pa.ipc.read_record_batch(pa.ipc.read_message(raw), schema)
        return [column.buffers()[1].address - start for column in read.columns]

    def checked() -> list[int]:
        codec.plan.header_cache.clear()
        return known()

    def known() -> list[int]:
        parsed = codec.decode(BatchMessage(b"", view, data))
        assert parsed is not None
        return [begin for begin, _ in parsed.tensors]

    def arrow_checked() -> list[int]:
        read = pa.ipc.read_record_batch(pa.ipc.read_message(raw), schema)
        read.validate()
        return [column.buffers()[1].address - start for column in read.columns]

    yield Case("arrow", f"batch header, {COLUMNS} columns: positions", positions, arrow_positions)
    yield Case("arrow", "the same, and all checks", checked, arrow_checked)
    yield Case("arrow", "the same, header seen before", known, arrow_checked)

    template, read = ipc.BatchTemplate(schema), ipc.read_batch(header, ipc.read_message(header))
    nodes, buffers = list(read.nodes), list(read.buffers)
    values, width = pa.py_buffer(body), len(body) // COLUMNS

    def render() -> int:
        return len(template.render(ROWS, nodes, buffers, len(body)))

    def serialize() -> int:
        return len(batch.serialize()) and len(header)

    def build() -> int:
        columns = [
            pa.Array.from_buffers(pa.float32(), ROWS, [None, values.slice(n * width, width)])
            for n in range(COLUMNS)
        ]
        built = pa.RecordBatch.from_arrays(columns, schema=schema)
        return len(built.serialize()) and len(header)

    yield Case("arrow", "response header, of a finished batch", render, serialize)
    yield Case("arrow", "response header, of the results' bytes", render, build)


def _batch(rows: int) -> tuple[bytes, bytes, pa.RecordBatch]:
    columns = [pa.array(np.full(rows, number, "f4")) for number in range(COLUMNS)]
    batch = pa.record_batch(columns, names=[f"column_{number}" for number in range(COLUMNS)])
    written = batch.serialize()
    header = ipc.header_of(written)
    body_bytes = ipc.read_message(header).body_bytes
    return header, bytes(memoryview(written)[len(written) - body_bytes :]), batch


def _codec(schema: pa.Schema) -> StreamCodec:
    inputs = tuple(_spec(name, "float32") for name in schema.names)
    contract = Contract(inputs, (_spec("score", "float32"),))
    return StreamCodec(Plan(ipc.header_of(schema.serialize()), contract, LIMITS), LIMITS)


def _spec(name: str, text: str) -> TensorSpec:
    column = parse_column_type(text)
    return TensorSpec(name, name, column, column.shape)


class _Echo:
    """A session that returns each message."""

    unread_bytes = 0
    is_full = has_work = False

    def __init__(self, connection: Connection, _: bytes) -> None:
        self._connection = connection

    def take(self, parts: list[Part], arrived_ns: int) -> None:
        del arrived_ns
        self._connection.send(parts)

    def refuse(self, parts: list[Part]) -> None:
        raise AssertionError("no memory for an echo")

    def on_writable(self) -> None: ...

    def on_lost(self) -> None: ...


async def _asyncio_router(router: zmq.asyncio.Socket) -> None:
    while True:
        await router.send_multipart(await router.recv_multipart())


def _direct_router(router: zmq.Socket[bytes]) -> Callable[[], None]:
    """Echo read from the descriptor of a ROUTER: the least that pyzmq can cost a loop."""

    def on_readable() -> None:
        while cast(int, router.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            parts: list[bytes] = router.recv_multipart(zmq.NOBLOCK)
            router.send_multipart(parts, zmq.NOBLOCK)

    return on_readable


class _Child:
    """The client process: one line for each order, and one for the seconds it took."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def start(cls, *arguments: str) -> _Child:
        command = (sys.executable, "-m", "benchmarks.own_protocols", "--client", *arguments)
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        return cls(process)

    async def run(self, *order: int) -> tuple[float, float]:
        """Run an order; return its seconds, and the CPU of this process in seconds."""
        assert self.process.stdin is not None and self.process.stdout is not None
        began = time.process_time()
        self.process.stdin.write((" ".join(map(str, order)) + "\n").encode())
        elapsed = float(await self.process.stdout.readline())
        return elapsed, time.process_time() - began

    async def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        await self.process.wait()


async def _serve(only: str | None, rounds: int) -> list[Figures]:
    found: list[Figures] = []
    if only in (None, "zmtp"):
        found += await _zmtp(rounds)
    if only in (None, "http1"):
        found += await _http1(rounds)
    return found


async def _zmtp(rounds: int) -> list[Figures]:
    """Measure three ROUTERs on one loop; only the one that a client talks to has work."""
    loop = asyncio.get_running_loop()
    limits = ConnectionLimits(Config())
    listener = Listener(_Echo, print, message_bytes=1 << 20, connections_max=10, limits=limits)
    bound = socket.create_server(("127.0.0.1", 0))
    await listener.listen(bound)
    first = zmq.asyncio.Context()
    router, second = first.socket(zmq.ROUTER), zmq.Context()
    direct = second.socket(zmq.ROUTER)
    ports = [bound.getsockname()[1]]
    ports += [each.bind_to_random_port("tcp://127.0.0.1") for each in (router, direct)]
    task = asyncio.create_task(_asyncio_router(router))
    on_readable = _direct_router(direct)
    loop.add_reader(direct.FD, on_readable)
    # A descriptor is signalled by edges: a message that came before is read here.
    loop.call_soon(on_readable)
    orders = [(size, window) for size in (64, 4096) for window in (1, WINDOW)]
    child = await _Child.start("zmtp", *map(str, ports))
    best = await _best(child, orders, len(ports), rounds)
    await child.stop()
    task.cancel()
    loop.remove_reader(direct.FD)
    await listener.stop(0.1)
    for each in (router, direct):
        each.close(0)
    first.term()
    second.term()
    found = []
    for size, window in orders:
        ours, *libraries = best[size, window]
        for what, library in zip(("zmq.asyncio", "descriptor"), libraries, strict=True):
            name = f"{size} B, {window} in flight, {what}"
            found.append(Figures("zmtp", name, ours[1], library[1], "us of CPU"))
            found.append(Figures("zmtp", name, 1 / ours[0], 1 / library[0], "requests/s"))
    return found


async def _http1(rounds: int) -> list[Figures]:
    """Measure uvicorn's protocol with and without the budgets of `transport/http1`."""
    loop = asyncio.get_running_loop()
    limits = ConnectionLimits(Config())
    listener = Http1Listener(_echo_app, 10, limits, sites=SitePolicy(Config().access, ""))
    bound = socket.create_server(("127.0.0.1", 0))
    await listener.listen(bound)
    config = uvicorn.Config(
        _echo_app,
        http=H11Protocol,
        ws="none",
        loop="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=3600,
        h11_max_incomplete_event_size=HEAD_BYTES_MAX,
    )
    config.load()
    state = ServerState()
    server = await loop.create_server(lambda: H11Protocol(config, state, {}), "127.0.0.1", 0)
    ports = [bound.getsockname()[1], server.sockets[0].getsockname()[1]]
    child = await _Child.start("http1", *map(str, ports))
    best = await _best(child, [(BODY_BYTES, 1)], len(ports), rounds)
    await child.stop()
    server.close()
    await listener.stop(0.1)
    ours, library = best[BODY_BYTES, 1]
    name = "POST of 1 KiB, echoed"
    return [
        Figures("http1", name, ours[1], library[1], "us of CPU"),
        Figures("http1", name, 1 / ours[0], 1 / library[0], "requests/s"),
    ]


async def _best(
    child: _Child, orders: list[tuple[int, int]], servers: int, rounds: int
) -> dict[tuple[int, int], list[tuple[float, float]]]:
    """Return the least seconds, and microseconds of CPU, of a request at each server."""
    best = {order: [(float("inf"), float("inf"))] * servers for order in orders}
    for number in range(rounds + 1):
        for order in orders:
            for server in range(servers):
                elapsed, cpu = await child.run(server, *order)
                if number:  # The first round warms up.
                    least = best[order][server]
                    used = cpu / REQUESTS * 1e6
                    best[order][server] = (
                        min(least[0], elapsed / REQUESTS),
                        min(least[1], used),
                    )
    return best


async def _echo_app(scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 (ASGI)
    del scope
    body = b""
    while True:
        message = await receive()
        body += message["body"]
        if not message["more_body"]:
            break
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _client(arguments: Sequence[str]) -> int:
    """Connect to each port; for each line of stdin, send requests and print the seconds."""
    kind, *ports = arguments
    talk = _zmtp_client(ports) if kind == "zmtp" else _http1_client(ports)
    for line in sys.stdin:
        server, size, window = map(int, line.split())
        began = time.perf_counter()
        talk(server, size, window)
        print(time.perf_counter() - began, flush=True)
    return 0


def _zmtp_client(ports: Sequence[str]) -> Callable[[int, int, int], None]:
    context = zmq.Context()
    dealers = []
    for port in ports:
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(f"tcp://127.0.0.1:{port}")
        dealers.append(dealer)

    def talk(server: int, size: int, window: int) -> None:
        dealer, message = dealers[server], b"x" * size
        for _ in range(window):
            dealer.send(message)
        for number in range(REQUESTS):
            if len(dealer.recv()) != size:
                raise AssertionError("not an echo")
            if number < REQUESTS - window:
                dealer.send(message)

    return talk


def _http1_client(ports: Sequence[str]) -> Callable[[int, int, int], None]:
    sockets = [socket.create_connection(("127.0.0.1", int(port))) for port in ports]
    for each in sockets:
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def talk(server: int, size: int, window: int) -> None:
        del window
        connection = sockets[server]
        head = f"POST /echo HTTP/1.1\r\nhost: a\r\ncontent-length: {size}\r\n\r\n".encode()
        request = head + b"x" * size
        for _ in range(REQUESTS):
            connection.sendall(request)
            answer = b""
            while not answer.endswith(request[-size:]):
                answer += connection.recv(65536)

    return talk


if __name__ == "__main__":
    sys.exit(main())
