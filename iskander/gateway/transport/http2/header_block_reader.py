"""Request header blocks of one connection: assembly from frames, HPACK decoding, limits.

`hpack` does not limit table size updates, the length of integers or the number of literals, so each
block is scanned before it is decoded. All errors are `ConnectionBroken`: after one, the dynamic
table is not valid for later blocks.

Runs on: gateway loop. Source: RFC 7541, sections 4.2, 5 and 6.
"""

from __future__ import annotations

from typing import Any, Final

import hpack

from iskander.gateway.transport.http2 import frames
from iskander.gateway.transport.http2.frames import ConnectionBroken, ErrorCode
from iskander.gateway.transport.http2.request_headers import RequestHeaders, read_request

EXPANDED_BYTES_MAX: Final = 65_536
BLOCK_BYTES_MAX: Final = 65_536
"""Between gRPC's own limit and this one, only the call fails; above it, the connection."""
FIELDS_MAX: Final = 1024
TABLE_UPDATES_MAX: Final = 2
"""Per block: the smallest size in between, and the last one. Source: RFC 7541, section 4.2."""
INTEGER_BYTES_MAX: Final = 5
"""After the prefix; a value of 35 bits."""
HUFFMAN_BYTES_MAX: Final = 24_576
"""Per block: gRPC's limit of 16 KiB in the longest codes of text. 24 KiB cost 6 ms."""
CACHED_BLOCKS_MAX: Final = 16
CACHED_BLOCK_BYTES_MAX: Final = 256
"""Limits of the cache of decoded blocks: most calls of a client start with the same bytes."""
FIELD_COST_BYTES: Final = 32
"""Decoding cost of a field in addition to its bytes."""
HUFFMAN_COST: Final = 8
"""Decoding cost of a Huffman-coded byte, in plain bytes."""


class Fields:
    """The fields of a decoded header block, and its decoding cost in plain bytes."""

    def __init__(self, pairs: list[tuple[str, str]], cost_bytes: int) -> None:
        self.pairs = pairs
        self.cost_bytes = cost_bytes
        self._request: RequestHeaders | None = None

    @property
    def path(self) -> str:
        """`/SERVICE/METHOD`; empty if missing."""
        return dict(self.pairs).get(":path", "")

    def request(self) -> RequestHeaders:
        """Return the result of `read_request`, cached unless it is an error."""
        if self._request is None:
            self._request = read_request(self.pairs)
        return self._request


class HeaderBlockReader:
    """Assembles and decodes the header blocks of one connection."""

    def __init__(self) -> None:
        self._decoder = hpack.Decoder(max_header_list_size=EXPANDED_BYTES_MAX)
        self._cache: dict[bytes, Fields] = {}
        self._block = b""
        self._more = bytearray()
        self._stream_id = 0
        self._is_last = False
        self.is_open = False  # A block is incomplete; only a CONTINUATION frame may follow.

    def on_headers(self, stream_id: int, flags: int, payload: memoryview) -> None:
        """Start a block with the payload of a HEADERS frame."""
        self._block = frames.unpadded(payload, flags).tobytes()
        self._stream_id = stream_id
        self._is_last = bool(flags & frames.END_STREAM)
        self.is_open = True

    def on_continuation(self, stream_id: int, payload: memoryview) -> None:
        """Append the payload of a CONTINUATION frame."""
        if not self.is_open or stream_id != self._stream_id:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        self._more += payload
        if len(self._block) + len(self._more) > BLOCK_BYTES_MAX:
            message = f"header block of more than {BLOCK_BYTES_MAX} bytes"
            raise ConnectionBroken(ErrorCode.ENHANCE_YOUR_CALM, message)

    def end(self) -> tuple[int, bool, Fields]:
        """Decode the complete block; return its stream, whether END_STREAM is set, its fields."""
        self.is_open = False
        block, self._block = self._block, b""
        if self._more:
            block += self._more
            self._more = bytearray()
        return self._stream_id, self._is_last, self._cache.get(block) or self._decode(block)

    def _decode(self, block: bytes) -> Fields:
        """Decode a block and cache it; a change of the dynamic table invalidates the cache."""
        cost_bytes = scan(block)
        table = self._decoder.header_table
        entries, size = table.dynamic_entries, table.maxsize
        newest, count = next(iter(entries), None), len(entries)
        try:
            decoded: Any = self._decoder.decode(block, raw=True)
        except hpack.OversizedHeaderListError as error:
            raise ConnectionBroken(ErrorCode.ENHANCE_YOUR_CALM, str(error)) from None
        except hpack.HPACKError:
            # The text of the error may contain a memory address.
            raise ConnectionBroken(ErrorCode.COMPRESSION_ERROR, "invalid header block") from None
        fields = Fields([(_text(name), _text(value)) for name, value in decoded], cost_bytes)
        is_new = next(iter(entries), None) is not newest
        if is_new or len(entries) != count or table.maxsize != size:
            self._cache.clear()
        elif len(block) <= CACHED_BLOCK_BYTES_MAX:
            if len(self._cache) >= CACHED_BLOCKS_MAX:
                self._cache.clear()
            self._cache[block] = fields
        return fields


def scan(block: bytes) -> int:
    """Check the limits of a block before it is decoded; return its decoding cost in plain bytes."""
    at, end = 0, len(block)
    fields = updates = huffman = 0
    while at < end:
        first = block[at]
        if first & 0x80:
            _, at = _integer(block, at, 0x7F)
            fields += 1
        elif first & 0xE0 == 0x20:
            _, at = _integer(block, at, 0x1F)
            updates += 1
        else:
            index, at = _integer(block, at, 0x3F if first & 0x40 else 0x0F)
            fields += 1
            for _ in range(1 if index else 2):
                if at >= end:
                    break  # Truncated: the decoder reports it.
                is_huffman = block[at] & 0x80
                length, at = _integer(block, at, 0x7F)
                if is_huffman:
                    huffman += length
                at += length
        if fields > FIELDS_MAX:
            message = f"header block of more than {FIELDS_MAX} fields"
            raise ConnectionBroken(ErrorCode.ENHANCE_YOUR_CALM, message)
        if updates > TABLE_UPDATES_MAX:
            message = f"header block of more than {TABLE_UPDATES_MAX} table size updates"
            raise ConnectionBroken(ErrorCode.COMPRESSION_ERROR, message)
        if huffman > HUFFMAN_BYTES_MAX:
            message = f"header block of more than {HUFFMAN_BYTES_MAX} Huffman-coded bytes"
            raise ConnectionBroken(ErrorCode.ENHANCE_YOUR_CALM, message)
    return end + FIELD_COST_BYTES * fields + HUFFMAN_COST * huffman


def _integer(block: bytes, at: int, mask: int) -> tuple[int, int]:
    """Read an integer with the prefix bits of `mask`; return it and the next position."""
    value = block[at] & mask
    at += 1
    if value < mask:
        return value, at
    for shift in range(0, 7 * INTEGER_BYTES_MAX, 7):
        if at >= len(block):
            return value, at
        byte = block[at]
        at += 1
        value += (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ConnectionBroken(ErrorCode.COMPRESSION_ERROR, "integer too long in a header block")


def _text(raw: bytes) -> str:
    """Decode as UTF-8, or else as Latin-1: an error would end the connection."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("latin-1")
