"""Bodies over HTTP: read within their limits and the receive budget, expanded, and compressed.

A body is charged to the budget of received bytes as it comes; a large one whose length is known
reserves its memory first. Above the limit, those that took most memory for the longest time are
refused. A compressed body is expanded by a thread, into memory that was charged before.

Runs on: gateway loop, and the threads that expand messages. Source: RFC 9110, section 8.4 (`gzip`,
and `deflate` in zlib's form); RFC 1952 (the size at the end of gzip).
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray
from starlette.datastructures import Headers
from starlette.types import Message, Receive

from iskander.clock import NS_PER_S, now_ns
from iskander.errors import (
    Cancelled,
    DeadlineExceeded,
    IskanderError,
    LimitExceeded,
    MalformedInput,
    Overloaded,
    Unsupported,
    detach,
)
from iskander.transport.http2.decompression import GZIP_BYTES_MIN, THREADS
from iskander.transport.receive_budget import (
    MESSAGE_RATE_MIN,
    ReceiveBudget,
    message_memory,
    progress_ns,
)

PIECE_BYTES = 1 << 18
"""Of an answer, given to the socket or compressed at once."""
RESERVED_BYTES_MIN: Final = 4 << 20
"""Larger bodies reserve their memory first, where their length is known."""
AT_ONCE_BYTES: Final = 32_768
"""As much is expanded or compressed in a fraction of a millisecond; more is for a thread."""
STEP_BYTES: Final = 1 << 18
COMPRESS_LEVEL = 1
RETRY_MS = 1000
_DIGITS_MAX = 18
_ISIZE_BYTES: Final = 4
_WINDOWS = {"gzip": 31, "deflate": 15}


class BodyQuota:
    """What all bodies together may take, requests and answers.

    Args:
        bytes_max: Beyond them a request is refused. Answers are written all the same, since what
            they answer was accepted.
        budget: The memory of received bytes.
        message_s: Seconds without a byte of a body, or in which there is no memory for it.
        count_ended: Counts a body that does not come, by reason.
    """

    def __init__(
        self,
        bytes_max: int,
        budget: ReceiveBudget,
        message_s: float,
        count_ended: Callable[[str], None],
    ) -> None:
        self.bytes_max = bytes_max
        self.budget = budget
        self.message_s = message_s
        self.count_ended = count_ended
        self.held_bytes = 0


class ReceivedBody:
    """The part of the room that one call takes; given back when the block ends.

    While a body is read it may be refused for want of memory, by the budget.
    """

    def __init__(self, room: BodyQuota) -> None:
        self._room = room
        self._budget = room.budget
        self._bytes = self._charged = self._filled = 0
        self._body: bytearray | NDArray[np.uint8] | None = None
        self._wanted_bytes = self._reserved_left = 0
        self._is_reserved = self._is_reading = False
        self._granted: asyncio.Future[None] | None = None
        self._waiting: asyncio.Timeout | None = None
        self._error: IskanderError | None = None
        self._began_ns = self._moved_ns = 0

    def __enter__(self) -> ReceivedBody:
        return self

    def __exit__(self, *_: object) -> None:
        self._free()
        self._room.held_bytes -= self._bytes

    def grow(self, count: int) -> None:
        """Take more.

        Raises:
            Overloaded: Others have it.
        """
        self._require_room(count)
        self.add(count)
        self._require_memory()

    def add(self, count: int) -> None:
        """Take more, whether there is room or not."""
        self._bytes += count
        self._room.held_bytes += count
        if self._reserved_left >= count:
            self._reserved_left -= count
        else:
            self._charged += count
            self._budget.charge(count)

    @contextlib.contextmanager
    def work(self, count: int) -> Iterator[None]:
        """Take more while the block runs.

        Raises:
            Overloaded: There is not so much.
        """
        if not self._budget.take(count):
            raise self._no_memory()
        try:
            yield
        finally:
            self._budget.give_back(count)

    async def read(self, receive: Receive, length: int | None, bytes_max: int) -> memoryview:
        """All of a body, as it comes.

        Args:
            receive: Gives its pieces.
            length: As the header says; None where it does not.
            bytes_max: The most that it may have.

        Raises:
            IskanderError: As `read_body`.
        """
        self._began_ns = self._moved_ns = now_ns()
        self._is_reading = True
        self._budget.holders.add(self)
        try:
            await self._begin(length)
            while True:
                message = await self._next(receive)
                if message["type"] == "http.disconnect":
                    raise Cancelled("the caller left before its request was there")
                piece = message.get("body", b"")
                if self._filled + len(piece) > (bytes_max if length is None else length):
                    raise _too_large(bytes_max)
                self.grow(len(piece))
                self._append(piece)
                if not message.get("more_body", False):
                    body, self._body = self._body, None
                    assert body is not None
                    whole = memoryview(body) if isinstance(body, bytearray) else body.data
                    return whole[: self._filled]
        finally:
            self._is_reading = False
            self._budget.holders.discard(self)
            self._end_reservation()

    async def expand(self, packed: memoryview, coding: str, bytes_max: int) -> memoryview:
        """A body that was compressed; the memory for it is taken before.

        Raises:
            IskanderError: As `read_body`.
        """
        expanded = await self._expand(packed, coding, bytes_max)
        if isinstance(expanded, IskanderError):
            raise expanded
        self._bytes += len(expanded)
        self._room.held_bytes += len(expanded)
        return expanded

    async def _expand(
        self, packed: memoryview, coding: str, bytes_max: int
    ) -> memoryview | IskanderError:
        # Errors are returned: the traceback of one that is raised would keep the memory.
        most = bytes_max
        if coding == "gzip" and len(packed) >= GZIP_BYTES_MIN:
            most = min(int.from_bytes(packed[-_ISIZE_BYTES:], "little"), bytes_max)
        self._require_room(most)
        target = self._budget.charged_array(most)
        if target is None:
            return self._no_memory()
        if len(packed) <= AT_ONCE_BYTES and most <= AT_ONCE_BYTES:
            expanded = _expand(packed, coding, bytes_max, target)
        else:
            loop = asyncio.get_running_loop()
            expanded = await loop.run_in_executor(
                THREADS, _expand, packed, coding, bytes_max, target
            )
        if not isinstance(expanded, IskanderError):
            self._budget.shrink(target, len(expanded))
        return expanded

    # For the receive budget.

    def held(self, now_ns: int) -> float:
        """What would be freed if the body were refused, in bytes times nanoseconds."""
        return self._filled * float(now_ns - self._began_ns) if self._is_reading else 0.0

    def shed(self) -> bool:
        """Refuse the body, where it is being read; return whether it is."""
        if not self._is_reading or self._error is not None or not self._filled:
            return False
        self._stop(self._no_memory())
        return True

    def evict_stalled(self, now_ns: int, stall_ns: int) -> None:
        """Refuse the body where it fell so far behind its slowest rate."""
        is_stalled = self._is_reading and self._granted is None and self._error is None
        if is_stalled and now_ns - self._moved_ns > stall_ns:
            self._room.count_ended("message_timeout")
            self._stop(_too_slow((now_ns - self._moved_ns) / NS_PER_S))

    def on_reserved(self) -> None:
        """The memory of the body is reserved."""
        self._is_reserved = True
        self._charged += self._wanted_bytes
        self._reserved_left = self._wanted_bytes
        if self._granted is not None and not self._granted.done():
            self._granted.set_result(None)

    # Reading.

    async def _begin(self, length: int | None) -> None:
        """Have the memory of a body; of a large one before it comes."""
        if not length:
            self._body = bytearray()
            return
        self._require_room(length)
        if length > RESERVED_BYTES_MIN:
            self._wanted_bytes = length
            if self._budget.reserve(self, self, length):
                self.on_reserved()
            else:
                self._granted = asyncio.get_running_loop().create_future()
                try:
                    async with asyncio.timeout(self._room.message_s):
                        await self._granted
                except TimeoutError:
                    raise self._no_memory() from None
                finally:
                    self._granted = None
            self._moved_ns = now_ns()
        self._body = message_memory(length)

    async def _next(self, receive: Receive) -> Message:
        left_s = self._room.message_s - (now_ns() - self._moved_ns) / NS_PER_S
        try:
            async with asyncio.timeout(left_s) as self._waiting:
                message = await receive()
        except TimeoutError:
            self._require_memory()
            self._room.count_ended("message_timeout")
            raise _too_slow(self._room.message_s) from None
        finally:
            self._waiting = None
        self._require_memory()
        count = len(message.get("body", b""))
        self._moved_ns = progress_ns(self._moved_ns, now_ns(), count)
        return message

    def _append(self, piece: bytes) -> None:
        body, at = self._body, self._filled
        if isinstance(body, bytearray):
            body += piece
        elif body is not None:
            body[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
        self._filled = at + len(piece)

    def _stop(self, error: IskanderError) -> None:
        """Free the body, and have an error raised where it is waited for."""
        self._error = error
        self._free()
        if self._waiting is not None:
            self._waiting.reschedule(asyncio.get_running_loop().time())

    def _free(self) -> None:
        self._body = None
        self._filled = self._reserved_left = 0
        self._end_reservation()
        charged, self._charged = self._charged, 0
        self._budget.release(charged)

    def _end_reservation(self) -> None:
        """What was reserved has come, or will not come."""
        if self._wanted_bytes:
            reserved = self._wanted_bytes if self._is_reserved else 0
            self._wanted_bytes, self._is_reserved = 0, False
            self._budget.end_reservation(self, self, reserved)

    def _require_memory(self) -> None:
        if self._error is not None:
            raise detach(self._error)

    def _require_room(self, count: int) -> None:
        if self._room.held_bytes + count > self._room.bytes_max:
            raise Overloaded(
                f"bodies of {self._room.held_bytes} bytes are held, and all may have "
                f"{self._room.bytes_max} (http.bodies_bytes)",
                retry_after_ms=RETRY_MS,
            )

    def _no_memory(self) -> Overloaded:
        return Overloaded(
            f"the server has no memory to receive a body: {self._budget.limit_bytes} bytes are in "
            "use (limits.receive_bytes)",
            retry_after_ms=RETRY_MS,
        )


async def read_body(
    receive: Receive, headers: Headers, bytes_max: int, held: ReceivedBody
) -> memoryview:
    """All of a request's body, decompressed.

    Args:
        receive: Gives its pieces.
        headers: Of the request.
        bytes_max: The most that it may have, compressed or not.
        held: Grows with it.

    Raises:
        LimitExceeded: It is larger; known before more than that was read.
        DeadlineExceeded: No byte of it came for too long.
        MalformedInput: It is not compressed as its header says.
        Unsupported: It is compressed in another way.
        Cancelled: The client left.
        Overloaded: There is no room for it now.
    """
    announced = headers.get("content-length")
    length = None
    if announced is not None:
        length = int(announced) if len(announced) <= _DIGITS_MAX else bytes_max + 1
        if length > bytes_max:
            raise _too_large(bytes_max)
    coding = headers.get("content-encoding", "identity").strip().lower()
    if coding not in (*_WINDOWS, "identity"):
        raise Unsupported(f"bodies are taken as they are, gzip or deflate, not {coding[:20]}")
    raw = await held.read(receive, length, bytes_max)
    return raw if coding == "identity" else await held.expand(raw, coding, bytes_max)


def chosen_coding(accepted: str) -> str | None:
    """How an answer is to be compressed, by the header `Accept-Encoding`; None for not at all.

    A list of codings is what HTTP libraries send unasked, and compressing costs everybody time: so
    only a client that names one, and that one, gets it.
    """
    name = accepted.strip().lower()
    return name if name in _WINDOWS else None


async def compress(parts: Iterable[bytes | memoryview], coding: str) -> bytes:
    """A body, compressed, by a thread where it is large."""
    packer = zlib.compressobj(COMPRESS_LEVEL, zlib.DEFLATED, _WINDOWS[coding])
    packed = bytearray()
    for part in parts:
        view = memoryview(part)
        for start in range(0, len(view), PIECE_BYTES):
            piece = view[start : start + PIECE_BYTES]
            if len(piece) <= AT_ONCE_BYTES:
                packed += packer.compress(piece)
            else:
                loop = asyncio.get_running_loop()
                packed += await loop.run_in_executor(THREADS, packer.compress, piece)
    return bytes(packed + packer.flush())


def _expand(
    packed: memoryview, coding: str, bytes_max: int, target: NDArray[np.uint8]
) -> memoryview | IskanderError:
    """Expand a body into memory of as many bytes as it may have; return its error where it is none.

    Runs on: a thread.
    """
    unpacker = zlib.decompressobj(_WINDOWS[coding])
    view, at, taken = target.data, 0, 0
    try:
        while not unpacker.eof:
            left: bytes | memoryview = unpacker.unconsumed_tail
            if not left:
                left = packed[taken : taken + STEP_BYTES]
                taken += len(left)
            piece = unpacker.decompress(left, min(STEP_BYTES, len(view) - at + 1))
            if at + len(piece) > len(view):
                if len(view) == bytes_max:
                    return _too_large(bytes_max)
                return MalformedInput(f"the body's {coding} is larger than it declares")
            view[at : at + len(piece)] = piece
            at += len(piece)
            if not (left or piece):
                return MalformedInput(f"the body's {coding} has no end")
    except zlib.error as error:
        return MalformedInput(f"the body is no {coding}: {error}")
    if unpacker.unused_data or taken < len(packed):
        return MalformedInput(f"the body goes on behind its {coding}")
    return view[:at]


def _too_slow(behind_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"the body fell {behind_s:.0f} s behind {MESSAGE_RATE_MIN} bytes/s")


def _too_large(bytes_max: int) -> LimitExceeded:
    return LimitExceeded(f"the body of this request may have {bytes_max} bytes", wanted=bytes_max)
