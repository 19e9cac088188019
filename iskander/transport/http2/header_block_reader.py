"""Header blocks of one connection: assembly from frames, HPACK decoding, and its bounds.

`hpack` decodes the blocks. It accepts any number of table size updates, integers of any length and
literals of any number, so the representations of a block are counted first, without decoding them.

Runs on: gateway loop. Source: RFC 7541, sections 4.2, 5 and 6.
"""

from __future__ import annotations

from typing import Any, Final

import hpack

from iskander.transport.http2 import frames
from iskander.transport.http2.frames import Code, ConnectionBroken
from iskander.transport.http2.request_headers import RequestHead, read_request

EXPANDED_BYTES_MAX: Final = 65_536
BLOCK_BYTES_MAX: Final = 65_536
"""Beyond gRPC's own limit and below this, it is the call that ends and not the connection."""
FIELDS_MAX: Final = 1024
TABLE_UPDATES_MAX: Final = 2
"""Of one block: the smallest size in between, and the last one. Source: RFC 7541, section 4.2."""
INTEGER_BYTES_MAX: Final = 5
"""After the prefix; a value of 35 bits."""
HUFFMAN_BYTES_MAX: Final = 24_576
"""Of one block; gRPC's limit of 16 KiB in the longest codes that text needs. 24 KiB take 6 ms."""
REMEMBERED_MAX: Final = 16
REMEMBERED_BYTES_MAX: Final = 256
"""Blocks kept with their fields: a client's calls mostly begin with the same bytes."""


class Fields:
    """The fields of a decoded header block.

    Attributes:
        pairs: Names and values, in their order.
        cost_bytes: Work of decoding it, as a number of plain bytes.
    """

    __slots__ = ("_request", "cost_bytes", "pairs")

    def __init__(self, pairs: list[tuple[str, str]], cost_bytes: int) -> None:
        self.pairs = pairs
        self.cost_bytes = cost_bytes
        self._request: RequestHead | None = None

    @property
    def path(self) -> str:
        """`/SERVICE/METHOD`; empty where there is none."""
        return dict(self.pairs).get(":path", "")

    def request(self) -> RequestHead:
        """As `read_request`, which reads a repeated block once."""
        if self._request is None:
            self._request = read_request(self.pairs)
        return self._request


class HeaderBlockReader:
    """Assembles and decodes the header blocks of one connection.

    Attributes:
        is_open: A block has begun and not ended; no other frame may come meanwhile.
    """

    def __init__(self) -> None:
        self._decoder = hpack.Decoder(max_header_list_size=EXPANDED_BYTES_MAX)
        self._known: dict[bytes, Fields] = {}
        self._block = b""
        self._more = bytearray()
        self._stream_id = 0
        self._is_last = False
        self.is_open = False

    def begin(self, stream_id: int, flags: int, payload: memoryview) -> None:
        """Take a HEADERS frame."""
        self._block = frames.unpadded(payload, flags).tobytes()
        self._stream_id = stream_id
        self._is_last = bool(flags & frames.END_STREAM)
        self.is_open = True

    def go_on(self, stream_id: int, payload: memoryview) -> None:
        """Take a CONTINUATION frame.

        Raises:
            ConnectionBroken: No block is open for that stream, or it is too long.
        """
        if not self.is_open or stream_id != self._stream_id:
            raise ConnectionBroken(Code.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        self._more += payload
        if len(self._block) + len(self._more) > BLOCK_BYTES_MAX:
            raise ConnectionBroken(
                Code.ENHANCE_YOUR_CALM, f"a header block of more than {BLOCK_BYTES_MAX} bytes"
            )

    def end(self) -> tuple[int, bool, Fields]:
        """Decode the complete block; return its stream, whether that has no input, its fields.

        Raises:
            ConnectionBroken: It cannot be decoded, and so none after it can.
        """
        self.is_open = False
        block, self._block = self._block, b""
        if self._more:
            block += self._more
            self._more = bytearray()
        fields = self._known.get(block)
        if fields is None:
            fields = self._decode(block)
        return self._stream_id, self._is_last, fields

    def _decode(self, block: bytes) -> Fields:
        """Decode a block; remember it until the table that its meaning depends on changes."""
        cost_bytes = scan(block)
        table = self._decoder.header_table
        entries, size = table.dynamic_entries, table.maxsize
        newest, count = next(iter(entries), None), len(entries)
        try:
            decoded: Any = self._decoder.decode(block, raw=True)
        except hpack.OversizedHeaderListError as error:
            raise ConnectionBroken(Code.ENHANCE_YOUR_CALM, str(error)) from None
        except hpack.HPACKError:
            # Its own text may have an address of memory.
            raise ConnectionBroken(Code.COMPRESSION_ERROR, "invalid header block") from None
        fields = Fields([(_text(name), _text(value)) for name, value in decoded], cost_bytes)
        is_new = next(iter(entries), None) is not newest
        if is_new or len(entries) != count or table.maxsize != size:
            self._known.clear()
        elif len(block) <= REMEMBERED_BYTES_MAX:
            if len(self._known) >= REMEMBERED_MAX:
                self._known.clear()
            self._known[block] = fields
        return fields


FIELD_COST_BYTES: Final = 32
"""Of each field beside its bytes."""
HUFFMAN_COST: Final = 8
"""Of a Huffman-coded byte, compared with a plain one."""


def scan(block: bytes) -> int:
    """Check the bounds of a block before it is decoded; return its cost in plain bytes.

    A block that is cut off is left to the decoder, which says so.

    Raises:
        ConnectionBroken: It has too many fields, Huffman-coded bytes or table size updates, or an
            integer that is too long.
    """
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
                    break
                is_huffman = block[at] & 0x80
                length, at = _integer(block, at, 0x7F)
                if is_huffman:
                    huffman += length
                at += length
        if fields > FIELDS_MAX:
            raise ConnectionBroken(
                Code.ENHANCE_YOUR_CALM, f"a header block of more than {FIELDS_MAX} fields"
            )
        if updates > TABLE_UPDATES_MAX:
            raise ConnectionBroken(
                Code.COMPRESSION_ERROR,
                f"a header block of more than {TABLE_UPDATES_MAX} table size updates",
            )
        if huffman > HUFFMAN_BYTES_MAX:
            raise ConnectionBroken(
                Code.ENHANCE_YOUR_CALM,
                f"a header block of more than {HUFFMAN_BYTES_MAX} Huffman-coded bytes",
            )
    return end + FIELD_COST_BYTES * fields + HUFFMAN_COST * huffman


def _integer(block: bytes, at: int, mask: int) -> tuple[int, int]:
    """Read an integer with a prefix of the bits of `mask`; return it and where the next begins."""
    value = block[at] & mask
    at += 1
    if value < mask:
        return value, at
    shift = 0
    for _ in range(INTEGER_BYTES_MAX):
        if at >= len(block):
            return value, at
        byte = block[at]
        at += 1
        value += (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ConnectionBroken(Code.COMPRESSION_ERROR, "an integer of a header block is too long")


def _text(raw: bytes) -> str:
    """A header's text. Any bytes are accepted: the table must stay right for the other calls."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("latin-1")
