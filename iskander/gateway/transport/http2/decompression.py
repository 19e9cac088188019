"""Decompression of messages: small ones inline, large ones in a thread pool.

70 kB may expand to 70 MB and cost 200 ms. The size of the result is limited in advance:
gzip declares it at its end; a zlib message is assumed to have the largest size allowed. A thread
writes the result in pieces into memory that is charged to the receive budget.

Runs on: gateway loop, and threads of its own. Source: RFC 1950, RFC 1952.
"""

from __future__ import annotations

import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from iskander.errors import detach
from iskander.gateway.transport.http2 import response_headers as headers
from iskander.gateway.transport.http2.status import RpcError, Status

if TYPE_CHECKING:
    from iskander.gateway.transport.http2.call import Message

INLINE_BYTES_MAX: Final = 32_768
"""Limit on a result that is decompressed on the event loop: a tenth of a millisecond."""
READ_BYTES: Final = 65_536
"""Compressed bytes per step."""
PIECE_BYTES: Final = 262_144
"""Decompressed bytes per step of a thread."""
GZIP_BYTES_MIN: Final = 18
"""A header, and a trailer that ends with the uncompressed size."""
_WINDOW_BITS: Final = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}

THREADS_MAX: Final = 2
THREADS: Final = ThreadPoolExecutor(min(THREADS_MAX, max((os.cpu_count() or 1) // 2, 1)), "inflate")
"""Few threads: decompression bombs delay each other and take little time from other threads.

They have the priority of the event loop: one of a lower priority waits for a processor while it
holds the interpreter lock, or while the loop passes the lock to it, and the loop waits as long.
"""


def start(raw: Message, encoding: str, bytes_max: int) -> Message | RpcError | Decompressor:
    """Decompress a small message; return it, its error, or the `Decompressor` of a large one."""
    try:
        decompressor = Decompressor(raw, encoding, bytes_max)
        message = decompressor.start()
        return decompressor if message is None else message
    except RpcError as error:
        return detach(error)


class Compressed(NamedTuple):
    """A received message that is decompressed when it is read."""

    raw: bytes | memoryview


class Decompressor:
    """Decompression of one message to at most `output_bytes_max`; raises `RpcError`."""

    def __init__(self, raw: Message, encoding: str, bytes_max: int) -> None:
        bits = _WINDOW_BITS.get(encoding)
        if encoding in ("", "identity"):
            raise RpcError(Status.INTERNAL, "compressed message without a grpc-encoding header")
        if bits is None:
            message = f"unsupported grpc-encoding `{encoding}`, not in {headers.ACCEPTED_ENCODINGS}"
            raise RpcError(Status.UNIMPLEMENTED, message)
        self._inflater = zlib.decompressobj(bits)
        self._raw = memoryview(raw)
        self._at = 0
        self._bytes_max = self.output_bytes_max = bytes_max
        self._size = self._declared = 0
        self._pieces: list[bytes] = []
        if encoding == "gzip" and len(raw) >= GZIP_BYTES_MIN:
            self._declared = int.from_bytes(raw[-4:], "little")
            self.output_bytes_max = min(self._declared, bytes_max)

    def start(self) -> Message | None:
        """Decompress at most `INLINE_BYTES_MAX`; return the message if it is complete."""
        while self._size < INLINE_BYTES_MAX and self._at <= READ_BYTES:
            self._pieces.append(self._step(INLINE_BYTES_MAX))
            if self._inflater.eof:
                return b"".join(self._pieces)
        if self._declared > self._bytes_max:
            size = f"declares {self._declared:,} bytes, limit {self._bytes_max:,}"
            raise RpcError(Status.RESOURCE_EXHAUSTED, f"compressed message {size}")
        return None

    def finish(self, target: np.ndarray) -> Message | RpcError:
        """Decompress the rest into memory of `output_bytes_max`; return the message or its error.

        Runs on: a thread.
        """
        try:
            at = 0
            while self._pieces or not self._inflater.eof:
                piece = self._pieces.pop(0) if self._pieces else self._step(PIECE_BYTES)
                # numpy copies without the interpreter lock, which the event loop needs.
                target[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
                at += len(piece)
            return target.data[:at]
        except RpcError as error:
            return detach(error)
        except MemoryError:
            return RpcError(Status.UNAVAILABLE, "out of memory while decompressing a message")

    def _step(self, bytes_max: int) -> bytes:
        """Decompress the next bytes, at most `bytes_max`, and check the limits."""
        inflater = self._inflater
        raw: Message = inflater.unconsumed_tail
        if not raw:
            raw = self._raw[self._at : self._at + READ_BYTES]
            self._at += READ_BYTES
        try:
            left = self.output_bytes_max - self._size + 1
            piece = inflater.decompress(raw, min(bytes_max, left))
        except zlib.error:
            raise RpcError(Status.INTERNAL, "invalid compressed message") from None
        self._size += len(piece)
        if self._size > self._bytes_max:
            message = f"decompressed message too large: limit {self._bytes_max:,} bytes"
            raise RpcError(Status.RESOURCE_EXHAUSTED, message)
        if self._size > self.output_bytes_max:
            raise RpcError(Status.INTERNAL, "compressed message larger than its declared size")
        has_more = bool(inflater.unused_data) or self._at < len(self._raw)
        if has_more if inflater.eof else not (raw or piece):
            raise RpcError(Status.INTERNAL, "compressed message truncated or with excess data")
        return piece
