"""HTTP/2 connections, with `h2` and other fragmentations of the stream as the references.

An input is the byte stream of a client. `h2` reads it frame by frame; the gateway's connection
reads it frame by frame, cut at random positions, and byte by byte. `h2` sees no responses, so it
determines only requests and DATA. `STRICTER_CODES` lists the codes with which the server may end a
connection earlier.
"""

from __future__ import annotations

import asyncio
import zlib
from random import Random
from typing import Any, Final, NamedTuple

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings
import hpack
from support import http2 as client
from support.http2 import END_HEADERS, END_STREAM, PREFACE, Frame, Peer, split_frames

from fuzz import mutation
from fuzz.serving import LOOP, Recorder, in_loop
from fuzz.targets import grpc_messages, http2_headers
from iskander.gateway.transport.http2.call_receiver import WINDOW_BYTES
from iskander.gateway.transport.http2.connection import FRAME_BYTES_MAX
from iskander.gateway.transport.http2.status import Status

ITERATIONS = 400
MESSAGE_BYTES_MAX = grpc_messages.MESSAGE_BYTES_MAX
CALLS_MAX = 8

STRICTER_CODES: Final = {
    client.ENHANCE_YOUR_CALM: "limits of rates and of header blocks",
    client.COMPRESSION_ERROR: "bounds of header blocks",
    client.FRAME_SIZE_ERROR: "non-DATA frames above 64 KiB",
    client.STREAM_CLOSED: "frames on a stream that the server has ended, unknown to `h2`",
}
"""Codes with which the server may end a connection that `h2` accepts."""
STRICTER_TEXTS: Final = (
    b"HEADERS on even stream",  # `h2` waits for the end of the header block.
    b"PUSH_PROMISE from a client",
    b"MAX_FRAME_SIZE of ",  # `h2` checks only the last of repeated settings.
    b"INITIAL_WINDOW_SIZE of ",
    b"ENABLE_PUSH of ",
    b"stream depends on itself",
    b"RST_STREAM on an idle stream",  # RFC 9113, section 5.1, idle.
    b"MAX_FRAME_SIZE of ",
    b"INITIAL_WINDOW_SIZE of ",
    b"ENABLE_PUSH of ",
    b"WINDOW_UPDATE of 0 bytes",  # For a stream that the server has ended.
)
"""Texts of GOAWAY with which the server may do so with another code."""
LENIENT: Final = ("InvalidSettingsValueError: Setting 8 ",)
"""Errors of `h2` that the server ignores: settings of extensions."""
KINDS = 10
"""Number of frame types in RFC 9113; `h2` also parses extension frames."""


class Outcome(NamedTuple):
    """Observed behavior of a connection.

    Attributes:
        goaway: Code and text of the GOAWAY that ended it; None while it is open.
        messages: Messages of each served call.
        statuses: Status of each call with a response.
        resets: Codes of RST_STREAM, by stream.
        wire_statuses: Status of each stream in the sent frames.
    """

    goaway: tuple[int, bytes] | None
    messages: dict[int, list[bytes]]
    statuses: dict[int, int]
    resets: dict[int, int]
    wire_statuses: dict[int, int]


