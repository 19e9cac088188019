"""HTTP/2 client by single frames, over a socket or directly to a connection."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import hpack

from iskander.config.schema import TimeoutsConfig
from iskander.gateway.transport.connection_listener import SCRATCH_BYTES
from iskander.gateway.transport.http2 import connection as connection_module
from iskander.gateway.transport.http2.call import Call
from iskander.gateway.transport.http2.connection import Connection
from iskander.gateway.transport.http2.status import RpcError, Status
from iskander.gateway.transport.limits.receive_budget import ReceiveBudget
from iskander.gateway.transport.limits.turn_scheduler import TurnScheduler

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY = range(8)
WINDOW_UPDATE, CONTINUATION = 8, 9
END_STREAM = ACK = 1
END_HEADERS, PADDED, HAS_PRIORITY = 4, 8, 32
TABLE_SETTING, WINDOW_SETTING, FRAME_SETTING = 1, 4, 5
WINDOW_MAX = (1 << 31) - 1
NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR = range(4)
STREAM_CLOSED, FRAME_SIZE_ERROR, REFUSED_STREAM, CANCEL, COMPRESSION_ERROR = range(5, 10)
ENHANCE_YOUR_CALM = 11

RECEIVE_BYTES = 1 << 30

connection_module.QUANTUM_NS = 3600 * 10**9  # type: ignore[misc]
"""A read is processed in one turn, however slow the machine; tests of turns set another value."""

Fields: TypeAlias = Sequence[tuple[str, str]]


class Frame(NamedTuple):
    """A received frame."""

    kind: int
    flags: int
    stream_id: int
    payload: bytes

    @property
    def number(self) -> int:
        """Value of RST_STREAM and WINDOW_UPDATE."""
        return int.from_bytes(self.payload[:4])

    @property
    def code(self) -> int:
        """Error code of GOAWAY."""
        return int.from_bytes(self.payload[4:8])


class Answer(NamedTuple):
    """The response of a call.

    Attributes:
        blocks: Its header blocks, decoded.
        messages: Complete messages.
        reset: The code of a RST_STREAM; None without one.
        is_over: The server closed its half.
    """

    blocks: list[dict[str, str]]
    messages: list[bytes]
    reset: int | None
    is_over: bool

    @property
    def status(self) -> int | None:
        return int(self.blocks[-1]["grpc-status"]) if self.is_over and self.blocks else None


def frame(kind: int, stream_id: int = 0, payload: bytes = b"", flags: int = 0) -> bytes:
    head = struct.pack("!I", len(payload))[1:] + struct.pack("!BBI", kind, flags, stream_id)
    return head + payload


def settings(**values: int) -> bytes:
    """A SETTINGS frame of `table`, `window` and `frame_bytes`."""
    names = {"table": TABLE_SETTING, "window": WINDOW_SETTING, "frame_bytes": FRAME_SETTING}
    pairs = (struct.pack("!HI", names[name], value) for name, value in values.items())
    return frame(SETTINGS, 0, b"".join(pairs))


def window_update(stream_id: int, increment: int) -> bytes:
    return frame(WINDOW_UPDATE, stream_id, struct.pack("!I", increment))


def rst_stream(stream_id: int, code: int = CANCEL) -> bytes:
    return frame(RST_STREAM, stream_id, struct.pack("!I", code))


def ping(payload: bytes = b"12345678", flags: int = 0) -> bytes:
    return frame(PING, 0, payload, flags)


def data(stream_id: int, payload: bytes = b"", flags: int = 0, padding: int | None = None) -> bytes:
    if padding is None:
        return frame(DATA, stream_id, payload, flags)
    return frame(DATA, stream_id, bytes([padding]) + payload + bytes(padding), flags | PADDED)


def message(payload: bytes, compressed: int = 0) -> bytes:
    """A message with gRPC's prefix."""
    return struct.pack("!BI", compressed, len(payload)) + payload


def request_fields(path: str = "/t/M", extra: Fields = (), without: Sequence[str] = ()) -> Fields:
    """The headers of a call."""
    fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "here")]
    fields += [("te", "trailers"), ("content-type", "application/grpc")]
    fields = [*(field for field in fields if field[0] not in without), *extra]
    return sorted(fields, key=lambda field: not field[0].startswith(":"))


def block(fields: Fields) -> bytes:
    """A header block without the dynamic table."""
    encoder = hpack.Encoder()
    encoder.header_table_size = 0
    return encoder.encode(fields, huffman=False)


def headers(stream_id: int, fields: Fields | None = None, flags: int = END_HEADERS) -> bytes:
    return frame(HEADERS, stream_id, block(fields or request_fields()), flags)


