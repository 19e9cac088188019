"""Header blocks of requests, with `hpack` and the rules of the standards as the references.

Layout of an input: the blocks of one connection, each preceded by its length in 2 bytes. A block
may be rejected for a bound of `header_block_reader`; a counter of representations checks each
rejection.
"""

from __future__ import annotations

import binascii
import re
import zlib
from random import Random
from typing import Any

import hpack
from hpack.hpack import decode_integer

from fuzz import mutation
from iskander.gateway.transport.http2.frames import ConnectionBroken, StreamError
from iskander.gateway.transport.http2.header_block_reader import (
    EXPANDED_BYTES_MAX,
    FIELDS_MAX,
    HUFFMAN_BYTES_MAX,
    INTEGER_BYTES_MAX,
    TABLE_UPDATES_MAX,
    HeaderBlockReader,
)
from iskander.gateway.transport.http2.request_headers import (
    BINARY_PARTS_MAX,
    HEADER_LIST_BYTES_MAX,
    RequestHeaders,
    read_request,
)
from iskander.gateway.transport.http2.status import RpcError, Status

ITERATIONS = 1500
REQUEST = [
    (":method", "POST"), (":scheme", "http"), (":path", "/t/M"), (":authority", "here"),
    ("te", "trailers"), ("content-type", "application/grpc"), ("grpc-timeout", "5S"),
    ("x-bin", "aGk,aGk="), ("user-agent", "me"), ("iskander-client", "robot-7"),
]  # fmt: skip
NAMES = [
    *dict(REQUEST), "cookie", "connection", "host", "content-length", "grpc-encoding", "grpc-x",
    "Upper", "", ":status", ":protocol", "a b", "grpc-status", "transfer-encoding", "x-bin", "x\0",
]  # fmt: skip
VALUES = [
    *dict(REQUEST).values(), "", "gzip", "GET", "1", "-1", "99999999H", "999999999S", "1x",
    " padded ", "application/grpc+proto", "application/grpcx", "a\r\nb", "\xff", "AAAA", "A",
    "A===", "=AAA", ",,,", "AAA-", "AA AA", "chunked", "/", "0" * 19, "2" * 18, "\xe9t\xe9",
]  # fmt: skip


def seeds() -> list[bytes]:
    plain, shared = hpack.Encoder(), hpack.Encoder()
    plain.header_table_size = 0
    resized = hpack.Encoder()
    resized.header_table_size = 100
    return [
        join([plain.encode(REQUEST, huffman=False)]),
        join([plain.encode(REQUEST[4:] + REQUEST[:4], huffman=False)]),
        join([plain.encode([*REQUEST[:4], REQUEST[2], *REQUEST[4:]], huffman=False)]),
        join([shared.encode(REQUEST, huffman=True) for _ in range(3)]),
        join([shared.encode([*REQUEST, ("n", "v" * 300)], huffman=True), b"\x82\xbe\xc0"]),
        # A table with one entry: the same block is another field after the entry changes.
        join([b"\x3f\x21\x40\x01a\x01b", b"\xbe", b"\x40\x01a\x01c", b"\xbe", b"\xbe"]),
        join([resized.encode(REQUEST), b"\x3f\xe1\x1f\x82\x20\x82", b"\x82" * 40]),
    ]


def mutate(raw: bytes, other: bytes, random: Random) -> bytes:
    def change(block: bytes) -> bytes:
        if random.randrange(3):
            return mutation.flip(block, other, random)
        at = random.randrange(len(block) + 1)
        return block[:at] + representation(random) + block[at:]

    def make() -> bytes:
        return b"".join(representation(random) for _ in range(random.choice((1, 3, 8, 60))))

    return join(mutation.shuffle(split(raw), split(other), random, change, make))


def run(raw: bytes) -> None:
    reader, reference = HeaderBlockReader(), hpack.Decoder(max_header_list_size=EXPANDED_BYTES_MAX)
    random = Random(zlib.crc32(raw))
    for block in split(raw):
        expected_fields, error_text = decode_with_reference(reference, block)
        try:
            fields = read_in_pieces(reader, block, random)
        except ConnectionBroken as error:
            assert expected_fields is None or exceeds_bound(block), f"rejected: {error}"
            return
        assert expected_fields is not None, f"hpack rejects it: {error_text}"
        assert not exceeds_bound(block), "a bound was exceeded"
        assert fields.pairs == [(text_of(name), text_of(value)) for name, value in expected_fields]
        check_request(fields.pairs)
        assert outcome(fields.pairs) == outcome_of(fields.request), "a repeated block differs"