def seeds() -> list[bytes]:
    headers_of, data, message = client.headers, client.data, client.message
    early = client.request_fields("/t/Early")
    zipped = client.request_fields(extra=[("grpc-encoding", "gzip")])
    encoder = hpack.Encoder()
    shared = encoder.encode(client.request_fields()), encoder.encode(client.request_fields())
    begin = PREFACE + client.settings()
    return [
        begin + headers_of(1) + data(1, message(b"hello"), END_STREAM) + client.ping(),
        begin
        + headers_of(1)
        + data(1, message(b"a" * 300)[:7])
        + data(1, message(b"a" * 300)[7:], 1, 9),
        begin
        + client.settings(window=10, frame_bytes=20_000, table=0)
        + headers_of(1)
        + headers_of(3, early)
        + data(3, message(b"late"))
        + data(1, message(b"x" * 90), END_STREAM)
        + client.window_update(1, 50)
        + client.window_update(0, 50)
        + client.rst_stream(3),
        begin
        + client.frame(client.HEADERS, 1, shared[0][:9])
        + client.frame(client.CONTINUATION, 1, shared[0][9:], END_HEADERS)
        + client.frame(client.HEADERS, 3, shared[1], END_HEADERS | END_STREAM)
        + data(1, message(b"")),
        begin
        + headers_of(1, zipped)
        + data(1, message(grpc_messages.gzip.compress(bytes(999), mtime=0), 1), END_STREAM)
        + client.frame(client.PRIORITY, 3, bytes(5))
        + client.frame(client.GOAWAY, 0, bytes(8))
        + client.frame(77, 0, b"unknown"),
        begin
        + b"".join(headers_of(stream_id) for stream_id in range(1, 2 * CALLS_MAX + 5, 2))
        + client.frame(client.HEADERS, 1, client.block([("grpc-x", "y")]), END_STREAM | END_HEADERS)
        + data(3, b"", END_STREAM)
        + client.ping(b"iskleave", client.ACK),
        begin
        + headers_of(1)
        + b"".join(data(1, message(b"p" * size), 0, size) for size in (0, 1, 9, 255))
        + data(1, b"", 0, 3)
        + client.ping()
        + data(1, message(b"end"), END_STREAM, 0)
        + client.ping(),
        b"GET / HTTP/1.1\r\nhost: here\r\n\r\n",
    ]


def mutate(raw: bytes, other: bytes, random: Random) -> bytes:
    if not raw.startswith(PREFACE):
        return mutation.flip(raw, other, random) if random.randrange(4) else PREFACE + raw
    frames_before, _ = split_frames(raw[len(PREFACE) :])
    others, _ = split_frames(other[len(PREFACE) :])

    def change(each: Frame) -> Frame:
        kind = random.randrange(8)
        if kind == 0:
            return each._replace(stream_id=stream_of(random))
        if kind == 1:
            return each._replace(flags=each.flags ^ (1 << random.choice((0, 2, 3, 5, 1, 7))))
        if kind == 2:
            return each._replace(kind=random.randrange(11))
        if each.kind == client.HEADERS and kind < 6:
            at = random.randrange(len(each.payload) + 1)
            more = http2_headers.representation(random)
            return each._replace(payload=each.payload[:at] + more + each.payload[at:])
        if each.kind == client.SETTINGS:
            return each._replace(payload=each.payload + setting(random))
        return each._replace(payload=mutation.flip(each.payload, other, random))

    frames = mutation.shuffle(frames_before, others, random, change, lambda: new_frame(random))
    if not random.randrange(6):
        frames = split_frame(frames, random)
    changed = b"".join(client.frame(f.kind, f.stream_id, f.payload, f.flags) for f in frames)
    return PREFACE + (changed if random.randrange(20) else changed[: random.randrange(9999)])


def run(raw: bytes) -> None:
    random = Random(zlib.crc32(raw))
    pieces = frame_pieces(raw)
    complete = pieces if is_complete(pieces[-1]) else pieces[:-1]
    check_against_reference(complete, LOOP.run_until_complete(served(complete)))
    outcome: Outcome = LOOP.run_until_complete(served(pieces, is_deferred=True))
    count = random.choice((3, 12, 40))
    cuts = sorted(random.randint(0, len(raw)) for _ in range(count))
    cut = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    cuttings = [cut, [raw]] if len(raw) > 1500 else [cut, [raw], [bytes((byte,)) for byte in raw]]
    for pieces in cuttings:
        other = LOOP.run_until_complete(served(pieces, is_deferred=True))
        check_same(outcome, other, reset_by(raw))
    LOOP.run_until_complete(served(cut))