def split_frames(raw: bytes) -> tuple[list[Frame], bytes]:
    """The complete frames, and the remaining bytes."""
    frames, at = [], 0
    while len(raw) - at >= 9:
        length = int.from_bytes(raw[at : at + 3])
        if len(raw) - at < 9 + length:
            break
        kind, flags, stream_id = struct.unpack_from("!BBI", raw, at + 3)
        frames.append(Frame(kind, flags, stream_id, raw[at + 9 : at + 9 + length]))
        at += 9 + length
    return frames, raw[at:]


def split_messages(raw: bytes) -> list[bytes]:
    """The complete messages."""
    messages = []
    while len(raw) >= 5 and len(raw) >= 5 + (length := int.from_bytes(raw[1:5])):
        messages.append(raw[5 : 5 + length])
        raw = raw[5 + length :]
    return messages


def answer_in(frames: Iterable[Frame], stream_id: int) -> Answer:
    """The response of a call in frames."""
    decoder = hpack.Decoder()
    raw = b""
    blocks, reset, is_over, pieces = [], None, False, b""
    for each in frames:
        if each.stream_id != stream_id:
            continue
        if each.kind in (HEADERS, CONTINUATION):
            pieces += each.payload
            if each.flags & END_HEADERS:
                blocks.append({str(name): str(value) for name, value in decoder.decode(pieces)})
                pieces = b""
        elif each.kind == DATA:
            raw += each.payload
        elif each.kind == RST_STREAM:
            reset = each.number
        is_over |= each.kind in (DATA, HEADERS) and bool(each.flags & END_STREAM)
    return Answer(blocks, split_messages(raw), reset, is_over)


class FakeTransport(asyncio.Transport):
    """Records written data.

    Attributes:
        written: All written bytes.
        is_closed: By `close` or `abort`.
        free_bytes: Limit of unread bytes, above which it pauses its protocol; None for no limit.
    """

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.is_closed = self.is_aborted = self.has_eof = self.is_full = False
        self.is_paused = False
        self.free_bytes: int | None = None
        self.protocol: Connection
        self._unread = 0

    def write(self, data: Any) -> None:
        assert not self.has_eof
        if not self.is_closed:
            self.written += data
            self._unread += len(data)
            if self.free_bytes is not None and self._unread > self.free_bytes:
                self.fill()

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        for part in list_of_data:
            self.write(part)

    def pause_reading(self) -> None:
        assert not self.is_paused
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def fill(self) -> None:
        """Pause the writer, as a full socket buffer does."""
        if not self.is_full:
            self.is_full = True
            self.protocol.pause_writing()

    def empty(self) -> None:
        """Read everything, as the client."""
        self._unread = 0
        if self.is_full:
            self.is_full = False
            self.protocol.resume_writing()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return self._unread if self.is_full else 0

    def is_closing(self) -> bool:
        return self.is_closed

    def write_eof(self) -> None:
        self.has_eof = True

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    def abort(self) -> None:
        self.is_aborted = True
        self.close()


class FakeHost:
    """Shared state of connections, and the served calls."""

    def __init__(
        self,
        serve: Callable[[Call], Awaitable[None]],
        message_bytes: int,
        calls_max: int,
        receive_bytes: int,
    ) -> None:
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self.message_bytes = lambda _: message_bytes
        self.serve_inline = lambda call: False
        self.calls_max = calls_max
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))
        self.connections: set[Connection] = set()
        self.turns = TurnScheduler(self.loop)
        self.budget = ReceiveBudget(receive_bytes)
        self.timeouts = TimeoutsConfig()
        self.ended: list[str] = []
        self.count_ended = self.ended.append
        self.calls_ended: list[tuple[str, Status]] = []
        self.add_details = lambda path, error: RpcError(
            error.status if isinstance(error, RpcError) else Status.UNAVAILABLE,
            error.message,
            (("why", path),),
        )
        self.load_trailer = b""
        self.served: list[Call] = []
        self.forget = self.connections.discard
        self.unsent: list[int] = []
        self._serve = serve

    def charge_unsent(self, connection: Connection) -> None:
        self.unsent.append(connection.unsent_bytes)

    def count_call(self, path: str, status: Status) -> None:
        self.calls_ended.append((path, status))

    async def serve(self, call: Call) -> None:
        self.served.append(call)
        await self._serve(call)


