"""Compressed messages: small ones are expanded at once, the others by a thread.

A few kilobytes may be seventy megabytes and a fifth of a second; in pieces, since what a message
comes to is known at its end only, and so that nobody waits for the interpreter meanwhile.

Runs on: gateway loop, and threads of its own.
"""

from __future__ import annotations

import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from iskander.gateway.http2 import headers
from iskander.gateway.http2.status import RpcError, Status

if TYPE_CHECKING:
    from iskander.gateway.http2.call import Message

AT_ONCE_BYTES: Final = 32_768
"""Of an expanded message: a tenth of a millisecond."""
READ_BYTES: Final = 65_536
PIECE_BYTES: Final = 262_144
THREADS: Final = ThreadPoolExecutor(2, "inflate")
"""Few: whoever sends bombs waits for their own, and not the batches that a thread reads."""
_WINDOW_BITS: Final = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


def begin(raw: Message, encoding: str, bytes_max: int) -> Message | RpcError | Inflation:
    """Expand a message where that is done in no time.

    Returns:
        The message; what is wrong with it; or what a thread has to finish.
    """
    try:
        inflation = Inflation(raw, encoding, bytes_max)
        return inflation.whole() if inflation.begin() else inflation
    except RpcError as error:
        return error


class Compressed(NamedTuple):
    """A message that is expanded when it is read: one at a time, however small many are."""

    raw: bytes | memoryview


class Inflation:
    """One message on its way.

    Args:
        raw: Compressed.
        encoding: By what.
        bytes_max: The largest that is taken.

    Raises:
        RpcError: There is no such encoding.
    """

    def __init__(self, raw: Message, encoding: str, bytes_max: int) -> None:
        bits = _WINDOW_BITS.get(encoding)
        if bits is None:
            raise RpcError(
                Status.UNIMPLEMENTED,
                f"a message is compressed with `{encoding}`; {headers.ACCEPTED_ENCODINGS} "
                "are understood",
            )
        self._inflater = zlib.decompressobj(bits)
        self._raw = memoryview(raw)
        self._at = 0
        self._bytes_max = bytes_max
        self._pieces: list[bytes] = []
        self._size = 0

    def begin(self) -> bool:
        """Expand what is expanded in no time; whether that is all.

        Raises:
            RpcError: It is too large, or broken.
        """
        while self._size < AT_ONCE_BYTES and self._at <= READ_BYTES:
            if self._step(AT_ONCE_BYTES):
                return True
        return False

    def finish(self) -> Message | RpcError:
        """Expand the rest, and give the whole, or what is wrong with it."""
        try:
            while not self._step(PIECE_BYTES):
                pass
            return self.whole()
        except RpcError as error:
            return error
        except MemoryError:
            return RpcError(Status.UNAVAILABLE, "there is no memory to expand a message")

    def whole(self) -> Message:
        """The expanded message."""
        pieces = self._pieces
        if len(pieces) == 1:
            return pieces[0]
        whole, at = np.empty(self._size, np.uint8).data, 0
        pieces.reverse()
        while pieces:
            piece = pieces.pop()
            whole[at : at + len(piece)] = piece
            at += len(piece)
        return whole

    def _step(self, most: int) -> bool:
        """Expand at most so many bytes more; whether it has ended."""
        inflater = self._inflater
        raw: Message = inflater.unconsumed_tail
        if not raw:
            raw = self._raw[self._at : self._at + READ_BYTES]
            self._at += READ_BYTES
        try:
            piece = inflater.decompress(raw, most)
        except zlib.error:
            raise RpcError(Status.INTERNAL, "a compressed message is broken") from None
        self._pieces.append(piece)
        self._size += len(piece)
        if self._size > self._bytes_max:
            raise RpcError(
                Status.RESOURCE_EXHAUSTED,
                f"a message may have {self._bytes_max} bytes once it is expanded",
            )
        is_behind = bool(inflater.unused_data) or self._at < len(self._raw)
        if is_behind if inflater.eof else not (raw or piece):
            raise RpcError(Status.INTERNAL, "a compressed message does not end where it ends")
        return inflater.eof