def frame_pieces(raw: bytes) -> list[bytes]:
    """The preface, each frame, and the rest."""
    pieces = [raw[: len(PREFACE)]]
    at = len(PREFACE)
    while at < len(raw):
        length = 9 + int.from_bytes(raw[at : at + 3])
        pieces.append(raw[at : at + length])
        at += length
    return pieces


def is_complete(piece: bytes) -> bool:
    """Whether a piece is the preface or a complete frame."""
    return piece == PREFACE or (
        len(piece) >= 9 and len(piece) == 9 + int.from_bytes(piece[:3]) and piece[:3] != PREFACE[:3]
    )


@in_loop
async def served(pieces: list[bytes], *, is_deferred: bool = False) -> Outcome:
    """Feed a connection, and check that everything is freed at its end."""
    recorder = Recorder(is_deferred=is_deferred)
    peer = Peer(message_bytes=MESSAGE_BYTES_MAX, calls_max=CALLS_MAX, sends_preface=False)
    peer.host.serve_inline = recorder.serve
    for piece in pieces:
        if piece:
            peer.feed(piece)
    recorder.finish()
    while any(call._decompression is not None for call in peer.calls.values()):
        await asyncio.sleep(0)
    outcome = outcome_of(peer, recorder)
    check_sent(peer, pieces)
    peer.connection.enforce_timeouts(peer.connection._read_ns + (3600 << 30))
    recorder.calls.clear()
    await grpc_messages.close(peer)
    assert not peer.connection.output._blocked and not peer.host.turns._waiting
    return outcome


def outcome_of(peer: Peer, recorder: Recorder) -> Outcome:
    if bytes(peer.transport.written).startswith(b"HTTP/1.1"):
        # HTTP/1.1 is recognized only in the first read; in fragments it is an invalid preface.
        return Outcome((client.PROTOCOL_ERROR, b"invalid connection preface"), {}, {}, {}, {})
    sent = peer.frames_of()
    goaways = [each for each in sent if each.kind == client.GOAWAY]
    is_over = peer.transport.is_closed or peer.transport.has_eof
    goaway = (goaways[-1].code, goaways[-1].payload[8:]) if goaways and is_over else None
    resets = {each.stream_id: each.number for each in sent if each.kind == client.RST_STREAM}
    wire_statuses: dict[int, int] = {}
    decoder = hpack.Decoder()
    for each in sent:
        if each.kind == client.HEADERS:
            fields = dict(decoder.decode(each.payload))
            assert each.flags & END_HEADERS
            if fields.get(":status") == "415":
                # The status follows a text, which may exceed the window.
                wire_statuses[each.stream_id] = int(Status.INTERNAL)
            elif "grpc-status" in fields:
                assert each.flags & END_STREAM
                status = int(fields["grpc-status"])
                assert wire_statuses.setdefault(each.stream_id, status) == status
    return Outcome(goaway, recorder.messages, recorder.statuses, resets, wire_statuses)


def check_sent(peer: Peer, pieces: list[bytes]) -> None:
    """Checks that the server respects the client's windows and frame sizes."""
    if bytes(peer.transport.written).startswith(b"HTTP/1.1"):
        return
    received, _ = split_frames(b"".join(pieces)[len(PREFACE) :])
    window, size = 65_535, 16_384
    for each in received:
        if each.kind == client.SETTINGS and not each.flags & client.ACK:
            for at in range(0, len(each.payload) - 5, 6):
                name, value = divmod(int.from_bytes(each.payload[at : at + 6]), 1 << 32)
                window = max(window, value) if name == client.WINDOW_SETTING else window
                size = max(size, value) if name == client.FRAME_SETTING else size
    granted: dict[int, int] = {0: 65_535}
    for each in received:
        if each.kind == client.WINDOW_UPDATE and len(each.payload) == 4:
            stream_id = each.stream_id & client.WINDOW_MAX
            before = granted.get(stream_id, window)
            granted[stream_id] = before + (each.number & client.WINDOW_MAX)
    used: dict[int, int] = {}
    ended: set[int] = set()
    for each in peer.frames_of():
        assert len(each.payload) <= size
        assert each.stream_id not in ended or each.kind in (client.RST_STREAM, client.WINDOW_UPDATE)
        if each.kind == client.DATA:
            for stream_id in (0, each.stream_id):
                used[stream_id] = used.get(stream_id, 0) + len(each.payload)
        if each.kind in (client.DATA, client.HEADERS) and each.flags & END_STREAM:
            ended.add(each.stream_id)
    for stream_id, count in used.items():
        assert count <= granted.get(stream_id, window), f"window of stream {stream_id} exceeded"