class Peer:
    """A client of a connection without a socket.

    Args:
        serve: Serves its calls; without it, they stay open.
        message_bytes: Limit of a message.
        calls_max: Limit of open calls.
        receive_bytes: Of its receive budget.
        sends_preface: It sends preface and settings at once.
    """

    def __init__(
        self,
        serve: Callable[[Call], Awaitable[None]] | None = None,
        *,
        message_bytes: int = 1 << 24,
        calls_max: int = 100,
        receive_bytes: int = RECEIVE_BYTES,
        sends_preface: bool = True,
    ) -> None:
        self.host = FakeHost(serve or wait_for_ever, message_bytes, calls_max, receive_bytes)
        self.connection = Connection(self.host)
        self.transport = FakeTransport()
        self.transport.protocol = self.connection
        self.connection.connection_made(self.transport)
        if sends_preface:
            self.feed(PREFACE, settings())

    @property
    def calls(self) -> dict[int, Call]:
        return self.connection.calls

    @property
    def served(self) -> list[Call]:
        return self.host.served

    def feed(self, *parts: bytes, cut: int = SCRATCH_BYTES) -> None:
        """Send bytes, `cut` of them in each read."""
        raw = b"".join(parts)
        for at in range(0, len(raw), cut):
            if self.transport.is_closed:
                return
            piece = raw[at : at + cut]
            self.connection.get_buffer(-1)[: len(piece)] = piece
            self.connection.buffer_updated(len(piece))
            while self.transport.is_paused and not self.transport.is_closed:
                self.host.turns._run()
            # Data that is kept must be copied out of the shared read buffer.
            self.host.scratch[: len(piece)] = b"\xaa" * len(piece)

    def open(self, stream_id: int = 1, *extra: tuple[str, str], flags: int = 0) -> None:
        self.feed(headers(stream_id, request_fields(extra=extra), END_HEADERS | flags))

    def frames_of(self, *kinds: int) -> list[Frame]:
        """The received frames, or those of given kinds."""
        frames, rest = split_frames(bytes(self.transport.written))
        assert not rest
        return [each for each in frames if not kinds or each.kind in kinds]

    def answer(self, stream_id: int = 1) -> Answer:
        return answer_in(self.frames_of(), stream_id)

    def sent_bytes(self, stream_id: int | None = None) -> int:
        """Bytes of received DATA, of one call or of all."""
        return sum(
            len(each.payload)
            for each in self.frames_of(DATA)
            if stream_id in (None, each.stream_id)
        )

    @property
    def goaway_code(self) -> int | None:
        """Code of the GOAWAY before the end of the connection; None while it is open."""
        if not (self.transport.is_closed or self.transport.has_eof):
            return None
        return self.frames_of(GOAWAY)[-1].code


async def wait_for_ever(call: Call) -> None:
    del call
    await asyncio.get_running_loop().create_future()


async def until(predicate: Callable[[], Any], within_s: float = 10.0) -> None:
    """Run the loop until the predicate is true."""
    deadline = time.monotonic() + within_s
    while not predicate():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.001)


class Wire:
    """A socket to a real server, for single frames.

    Args:
        address: Host and port.
        first: The first bytes.
        buffer_bytes: Size of the receive buffer; 0 for the default.
    """

    def __init__(
        self, address: str, first: bytes = PREFACE + settings(), buffer_bytes: int = 0
    ) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.socket()
        self.socket.settimeout(20.0)
        if buffer_bytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        self.socket.connect((host, int(port)))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.frames: list[Frame] = []
        self.is_over = False
        self._rest = b""
        if first:
            self.feed(first)

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def feed(self, *parts: bytes) -> None:
        self.socket.sendall(b"".join(parts))

    def feed_until_closed(self, raw: bytes) -> None:
        """Send until the server closes the connection."""
        try:
            self.socket.sendall(raw)
        except ConnectionError:
            self.is_over = True

    def read(self) -> bool:
        """Read once; returns whether there was data."""
        try:
            raw = self.socket.recv(1 << 16)
        except ConnectionError:
            raw = b""
        frames, self._rest = split_frames(self._rest + raw)
        self.frames += frames
        self.is_over = not raw
        return bool(raw)

    def until(self, predicate: Callable[[], Any]) -> Any:
        """Read until the predicate is true; returns its value."""
        while not (value := predicate()):
            assert self.read(), f"the server hung up: {self.frames[-3:]}"
        return value

    def until_over(self) -> list[Frame]:
        """Read until the server closes the connection; returns all frames."""
        while self.read():
            pass
        return self.frames

    def frames_of(self, *kinds: int) -> list[Frame]:
        return [each for each in self.frames if each.kind in kinds]

    def answer(self, stream_id: int = 1) -> Answer:
        """The complete response of a call."""

        def is_over() -> Answer | None:
            found = answer_in(self.frames, stream_id)
            return found if found.is_over or found.reset is not None else None

        found: Answer = self.until(is_over)
        return found