def read_in_pieces(blocks: HeaderBlockReader, block: bytes, random: Random) -> Any:
    """Read a block as HEADERS and CONTINUATION frames."""
    cuts = sorted(random.randint(0, len(block)) for _ in range(random.choice((0, 0, 1, 3))))
    pieces = [block[a:b] for a, b in zip([0, *cuts], [*cuts, len(block)], strict=True)]
    blocks.on_headers(1, 0, memoryview(pieces[0]))
    for piece in pieces[1:]:
        blocks.on_continuation(1, memoryview(piece))
    return blocks.end()[2]


def decode_with_reference(
    reference: hpack.Decoder, block: bytes
) -> tuple[list[tuple[bytes, bytes]] | None, str]:
    try:
        return [
            (bytes(name), bytes(value)) for name, value in reference.decode(block, raw=True)
        ], ""
    except hpack.HPACKError as error:
        return None, str(error)


def text_of(raw: bytes) -> str:
    """The text of a header: UTF-8, or else Latin-1."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def exceeds_bound(block: bytes) -> bool:
    """Whether a block exceeds a bound, by the number of its representations."""
    at = fields = updates = huffman = 0

    def integer(bits: int) -> int:
        nonlocal at
        value, used = decode_integer(block[at:], bits)
        at += used
        if used > 1 + INTEGER_BYTES_MAX:
            raise OverflowError
        return int(value)

    try:
        while at < len(block):
            first = block[at]
            if first >= 0x80:
                fields += bool(integer(7) >= 0)
            elif first >= 0x20 and first < 0x40:
                updates += bool(integer(5) >= 0)
            else:
                fields += 1
                for _ in range(1 if integer(6 if first >= 0x40 else 4) else 2):
                    coded = at < len(block) and block[at] >= 0x80
                    length = integer(7)
                    huffman += length if coded else 0
                    at += length
    except OverflowError:
        return True
    except hpack.HPACKError:
        pass
    return fields > FIELDS_MAX or updates > TABLE_UPDATES_MAX or huffman > HUFFMAN_BYTES_MAX


def outcome(pairs: list[tuple[str, str]]) -> tuple[Any, ...]:
    return outcome_of(lambda: read_request(pairs))


def outcome_of(read: Any) -> tuple[Any, ...]:
    """The result of reading a request."""
    try:
        head: RequestHeaders = read()
    except StreamError as error:
        return ("reset", int(error.code))
    except RpcError as error:
        return ("status", int(error.status))
    return (
        "call", head.path, head.timeout_ns, head.encoding, tuple(head.metadata), head.content_bytes,
    )  # fmt: skip


def check_request(pairs: list[tuple[str, str]]) -> None:
    actual, correct = outcome(pairs), expected(pairs)
    assert actual == correct, f"different outcome\n{actual}, expected {correct}"


def expected(pairs: list[tuple[str, str]]) -> tuple[Any, ...]:
    """The outcome of a request by RFC 9113, section 8.3, and gRPC over HTTP/2."""
    size = sum(len(name) + len(value) + 32 for name, value in pairs)
    parts = sum(len(value.split(",")) for name, value in pairs if name.endswith("-bin"))
    if size > HEADER_LIST_BYTES_MAX or parts > BINARY_PARTS_MAX:
        return ("status", int(Status.RESOURCE_EXHAUSTED))
    if is_malformed(pairs):
        return ("reset", 1)
    timeout: int | None = None
    encoding, content_bytes, metadata = "", -1, []
    for name, value in pairs:
        if name == "content-length":
            if not re.fullmatch("[0-9]{1,18}", value):
                return ("reset", 1)
            content_bytes = int(value)
        elif name == "grpc-timeout":
            if not re.fullmatch("[0-9]{1,8}[HMSmun]", value):
                return ("status", int(Status.INTERNAL))
            units = {"H": 3600e9, "M": 60e9, "S": 1e9, "m": 1e6, "u": 1e3, "n": 1}
            timeout = int(value[:-1]) * int(units[value[-1]])
        elif name == "grpc-encoding":
            encoding = value
        elif name.endswith("-bin"):
            for part in value.split(","):
                raw = decode_base64(part)
                if raw is None:
                    return ("status", int(Status.INTERNAL))
                metadata.append((name, raw))
        elif not (name.startswith((":", "grpc-")) or name in ("te", "user-agent", "content-type")):
            metadata.append((name, value))
    values = dict(pairs)
    content_type = values.get("content-type", "")
    if values[":method"] != "POST" or not (content_type + ";").startswith(
        ("application/grpc;", "application/grpc+")
    ):
        return ("status", int(Status.INTERNAL))
    return ("call", values[":path"], timeout, encoding, tuple(metadata), content_bytes)


def is_malformed(pairs: list[tuple[str, str]]) -> bool:
    names = [name for name, _ in pairs]
    pseudo = [name for name in names if name.startswith(":")]
    if names[: len(pseudo)] != pseudo or len(set(pseudo)) < len(pseudo):
        return True
    if set(pseudo) - {":method", ":scheme", ":path", ":authority"}:
        return True
    values = dict(pairs)
    if not all(values.get(name) for name in (":method", ":scheme", ":path")):
        return True
    for name, value in pairs:
        if set(value) & set("\0\r\n"):
            return True
        if name.startswith(":"):
            continue
        if not name or set(name) - set("!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyz"):
            return True
        if name in {"connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade"}:
            return True
        if name == "te" and value != "trailers":
            return True
    return False


def decode_base64(text: str) -> bytes | None:
    """Decoded base64, with or without padding; None if it is invalid."""
    match = re.fullmatch(r"([A-Za-z0-9+/]*)(={0,2})", text.strip())
    if match is None or len(match[1]) % 4 == 1:
        return None
    padding = -len(match[1]) % 4
    if match[2] and len(match[2]) != padding:
        return None
    return binascii.a2b_base64(match[1] + "=" * padding)


def representation(random: Random) -> bytes:
    """A random header field representation."""
    kind = random.randrange(8)
    if kind == 0:
        return integer_of(
            random, random.choice((0, 100, 4096, 4097, random.getrandbits(20))), 5, 32
        )
    if kind < 3:
        return integer_of(random, random.choice((random.randrange(1, 80), 0, 1 << 20)), 7, 0x80)
    first, bits = random.choice(((0x40, 6), (0x00, 4), (0x10, 4)))
    index = random.choice((0, 0, random.randrange(1, 70)))
    texts = [random.choice(VALUES).encode("latin-1")]
    if not index:
        texts.insert(0, random.choice(NAMES).encode("latin-1"))
    return integer_of(random, index, bits, first) + b"".join(
        literal(random, each) for each in texts
    )


def literal(random: Random, text: bytes) -> bytes:
    if random.randrange(3):
        return integer_of(random, len(text), 7, 0) + text
    coded = CODER.encode(text)
    if not random.randrange(6):
        coded = mutation.flip(coded, coded, random)
    return integer_of(random, len(coded), 7, 0x80) + coded


def integer_of(random: Random, value: int, bits: int, first: int) -> bytes:
    """An integer; some have more bytes than needed."""
    raw = bytearray(hpack.hpack.encode_integer(value, bits))
    raw[0] |= first
    if len(raw) > 1 and not random.randrange(8):
        raw[-1] |= 0x80
        raw += b"\x80" * random.randrange(6) + b"\0"
    return bytes(raw)


def join(blocks: list[bytes]) -> bytes:
    return b"".join(len(block).to_bytes(2) + block for block in blocks if len(block) < 65_536)


def split(raw: bytes) -> list[bytes]:
    blocks, at = [], 0
    while at + 2 <= len(raw):
        length = int.from_bytes(raw[at : at + 2])
        blocks.append(raw[at + 2 : at + 2 + length])
        at += 2 + length
    return blocks


CODER: Any = hpack.Encoder().huffman_coder