def reset_by(raw: bytes) -> set[int]:
    """Streams that the client resets; their outcome depends on the time of the reset."""
    frames, _ = split_frames(raw[len(PREFACE) :])
    return {each.stream_id & client.WINDOW_MAX for each in frames if each.kind == client.RST_STREAM}


def check_same(outcome: Outcome, other: Outcome, reset: set[int]) -> None:
    """Checks that fragmentation does not change the outcome."""
    assert other.goaway == outcome.goaway, (
        f"different GOAWAY\n{other.goaway}, expected {outcome.goaway}"
    )
    if outcome.goaway is not None:
        for stream_id in outcome.messages.keys() & other.messages.keys():
            require_prefix(outcome.messages[stream_id], other.messages[stream_id])
        return
    assert other.resets.keys() | reset == outcome.resets.keys() | reset, (
        "resets depend on the fragmentation"
    )
    reset = reset | outcome.resets.keys()
    for name in ("messages", "statuses", "wire_statuses"):
        before, now = (
            {key: value for key, value in getattr(each, name).items() if key not in reset}
            for each in (outcome, other)
        )
        assert before == now, f"{name} depend on the fragmentation\n{now}, expected {before}"


def require_prefix(first: list[bytes], second: list[bytes]) -> None:
    count = min(len(first), len(second))
    assert first[:count] == second[:count]


class ReferenceResult(NamedTuple):
    """Events of `h2` for the same stream.

    Attributes:
        requests: Headers of each stream.
        data: DATA of each stream.
        ended: Streams with complete input.
        with_trailers: Streams with trailers.
        error: Reason for which `h2` ended the connection; empty if it did not.
        frames: Number of frames read.
    """

    requests: dict[int, list[tuple[bytes, bytes]]]
    data: dict[int, bytes]
    ended: set[int]
    with_trailers: set[int]
    error: str
    frames: int


def reference(pieces: list[bytes]) -> ReferenceResult:
    config = h2.config.H2Configuration(
        client_side=False,
        header_encoding=None,
        validate_inbound_headers=False,
        normalize_inbound_headers=False,
    )
    connection = h2.connection.H2Connection(config)
    codes = h2.settings.SettingCodes
    connection.local_settings = h2.settings.Settings(
        client=False,
        initial_values={
            codes.INITIAL_WINDOW_SIZE: WINDOW_BYTES,
            codes.MAX_FRAME_SIZE: FRAME_BYTES_MAX,
            codes.MAX_CONCURRENT_STREAMS: 1000,
            codes.MAX_HEADER_LIST_SIZE: 65_536,
        },
    )
    connection.max_inbound_frame_size = FRAME_BYTES_MAX
    connection.decoder.max_header_list_size = 65_536
    connection.initiate_connection()
    connection.increment_flow_control_window(client.WINDOW_MAX - 65_535)
    expected = ReferenceResult({}, {}, set(), set(), "", 0)
    for number, piece in enumerate(pieces):
        if number:
            piece = without_h2_rules(piece)
        try:
            events = connection.receive_data(piece)
        except (h2.exceptions.ProtocolError, hpack.HPACKError) as error:
            return expected._replace(error=f"{type(error).__name__}: {error}", frames=number)
        for event in events:
            add_event(event, expected)
        expected = expected._replace(frames=number + 1)
    return expected


