"""HTTP/2 clients against a real gateway: conforming, invalid, slow and flooding."""

from __future__ import annotations

import gzip
import socket
from collections.abc import Iterator

import h2.config
import h2.connection
import h2.events
import h2.settings
import numpy as np
import pyarrow as pa
import pytest
from support import http2 as client
from support import models, raw
from support.http2 import (
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    PREFACE,
    Wire,
    data,
    frame,
    message,
    ping,
    request_fields,
    rst_stream,
    settings,
    split_messages,
    window_update,
)
from support.processes import Gateway, eventually, running

from iskander.gateway.transport.http2.status import Status

MIB = 1 << 20
CHECK = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"
SERVING = b"\x08\x01"


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("hostile")
    ids = models.row_ids(folder / "ids")
    served = [{"name": "ids", "path": str(ids), "intra_threads": 1, "max_batch_rows": 500_000}]
    with running(folder, served, workers={"groups": ["0"], "reattach_s": 5.0}) as ready:
        yield ready


@pytest.fixture(autouse=True)
def others_are_served(gateway: Gateway) -> Iterator[Wire]:
    """Another open connection is served before and after the test, and nothing leaks."""
    with Wire(gateway.address) as wire:
        wire.feed(call(1, CHECK, message(b"")))
        assert wire.answer(1).messages == [SERVING]
        yield wire
        wire.feed(call(999, CHECK, message(b"")))
        assert wire.answer(999).messages == [SERVING] and wire.answer(999).status == 0
        assert not wire.frames_of(GOAWAY)
    gateway.wait_idle()
    assert "Traceback" not in gateway.text()


def call(stream_id: int, path: str, body: bytes, *extra: tuple[str, str]) -> bytes:
    """Returns the frames of a complete call."""
    head = client.headers(stream_id, request_fields(path, extra))
    return head + data(stream_id, body, END_STREAM)


def exchange_of(batch: pa.RecordBatch) -> bytes:
    """Returns the messages of a DoExchange with one batch."""
    opening = raw.descriptor("ids") + raw.schema_data(batch.schema)
    return message(opening) + message(raw.batch_data(batch))


def rows_of(messages: list[bytes]) -> list[int]:
    (batch,) = raw.read_batches(messages)[0]
    values: list[int] = batch.column("y").to_pylist()
    return values


BATCH = pa.record_batch({"x": np.arange(200_000)})
BATCH_ROWS = [3 * x + 1 for x in range(200_000)]


# Conforming clients.


class H2Client:
    """A client on the h2 library, which raises on each protocol error of the server."""

    def __init__(self, address: str, *, window: int = 65_535) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), 20)
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self.h2.initiate_connection()
        self.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window})
        self.bodies: dict[int, bytearray] = {}
        self.trailers: dict[int, dict[str, str]] = {}
        self.ended: set[int] = set()
        self._exchange()

    def __enter__(self) -> H2Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def call(self, stream_id: int, path: str, body: bytes) -> None:
        self.h2.send_headers(stream_id, request_fields(path))
        left = memoryview(body)
        while left:
            window = self.h2.local_flow_control_window(stream_id)
            count = min(len(left), window, self.h2.max_outbound_frame_size)
            if not count:
                self._exchange()
            self.h2.send_data(stream_id, bytes(left[:count]))
            left = left[count:]
        self.h2.end_stream(stream_id)

    def wait_for_end(self, *stream_ids: int) -> None:
        while not self.ended.issuperset(stream_ids):
            self._exchange()

    def _exchange(self) -> None:
        self.socket.sendall(self.h2.data_to_send())
        received = self.socket.recv(1 << 16)
        assert received, "the server closed the connection"
        for event in self.h2.receive_data(received):
            match event:
                case h2.events.DataReceived():
                    self.bodies.setdefault(event.stream_id, bytearray()).extend(event.data)
                    length = event.flow_controlled_length
                    self.h2.acknowledge_received_data(length, event.stream_id)
                case h2.events.ResponseReceived() | h2.events.TrailersReceived():
                    self.trailers[event.stream_id] = dict(event.headers)
                case h2.events.StreamEnded():
                    self.ended.add(event.stream_id)
                case h2.events.StreamReset():
                    assert event.error_code == 0 and event.stream_id in self.ended, event
                case h2.events.ConnectionTerminated():
                    raise AssertionError(event)
        self.socket.sendall(self.h2.data_to_send())


