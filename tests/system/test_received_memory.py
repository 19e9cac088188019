"""Memory of the gateway under hostile messages, and after the clients disconnect."""

from __future__ import annotations

import gzip
import json
import socket
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from support import http2 as client
from support import models
from support.http2 import END_HEADERS, END_STREAM, Wire, data, message, request_fields
from support.processes import Gateway, eventually, running
from support.robots import Peer, observation

from benchmarks.hostile import wire
from iskander.gateway.transport.http2.status import Status

pytestmark = pytest.mark.slow

MIB = 1 << 20
BUDGET_BYTES = 192 * MIB
SLACK_BYTES = 64 * MIB
LEFT_BYTES = 32 * MIB
CHECK = "/grpc.health.v1.Health/Check"
Attack = Callable[[ExitStack, Gateway], Iterator[None]]
INFER = "/inference.GRPCInferenceService/ModelInfer"


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("memory")
    ids = models.row_ids(folder / "ids")
    served = [{"name": "ids", "path": str(ids), "intra_threads": 1}]
    limits = {"message_bytes": 72 * MIB, "receive_bytes": BUDGET_BYTES}
    http = {"address": "127.0.0.1:0", "bodies_bytes": 4096 * MIB, "json_bytes": 64 * MIB}
    with running(
        folder,
        served,
        limits=limits,
        http=http,
        inferential={"address": "tcp://127.0.0.1:0"},
    ) as ready:
        yield ready


def resident_bytes(gateway: Gateway) -> int:
    return int(Path(f"/proc/{gateway.pid}/statm").read_text().split()[1]) * 4096


def connect(gateway: Gateway) -> socket.socket:
    host, _, port = gateway.address.rpartition(":")
    connection = socket.create_connection((host, int(port)), 20)
    connection.sendall(client.PREFACE + client.settings())
    return connection


def frames_of(stream_id: int, body: bytes, flags: int = 0) -> bytes:
    """DATA frames of a body."""
    pieces = [body[at : at + MIB] for at in range(0, len(body), MIB)]
    last = len(pieces) - 1
    return b"".join(
        data(stream_id, piece, flags if number == last else 0)
        for number, piece in enumerate(pieces)
    )


def request_headers(stream_id: int, *extra: tuple[str, str]) -> bytes:
    return client.headers(stream_id, request_fields(INFER, extra), END_HEADERS)


def require_response(gateway: Gateway) -> None:
    """Sends a small request over another connection."""
    with Wire(gateway.address) as connection:
        connection.feed(client.headers(1, request_fields(CHECK), END_HEADERS))
        connection.feed(data(1, message(b""), END_STREAM))
        assert connection.answer(1).messages == [b"\x08\x01"]