def without_h2_rules(piece: bytes) -> bytes:
    """A frame without the parts for which `h2` has additional rules.

    `h2` accepts no frame after a GOAWAY, although open calls may continue. It parses extension
    frames and the reserved bit of WINDOW_UPDATE, and rejects HEADERS that consist of padding.
    """
    kind = piece[3] if len(piece) >= 9 else 0
    is_goaway = kind == client.GOAWAY and piece[5:9] == bytes(4) and len(piece) >= 17
    if is_goaway or kind >= KINDS:
        return piece[:3] + b"\xff" + piece[4:]
    if kind == client.WINDOW_UPDATE and len(piece) == 13:
        return piece[:9] + bytes((piece[9] & 0x7F,)) + piece[10:]
    if kind == client.HEADERS and piece[4] & client.PADDED and len(piece) > 9:
        priority = piece[10:15] if piece[4] & client.HAS_PRIORITY else b""
        if piece[9] == len(piece) - 10 - len(priority):
            flags = piece[4] & ~client.PADDED
            return client.frame(kind, int.from_bytes(piece[5:9]), priority, flags)
    return piece


def add_event(event: Any, expected: ReferenceResult) -> None:
    if isinstance(event, h2.events.RequestReceived):
        expected.requests[event.stream_id] = [(bytes(n), bytes(v)) for n, v in event.headers]
        expected.data[event.stream_id] = b""
    elif isinstance(event, h2.events.DataReceived):
        expected.data[event.stream_id] += event.data
    elif isinstance(event, h2.events.StreamEnded):
        expected.ended.add(event.stream_id)
    elif isinstance(event, h2.events.TrailersReceived):
        expected.with_trailers.add(event.stream_id)


def check_against_reference(pieces: list[bytes], outcome: Outcome) -> None:
    expected = reference(pieces)
    reset = reset_by(b"".join(pieces))
    if expected.error:
        assert is_rejected(outcome) or expected.error.startswith(LENIENT), expected.error
    elif outcome.goaway is not None:
        code, text = outcome.goaway
        assert code in STRICTER_CODES or text.startswith(STRICTER_TEXTS), (
            f"h2 accepts it\n {outcome.goaway}"
        )
    for stream_id, messages in outcome.messages.items():
        if stream_id in expected.requests:
            check_call(stream_id, messages, expected, outcome, is_reset=stream_id in reset)
        else:
            assert expected.error, f"h2 has no request on stream {stream_id}"
    if outcome.goaway is None and not expected.error:
        for stream_id, fields in expected.requests.items():
            check_request(stream_id, fields, outcome, is_reset=stream_id in reset)


def is_rejected(outcome: Outcome) -> bool:
    """Whether the server rejected something.

    A connection error of `h2` may be a stream error, or concern a stream that the server has ended.
    """
    return outcome.goaway is not None or any(outcome.resets.values()) or bool(outcome.wire_statuses)


def check_request(
    stream_id: int, fields: list[tuple[bytes, bytes]], outcome: Outcome, *, is_reset: bool
) -> None:
    """Checks that a request is served or rejected according to its headers."""
    text = http2_headers.text_of
    pairs = [(text(name), text(value)) for name, value in fields]
    kind, *rest = http2_headers.expected(pairs)
    if outcome.resets.get(stream_id) == client.REFUSED_STREAM:
        return
    if kind == "reset":
        assert stream_id not in outcome.messages
        assert outcome.resets.get(stream_id) == rest[0] or is_reset
    elif kind == "status":
        assert stream_id not in outcome.messages
        assert outcome.wire_statuses.get(stream_id) == rest[0]
    else:
        is_other_length = rest[-1] >= 0 and outcome.resets.get(stream_id) == client.PROTOCOL_ERROR
        assert stream_id in outcome.messages or is_reset or is_other_length