@pytest.mark.parametrize("window", [1000, 65_535, 16 * MIB])
def test_h2_client_finds_no_protocol_error(gateway: Gateway, window: int) -> None:
    with H2Client(gateway.address, window=window) as h2_client:
        h2_client.call(
            1, "/arrow.flight.protocol.FlightService/DoExchange", exchange_of(BATCH[:9000])
        )
        h2_client.call(3, CHECK, message(b""))
        h2_client.call(5, "/no/such", message(b"x"))
        h2_client.call(7, CHECK, b"")
        h2_client.wait_for_end(1, 3, 5, 7)
        assert rows_of(split_messages(bytes(h2_client.bodies[1]))) == BATCH_ROWS[:9000]
        statuses = {each: h2_client.trailers[each]["grpc-status"] for each in (1, 3, 5, 7)}
        assert statuses == {1: "0", 3: "0", 5: "12", 7: "3"}


def test_result_larger_than_the_window_is_complete_after_end_of_input(gateway: Gateway) -> None:
    """The stream has ended while the last result still waits for flow control."""
    with Wire(gateway.address) as wire:
        wire.feed(call(1, raw.EXCHANGE, exchange_of(BATCH[:50_000])))
        acknowledged = 0
        while not client.answer_in(wire.frames, 1).is_over:
            assert not wire.frames_of(client.RST_STREAM)
            received = sum(len(each.payload) for each in wire.frames_of(client.DATA))
            if received > acknowledged:
                wire.feed(
                    window_update(1, received - acknowledged),
                    window_update(0, received - acknowledged),
                )
                acknowledged = received
            assert wire.read()
        response = wire.answer(1)
        assert response.status == 0 and rows_of(response.messages) == BATCH_ROWS[:50_000]


def test_compressed_request_is_served(gateway: Gateway) -> None:
    with Wire(gateway.address) as wire:
        body = message(gzip.compress(exchange_of(BATCH[:100])[5:][:0]), 1)
        wire.feed(call(1, CHECK, body, ("grpc-encoding", "gzip")))
        assert wire.answer(1).messages == [SERVING]


def test_longest_timeout_is_accepted(gateway: Gateway) -> None:
    with Wire(gateway.address) as wire:
        for stream_id, timeout in ((1, "99999999H"), (3, "99999999S"), (5, "20S")):
            body = exchange_of(BATCH[:10])
            wire.feed(call(stream_id, raw.EXCHANGE, body, ("grpc-timeout", timeout)))
            assert wire.answer(stream_id).status == 0
            assert rows_of(wire.answer(stream_id).messages) == BATCH_ROWS[:10]


def test_deadline_ends_a_stream(gateway: Gateway) -> None:
    with Wire(gateway.address) as wire:
        fields = request_fields(raw.EXCHANGE, [("grpc-timeout", "20m")])
        wire.feed(client.headers(1, fields))
        assert wire.answer(1).status == 4
        assert wire.answer(1).blocks[-1]["iskander-code"] == "deadline_exceeded"
    eventually(lambda: gateway.stats()["streams"] == 0, what="the end of the stream")


# Invalid input.


def test_http1_request_gets_status_505(gateway: Gateway) -> None:
    with Wire(gateway.address, first=b"GET / HTTP/1.1\r\nhost: x\r\n\r\n") as wire:
        response = b""
        while piece := wire.socket.recv(4096):
            response += piece
        assert (
            response.endswith(b"This port serves gRPC over HTTP/2.\n")
            and b"HTTP/1.1 505" in response
        )


def test_preface_and_call_sent_byte_by_byte_are_served(gateway: Gateway) -> None:
    with Wire(gateway.address, first=b"") as wire:
        wire.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in PREFACE + settings() + call(1, CHECK, message(b"")):
            wire.feed(bytes([byte]))
        assert wire.answer(1).messages == [SERVING]


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (frame(client.PUSH_PROMISE, 1, b"1234"), client.PROTOCOL_ERROR),
        (client.headers(2), client.PROTOCOL_ERROR),
        (data(1, b"x"), client.PROTOCOL_ERROR),
        (frame(client.HEADERS, 1, b"\xff\xff", END_HEADERS), client.COMPRESSION_ERROR),
        (client.headers(1, flags=0) + ping(), client.PROTOCOL_ERROR),
        (settings(window=1 << 31), client.FLOW_CONTROL_ERROR),
        (window_update(0, client.WINDOW_MAX), client.FLOW_CONTROL_ERROR),
        (b"\xff\xff\xff" + bytes(6), client.FRAME_SIZE_ERROR),
    ],
    ids=["push", "even", "data", "hpack", "unfinished headers", "setting", "window", "huge"],
)
def test_protocol_error_closes_the_connection_with_its_code(
    gateway: Gateway, sent: bytes, code: int
) -> None:
    with Wire(gateway.address) as wire:
        wire.feed(sent)
        assert [each.code for each in wire.until_over() if each.kind == GOAWAY] == [code]