def incomplete_messages(stack: ExitStack, gateway: Gateway) -> Iterator[None]:
    """Messages of 3.9 MiB without their last byte, over three connections."""
    for _ in range(3):
        connection = stack.enter_context(connect(gateway))
        body = message(bytes(39 * MIB // 10))[:-1]
        for stream_id in range(1, 101, 2):
            connection.sendall(request_headers(stream_id) + frames_of(stream_id, body))
            yield


def large_incomplete_messages(stack: ExitStack, gateway: Gateway) -> Iterator[None]:
    """Messages of 60 MiB, sent as far as the flow-control windows allow."""
    for _ in range(3):
        connection = stack.enter_context(connect(gateway))
        body = message(bytes(60 * MIB))[: 4 * MIB]
        for stream_id in range(1, 41, 2):
            connection.sendall(request_headers(stream_id) + frames_of(stream_id, body))
            yield


def compressed_messages(stack: ExitStack, gateway: Gateway, bomb: bytes) -> Iterator[None]:
    for _ in range(10):
        connection = stack.enter_context(Wire(gateway.address))
        connection.feed(request_headers(1, ("grpc-encoding", "gzip")))
        connection.feed(frames_of(1, message(bomb, 1), END_STREAM))
        assert connection.answer(1).status in (Status.RESOURCE_EXHAUSTED, Status.INVALID_ARGUMENT)
        yield


def expanding_messages(stack: ExitStack, gateway: Gateway) -> Iterator[None]:
    """Messages that expand to 1 GiB."""
    packer = zlib.compressobj(9, wbits=31)
    bomb = b"".join(packer.compress(bytes(16 * MIB)) for _ in range(64)) + packer.flush()
    return compressed_messages(stack, gateway, bomb)


def bad_checksum(stack: ExitStack, gateway: Gateway) -> Iterator[None]:
    """Messages that expand to 60 MiB and end with a wrong checksum."""
    bomb = gzip.compress(bytes(60 * MIB))
    return compressed_messages(stack, gateway, bomb[:-8] + b"\0\0\0\0" + bomb[-4:])


def truncated(stack: ExitStack, gateway: Gateway) -> Iterator[None]:
    """Messages that expand to 60 MiB and are truncated."""
    return compressed_messages(stack, gateway, gzip.compress(bytes(60 * MIB))[:-100])


def bad_dictionary_index(stack: ExitStack, gateway: Gateway) -> Iterator[None]:
    """Dictionaries of 12 MiB, and a batch with an index outside of them."""
    values = pa.array(np.arange(12 * MIB // 8))
    ids = pa.DictionaryArray.from_arrays(pa.array([1], pa.int32()), values)
    sent = wire.flight_messages("ids", [pa.RecordBatch.from_pydict({"x": ids})])
    last = sent[-1].replace(b"\1\0\0\0" + bytes(4), b"\xff\xff\xff\x7f" + bytes(4))
    assert last != sent[-1]
    body = b"".join(map(message, [*sent[:-1], last]))
    for _ in range(6):
        connection = stack.enter_context(Wire(gateway.address))
        connection.feed(client.headers(1, request_fields(wire.EXCHANGE), END_HEADERS))
        connection.feed(frames_of(1, body))
        assert connection.answer(1).status == Status.INVALID_ARGUMENT
        yield


# HTTP/1.

LENGTH = "inference-header-content-length: 10\r\n"


def request(length: int | None, *extra: str) -> bytes:
    """Head of a request with a binary body."""
    framing = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    lines = ("POST /v2/models/ids/infer HTTP/1.1", "host: localhost", framing, *extra, "", "")
    return "\r\n".join(lines).encode()


def connect_http(stack: ExitStack, gateway: Gateway) -> socket.socket:
    host, _, port = gateway.stats()["http_address"].rpartition(":")
    return stack.enter_context(socket.create_connection((host, int(port)), 20))


def send_most(wire: socket.socket, raw: bytes) -> None:
    """Sends until the server rejects the message or stops reading."""
    wire.settimeout(1.0)
    with suppress(OSError):
        wire.sendall(raw)


def http_bodies(length: int | None) -> Attack:
    def attack(stack: ExitStack, gateway: Gateway) -> Iterator[None]:
        body = bytes(length - 1) if length else b"%x\r\n" % (7 * MIB) + bytes(7 * MIB) + b"\r\n"
        for _ in range(60):
            wire = connect_http(stack, gateway)
            send_most(wire, request(length, LENGTH.strip()) + body)
            yield

    return attack


def http_pipelined(stack: ExitStack, gateway: Gateway) -> Iterator[None]:
    """Heads of large requests, each with a part of its body."""
    head = request(65 * MIB, LENGTH.strip())
    for _ in range(200):
        send_most(connect_http(stack, gateway), head + bytes(2 * MIB))
        yield


def http_compressed(bomb: bytes, status: bytes) -> Attack:
    def attack(stack: ExitStack, gateway: Gateway) -> Iterator[None]:
        for _ in range(10):
            wire = connect_http(stack, gateway)
            wire.sendall(request(len(bomb), LENGTH.strip(), "content-encoding: gzip") + bomb)
            assert wire.recv(12) == b"HTTP/1.1 " + status
            yield

    return attack


def http_unread_responses(stack: ExitStack, gateway: Gateway) -> Iterator[None]:
    """Unread responses of 8 MiB."""
    rows = MIB
    tensor = {"name": "x", "datatype": "INT64", "shape": [rows]}
    tensor["parameters"] = {"binary_data_size": 8 * rows}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    length = f"inference-header-content-length: {len(head)}"
    for _ in range(40):
        wire = connect_http(stack, gateway)
        send_most(wire, request(len(head) + 8 * rows, length) + head + bytes(8 * rows))
        yield


def bomb_of(size: int) -> bytes:
    packer = zlib.compressobj(9, wbits=31)
    return b"".join(packer.compress(bytes(MIB)) for _ in range(size // MIB)) + packer.flush()


def http_expanding(stack: ExitStack, gateway: Gateway) -> Iterator[None]:
    return http_compressed(bomb_of(1024 * MIB), b"413")(stack, gateway)


def http_bad_checksum(stack: ExitStack, gateway: Gateway) -> Iterator[None]:
    bomb = bomb_of(60 * MIB)
    return http_compressed(bomb[:-8] + b"\0\0\0\0" + bomb[-4:], b"400")(stack, gateway)


def http_content_length(stack: ExitStack, gateway: Gateway) -> Iterator[None]:
    return http_bodies(7 * MIB)(stack, gateway)


def http_chunked(stack: ExitStack, gateway: Gateway) -> Iterator[None]:
    return http_bodies(None)(stack, gateway)


# ZMTP.


def zmtp_frame(size: int, *, is_last: bool) -> bytes:
    return bytes((2 if is_last else 3,)) + size.to_bytes(8, "big") + bytes(size)


def zmtp_incomplete(size: int, count: int) -> Attack:
    """Messages of `size` bytes without their last byte."""

    def attack(stack: ExitStack, gateway: Gateway) -> Iterator[None]:
        address = gateway.stats()["inferential"]["address"]
        raw = b"\1\0" + zmtp_frame(size, is_last=True)[:-1]
        for _ in range(count):
            send_most(stack.enter_context(Peer(address)).socket, raw)
            yield

    return attack


def zmtp_small(stack: ExitStack, gateway: Gateway) -> Iterator[None]:
    return zmtp_incomplete(7 * MIB // 2, 100)(stack, gateway)


def zmtp_large(stack: ExitStack, gateway: Gateway) -> Iterator[None]:
    return zmtp_incomplete(60 * MIB, 20)(stack, gateway)


def zmtp_unread_responses(stack: ExitStack, gateway: Gateway) -> Iterator[None]:
    """Unread responses of 4 MiB, eight for each peer."""
    address = gateway.stats()["inferential"]["address"]
    raw = Peer.message(b"", *observation("ids", {"x": np.zeros(MIB // 2, np.int64)}))
    for _ in range(16):
        send_most(stack.enter_context(Peer(address)).socket, raw * 8)
        yield


ATTACKS = (
    incomplete_messages,
    large_incomplete_messages,
    expanding_messages,
    bad_checksum,
    truncated,
    bad_dictionary_index,
    http_content_length,
    http_chunked,
    http_pipelined,
    http_expanding,
    http_bad_checksum,
    http_unread_responses,
    zmtp_small,
    zmtp_large,
    zmtp_unread_responses,
)


@pytest.mark.parametrize("attack", ATTACKS)
def test_received_bytes_stay_within_the_budget_and_are_freed(
    gateway: Gateway, attack: Attack
) -> None:
    require_response(gateway)
    start = peak = resident_bytes(gateway)
    with ExitStack() as stack:
        for count, _ in enumerate(attack(stack, gateway)):
            peak = max(peak, resident_bytes(gateway))
            if count % 20 == 0:
                require_response(gateway)
        peak = max(peak, resident_bytes(gateway))
    assert peak - start <= BUDGET_BYTES + SLACK_BYTES
    require_response(gateway)
    eventually(
        lambda: resident_bytes(gateway) - start <= LEFT_BYTES, 30, "the release of the memory"
    )
    require_response(gateway)