def check_call(
    stream_id: int,
    messages: list[bytes],
    expected: ReferenceResult,
    outcome: Outcome,
    *,
    is_reset: bool,
) -> None:
    """Checks the messages against the DATA that `h2` has read."""
    text = http2_headers.text_of
    fields = {text(name): text(value) for name, value in expected.requests[stream_id]}
    if fields.get(":path") == "/t/Early":
        assert messages == []
        return
    encoding = fields.get("grpc-encoding", "")
    messages_expected, status = grpc_messages.expected(expected.data[stream_id], encoding)
    if expected.error or outcome.goaway is not None or is_reset:
        require_prefix(messages, messages_expected)
        assert expected.error or len(messages) <= len(messages_expected)
        return
    if outcome.resets.get(stream_id) == client.PROTOCOL_ERROR:
        return  # Wrong `content-length` or trailers, which the reference does not check.
    assert messages == messages_expected, (
        f"{len(messages)} messages, expected {len(messages_expected)}"
    )
    if stream_id in expected.ended:
        assert outcome.statuses.get(stream_id) == status
    else:
        assert stream_id not in outcome.statuses or outcome.statuses[stream_id] != 0


def new_frame(random: Random) -> Frame:
    """A random frame."""
    stream_id = stream_of(random)
    kind = random.choice((*range(10), 0, 1, 1))
    flags = random.choice((0, 1, 4, 5, 8, 32, random.randrange(256)))
    payload = random.randbytes(random.choice((0, 1, 4, 5, 8)))
    if kind == client.DATA:
        payload = client.message(random.randbytes(random.choice((0, 1, 50, 300))))
        if not random.randrange(4):
            padding = random.choice((0, 1, 9))
            flags, payload = flags | client.PADDED, bytes((padding,)) + payload + bytes(padding)
    elif kind == client.HEADERS:
        path = random.choice(("/t/M", "/t/M", "/t/Early"))
        extra = [(random.choice(http2_headers.NAMES), random.choice(http2_headers.VALUES))]
        fields = client.request_fields(path, extra if random.randrange(2) else ())
        try:
            payload, flags = client.block(fields), flags | END_HEADERS
        except UnicodeEncodeError:
            payload = b""
    elif kind == client.SETTINGS:
        stream_id, payload = 0, setting(random) * random.choice((0, 1, 1, 3))
    elif kind == client.WINDOW_UPDATE:
        stream_id = random.choice((0, stream_id))
        payload = (mutation.number(random) & client.WINDOW_MAX).to_bytes(4)
    elif kind in (client.PING, client.GOAWAY):
        stream_id = 0 if random.randrange(8) else stream_id
        payload = random.choice((b"iskleave", b"12345678", bytes(8)))
    return Frame(kind, flags, stream_id, payload)


def stream_of(random: Random) -> int:
    return random.choice((1, 1, 3, 3, 5, 7, 9, 0, 2, 101, (1 << 31) - 1, (1 << 32) - 1))


def setting(random: Random) -> bytes:
    value = mutation.number(random) & 0xFFFFFFFF
    return random.choice((1, 2, 3, 4, 4, 5, 6, 9)).to_bytes(2) + value.to_bytes(4)


def split_frame(frames: list[Frame], random: Random) -> list[Frame]:
    """Split a DATA frame in two, or a header block into HEADERS and CONTINUATION."""
    cuts = [i for i, each in enumerate(frames) if each.kind in (client.DATA, client.HEADERS)]
    if not cuts:
        return frames
    index = random.choice(cuts)
    kind, flags, stream_id, payload = frames[index]
    at = random.randrange(len(payload) + 1)
    if kind == client.DATA:
        first = Frame(kind, flags & ~END_STREAM, stream_id, payload[:at])
        second = Frame(kind, flags, stream_id, payload[at:])
    else:
        first = Frame(kind, flags & ~END_HEADERS, stream_id, payload[:at])
        second = Frame(client.CONTINUATION, END_HEADERS, stream_id, payload[at:])
    return [*frames[:index], first, second, *frames[index + 1 :]]
