"""Framing of HTTP/1.1 requests: cuts input into pieces that all parsers read alike.

h11 limits only incomplete heads, and accepts bare LF, folded lines and repeated lengths. A proxy
that reads them differently would see other requests (request smuggling), so these are rejected
before h11 gets them.

Pure. Source: RFC 9112.
"""

from __future__ import annotations

import http
import re
from enum import Enum, auto
from typing import Final

HEAD_BYTES_MAX: Final = 16_384
FIELDS_MAX: Final = 128
"""Lines of a head or of chunked trailers: each costs some microseconds."""
CHUNK_LINE_BYTES_MAX: Final = 4096
EXTENSION_BYTES_MAX: Final = 16_384
"""Of all chunks of a body: extensions are ignored, and cost as much as the body."""
PIECE_CHUNKS: Final = 8
"""Chunks in one piece: the connection reads the clock after each piece."""

_LENGTH: Final = b"\r\ncontent-length:"
_CHUNK_LINE: Final = re.compile(rb"([0-9a-fA-F]{1,16})(?:;[\t\x20-\x7e\x80-\xff]*)?")
_FIRST_PRINTABLE: Final = 0x21


class MalformedRequest(Exception):
    """Input that is no request, or that others may read as another request.

    Attributes:
        problem: What is wrong with the framing; empty if h11 rejected the input.
        status: Status of the response.
    """

    def __init__(self, problem: str, status: http.HTTPStatus = http.HTTPStatus.BAD_REQUEST) -> None:
        super().__init__(problem)
        self.problem = problem
        self.status = status


class _Part(Enum):
    """Part of a request to which the next byte belongs."""

    HEAD = auto()
    BODY = auto()
    CHUNKS = auto()
    TRAILERS = auto()


class Framing:
    """Input that h11 has not parsed yet; its length is that of the bytes."""

    __slots__ = ("_data", "_extension_bytes", "_left", "_part")

    def __init__(self) -> None:
        self._data = bytearray()
        self._part = _Part.HEAD
        self._left = 0  # Bytes until the end of the body, or of the chunk with its CRLF.
        self._extension_bytes = 0

    def __len__(self) -> int:
        return len(self._data)

    def add(self, data: bytes) -> None:
        """Append received bytes."""
        self._data += data

    def expect_head(self) -> None:
        """Cut the next input as the head of a request."""
        self._part = _Part.HEAD

    def expect_body(self, length: int) -> None:
        """Cut the next input as a body of that many bytes."""
        self._part = _Part.BODY
        self._left = length

    def expect_chunks(self) -> None:
        """Cut the next input as a chunked body."""
        self._part = _Part.CHUNKS
        self._left = self._extension_bytes = 0

    def take(self) -> bytearray | None:
        """Return the next piece: a head, part of a body, or trailers; None if more input is needed.

        Raises:
            MalformedRequest: The input is rejected; further calls raise it again.
        """
        data = self._data
        if not data:
            return None
        if self._part is _Part.BODY:
            end = min(self._left, len(data))
            self._left -= end
        elif self._part is _Part.CHUNKS:
            end = self._end_of_chunks()
        else:
            end = self._end_of_lines()
        if not end:
            return None
        if end == len(data):
            self._data = bytearray()
            return data
        piece = data[:end]
        del data[:end]
        return piece

    def _end_of_lines(self) -> int:
        """Return the end of the head or trailers; 0 if they are incomplete."""
        data = self._data
        if self._part is _Part.TRAILERS and data.startswith(b"\r\n"):
            return 2  # No trailers: the lines behind are those of the next request.
        if self._part is _Part.HEAD and data[0] < _FIRST_PRINTABLE:  # Such as TLS.
            raise MalformedRequest("request begins with a control character or a space")
        end = data.find(b"\r\n\r\n", 0, HEAD_BYTES_MAX)
        if end < 0 and len(data) > HEAD_BYTES_MAX:
            raise MalformedRequest(f"head of more than {HEAD_BYTES_MAX} bytes")
        stop = HEAD_BYTES_MAX if end < 0 else end
        lines = data.count(b"\r\n", 0, stop)
        if lines > FIELDS_MAX:
            raise MalformedRequest(f"more than {FIELDS_MAX} header lines")
        is_cut = end < 0 and data.endswith(b"\r")
        if not data.count(b"\n", 0, stop) == lines == data.count(b"\r", 0, stop) - is_cut:
            raise MalformedRequest("CR or LF alone; lines end with CRLF")
        if data.find(b"\r\n ", 0, stop) >= 0 or data.find(b"\r\n\t", 0, stop) >= 0:
            raise MalformedRequest("folded header line (obs-fold)")
        if end < 0:
            return 0
        _require_one_length(b"\r\n" + data[: end + 2].lower())
        return end + 4

    def _end_of_chunks(self) -> int:
        """Return the end of the complete chunks, at most `PIECE_CHUNKS`, and of the begun one."""
        data, end = self._data, 0
        for _ in range(PIECE_CHUNKS):
            step = min(self._left, len(data) - end)
            end += step
            self._left -= step
            if end == len(data):
                break
            line_end = data.find(b"\r\n", end, end + CHUNK_LINE_BYTES_MAX)
            if line_end < 0:
                if len(data) - end > CHUNK_LINE_BYTES_MAX:
                    raise MalformedRequest(f"chunk line of more than {CHUNK_LINE_BYTES_MAX} bytes")
                break
            size = self._chunk_size(data[end:line_end])
            end = line_end + 2
            if not size:
                self._part = _Part.TRAILERS
                break
            self._left = size + 2
        return end

    def _chunk_size(self, line: bytearray) -> int:
        match = _CHUNK_LINE.fullmatch(line)
        if match is None:
            raise MalformedRequest("chunk size with other characters than hex digits")
        digits = match[1]
        self._extension_bytes += len(line) - len(digits)
        if self._extension_bytes > EXTENSION_BYTES_MAX:
            raise MalformedRequest(f"chunk extensions of more than {EXTENSION_BYTES_MAX} bytes")
        return int(digits, 16)


def _require_one_length(lines: bytes) -> None:
    """Reject a repeated Content-Length, also of equal values, and a list as its value.

    Args:
        lines: The lines in lower case, with CRLF before the first and after the last.
    """
    count = lines.count(_LENGTH)
    if count:
        start = lines.find(_LENGTH) + len(_LENGTH)
        value = lines[start : lines.find(b"\r\n", start)]
        if count > 1 or not value.strip(b" \t").isdigit():
            raise MalformedRequest("Content-Length is repeated, or not a number")
