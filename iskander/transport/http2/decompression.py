"""Compressed messages: small ones are expanded at once, the others by a thread.

A few kilobytes may be seventy megabytes and a fifth of a second. What a message expands to is
bounded before: gzip declares it, at the end, and a message of zlib's form may be as large as any. A
thread writes it in pieces into memory that was charged to the receive budget.

Runs on: gateway loop, and threads of its own. Source: RFC 1950, RFC 1952.
"""

from __future__ import annotations

import os
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from iskander.errors import detach
from iskander.transport.http2 import response_headers as headers
from iskander.transport.http2.status import RpcError, Status

if TYPE_CHECKING:
    from iskander.transport.http2.call import Message

AT_ONCE_BYTES: Final = 32_768
"""Of an expanded message: a tenth of a millisecond."""
READ_BYTES: Final = 65_536
PIECE_BYTES: Final = 262_144
NICENESS: Final = 10
"""Of the threads: the loop and the workers have the processor first."""
GZIP_BYTES_MIN: Final = 18
"""A header, and a trailer that ends with the size of what was compressed."""
_ISIZE_BYTES: Final = 4
_WINDOW_BITS: Final = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


def _lower_priority() -> None:
    """Lower the priority of this thread. Source: setpriority(2), C library/kernel differences."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


THREADS: Final = ThreadPoolExecutor(2, "inflate", _lower_priority)
"""Few: whoever sends bombs waits for their own, and not the batches that a thread reads."""


def begin(raw: Message, encoding: str, bytes_max: int) -> Message | RpcError | Inflation:
    """Expand a message where that is done in no time.

    Returns:
        The message; what is wrong with it; or what a thread has to finish.
    """
    try:
        inflation = Inflation(raw, encoding, bytes_max)
        return inflation.whole() if inflation.begin() else inflation
    except RpcError as error:
        return detach(error)


class Compressed(NamedTuple):
    """A message that is expanded when it is read: one at a time, however small many are."""

    raw: bytes | memoryview


class Inflation:
    """One message that is being expanded.

    Args:
        raw: Compressed.
        encoding: By what.
        bytes_max: The largest that is taken.

    Attributes:
        bytes_most: What it may expand to.

    Raises:
        RpcError: There is no such encoding.
    """

    def __init__(self, raw: Message, encoding: str, bytes_max: int) -> None:
        bits = _WINDOW_BITS.get(encoding)
        if encoding in ("", "identity"):
            raise RpcError(Status.INTERNAL, "a message is compressed, and grpc-encoding is not set")
        if bits is None:
            raise RpcError(
                Status.UNIMPLEMENTED,
                f"a message is compressed with `{encoding}`; {headers.ACCEPTED_ENCODINGS} "
                "are understood",
            )
        self._inflater = zlib.decompressobj(bits)
        self._raw = memoryview(raw)
        self._at = 0
        self._bytes_max = self.bytes_most = bytes_max
        self._size = self._declared = 0
        self._pieces: list[bytes] = []
        if encoding == "gzip" and len(raw) >= GZIP_BYTES_MIN:
            self._declared = int.from_bytes(raw[-_ISIZE_BYTES:], "little")
            self.bytes_most = min(self._declared, bytes_max)

    def begin(self) -> bool:
        """Expand what is expanded in no time; return whether that is all.

        Raises:
            RpcError: It is too large, or broken.
        """
        while self._size < AT_ONCE_BYTES and self._at <= READ_BYTES:
            piece = self._step(AT_ONCE_BYTES)
            self._pieces.append(piece)
            if self._inflater.eof:
                return True
        if self._declared > self._bytes_max:
            raise RpcError(
                Status.RESOURCE_EXHAUSTED,
                f"a compressed message declares {self._declared} bytes; a message may have "
                f"{self._bytes_max} once it is expanded",
            )
        return False

    def whole(self) -> Message:
        """The message that `begin` has expanded."""
        return b"".join(self._pieces)

    def finish(self, target: np.ndarray) -> Message | RpcError:
        """Expand the rest into memory of `bytes_most` bytes; return the message or its error.

        Runs on: a thread.
        """
        try:
            view, at = target.data, 0
            for piece in self._pieces:
                view[at : at + len(piece)] = piece
                at += len(piece)
            self._pieces.clear()
            while not self._inflater.eof:
                piece = self._step(PIECE_BYTES)
                view[at : at + len(piece)] = piece
                at += len(piece)
            return view[:at]
        except RpcError as error:
            return detach(error)
        except MemoryError:
            return RpcError(Status.UNAVAILABLE, "there is no memory to expand a message")

    def _step(self, most: int) -> bytes:
        """Expand at most so many bytes more."""
        inflater = self._inflater
        raw: Message = inflater.unconsumed_tail
        if not raw:
            raw = self._raw[self._at : self._at + READ_BYTES]
            self._at += READ_BYTES
        try:
            piece = inflater.decompress(raw, min(most, self.bytes_most - self._size + 1))
        except zlib.error:
            raise RpcError(Status.INTERNAL, "a compressed message is broken") from None
        self._size += len(piece)
        if self._size > self._bytes_max:
            raise RpcError(
                Status.RESOURCE_EXHAUSTED,
                f"a message may have {self._bytes_max} bytes once it is expanded",
            )
        if self._size > self.bytes_most:
            raise RpcError(Status.INTERNAL, "a compressed message is larger than it declares")
        is_behind = bool(inflater.unused_data) or self._at < len(self._raw)
        if is_behind if inflater.eof else not (raw or piece):
            raise RpcError(Status.INTERNAL, "a compressed message does not end where it ends")
        return piece