def test_client_above_its_window_is_disconnected(gateway: Gateway) -> None:
    with Wire(gateway.address) as wire:
        # Health.Watch reads only one message.
        wire.feed(client.headers(1, request_fields(WATCH)), data(1, message(b"")))
        wire.until(lambda: wire.frames_of(client.DATA))
        for _ in range(5):
            wire.feed_until_closed(data(1, message(bytes(MIB - 5))))
        frames = wire.until_over()
        assert {each.code for each in frames if each.kind == GOAWAY} <= {client.FLOW_CONTROL_ERROR}


def test_too_large_headers_fail_only_the_call(gateway: Gateway) -> None:
    with Wire(gateway.address) as wire:
        wire.feed(call(1, CHECK, message(b""), ("k", "v" * 20_000)))
        rejected = wire.answer(1)
        assert rejected.status == Status.INVALID_ARGUMENT
        assert rejected.blocks[-1]["iskander-code"] == "limit"
        assert rejected.blocks[-1]["iskander-retryable"] == "false"
        wire.feed(call(3, CHECK, message(b"")))
        assert wire.answer(3).status == 0


# Floods.


@pytest.mark.parametrize(
    "flood",
    [
        ping(),
        settings(),
        rst_stream(1),
        data(3),
        frame(client.PRIORITY, 5, b"12345"),
    ],
    ids=["pings", "settings", "resets", "empty data", "priorities"],
)
def test_flood_closes_the_connection(gateway: Gateway, flood: bytes) -> None:
    with Wire(gateway.address) as wire:
        wire.feed(call(1, CHECK, message(b"")))
        wire.answer(1)
        wire.feed(client.headers(3, request_fields(WATCH)))
        wire.feed_until_closed(flood * 20_000)
        frames = wire.until_over()
        assert wire.is_over
        # The socket may close with unread input, and then GOAWAY can be lost.
        assert {each.code for each in frames if each.kind == GOAWAY} <= {client.ENHANCE_YOUR_CALM}


def test_rapid_resets_close_the_connection(gateway: Gateway) -> None:
    with Wire(gateway.address) as wire:
        opened = (
            client.headers(each, request_fields(raw.EXCHANGE)) + rst_stream(each)
            for each in range(1, 20_001, 2)
        )
        wire.feed_until_closed(b"".join(opened))
        wire.until_over()
    eventually(lambda: gateway.stats()["streams"] == 0, what="the end of the streams")


def test_one_byte_windows_do_not_stop_other_clients(
    gateway: Gateway, others_are_served: Wire
) -> None:
    with Wire(gateway.address, first=PREFACE + settings(window=0)) as wire:
        wire.feed(call(1, CHECK, message(b"")))
        for stream_id in range(5, 25, 2):
            wire.feed(window_update(1, 1) if stream_id < 19 else ping())
            others_are_served.feed(call(stream_id, CHECK, message(b"")))
            assert others_are_served.answer(stream_id).status == 0
        assert wire.answer(1).messages == [SERVING] and wire.answer(1).status == 0


# Shutdown.


@pytest.mark.slow
def test_response_is_complete_after_sigterm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """SIGTERM arrives during a large response; the client continues to read and to send PINGs."""
    folder = tmp_path_factory.mktemp("stopped")
    ids = models.row_ids(folder / "ids")
    served = [{"name": "ids", "path": str(ids), "intra_threads": 1, "max_batch_rows": 500_000}]
    with running(folder, served, workers={"groups": ["0"], "reattach_s": 5.0}) as gateway:
        first = PREFACE + settings(window=client.WINDOW_MAX)
        with Wire(gateway.address, first) as wire:
            wire.feed(window_update(0, client.WINDOW_MAX - 65_535))
            wire.feed(client.headers(1, request_fields(raw.EXCHANGE)))
            body = exchange_of(BATCH)
            for at in range(0, len(body), 16_384):
                wire.feed(data(1, body[at : at + 16_384]))
            # The first DATA frame is the schema, which is sent before the batch arrives.
            wire.until(lambda: len(wire.frames_of(client.DATA)) > 1)
            gateway.signal(15)
            wire.feed(data(1, b"", END_STREAM))
            acknowledged = 0
            while wire.read():
                pings = [
                    each for each in wire.frames_of(client.PING) if not each.flags & client.ACK
                ]
                for each in pings[acknowledged:]:
                    wire.feed_until_closed(ping(each.payload, client.ACK))
                acknowledged = len(pings)
                wire.feed_until_closed(ping())
            response = client.answer_in(wire.frames, 1)
            assert response.is_over and rows_of(response.messages) == BATCH_ROWS
        assert gateway.wait() == 0
