"""HTTP bodies: receive limits, memory quota, decompression and compression.

The budget of received bytes is charged on arrival; a large body of known length reserves its memory
first. Above the limit, the bodies with the most memory for the longest time are rejected. A body is
decompressed into memory that is charged before.

Runs on: gateway loop, and the threads that expand messages. Source: RFC 9110, section 8.4 (`gzip`,
and `deflate` in zlib's form); RFC 1952 (the size at the end of gzip).
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray
from starlette.datastructures import Headers
from starlette.types import Message, Receive

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
from iskander.foundation.clock import NS_PER_S, now_ns
from iskander.gateway.transport.http2.decompression import GZIP_BYTES_MIN, THREADS
from iskander.gateway.transport.limits.receive_budget import (
    MESSAGE_RATE_MIN,
    ReceiveBudget,
    message_memory,
    progress_ns,
)

PIECE_BYTES = 1 << 18
"""Bytes of a response that are written or compressed at once."""
RESERVED_BYTES_MIN: Final = 4 << 20
"""Larger bodies of known length reserve their memory first."""
AT_ONCE_BYTES: Final = 32_768
"""Expanded or compressed on the event loop in a fraction of a millisecond; more in a thread."""
STEP_BYTES: Final = 1 << 18
COMPRESS_LEVEL = 1
RETRY_MS = 1000
_DIGITS_MAX = 18
_ISIZE_BYTES: Final = 4
_WINDOWS = {"gzip": 31, "deflate": 15}

_T = TypeVar("_T")


@dataclass
class BodyQuota:
    """Memory limit of all bodies together, requests and answers.

    Args:
        bytes_max: Limit for requests. Answers of accepted requests may exceed it.
        message_s: Timeout in seconds for the next byte of a body, and for its memory.
        count_ended: Counts an incomplete body, by reason.
    """

    bytes_max: int
    budget: ReceiveBudget
    message_s: float
    count_ended: Callable[[str], None]
    held_bytes: int = 0


class ReceivedBody:
    """One call's part of the quota; the budget may reject the body while it is being read."""

    def __init__(self, quota: BodyQuota) -> None:
        self._quota = quota
        self._budget = quota.budget
        self._bytes = self._charged = self._filled = 0
        self._body: bytearray | NDArray[np.uint8] | None = None
        self._expected_bytes = self._reserved_left = 0
        self._is_reserved = self._is_reading = False
        self._granted: asyncio.Future[None] | None = None
        self._waiting: asyncio.Timeout | None = None
        self._error: IskanderError | None = None
        self._began_ns = self._progress_ns = 0

    def __enter__(self) -> ReceivedBody:
        return self

    def __exit__(self, *_: object) -> None:
        self._free()
        self._quota.held_bytes -= self._bytes

    def grow(self, count: int) -> None:
        """Charge received bytes; raise if the quota is exceeded or the body was rejected."""
        self._require_quota(count)
        self.add(count)
        self._require_accepted()

    def add(self, count: int) -> None:
        """Charge bytes without a limit."""
        self._bytes += count
        self._quota.held_bytes += count
        if self._reserved_left >= count:
            self._reserved_left -= count
        else:
            self._charged += count
            self._budget.charge(count)

    @contextlib.contextmanager
    def work(self, count: int) -> Iterator[None]:
        """Charge temporary memory to the budget while the block runs; raise if it is full."""
        if not self._budget.try_charge(count):
            raise self._no_memory()
        try:
            yield
        finally:
            self._budget.release(count)

    async def read(self, receive: Receive, length: int | None, bytes_max: int) -> memoryview:
        """Read a complete body; `length` is its Content-Length."""
        self._began_ns = self._progress_ns = now_ns()
        self._is_reading = True
        self._budget.holders.add(self)
        try:
            await self._allocate(length)
            while True:
                message = await self._next(receive)
                if message["type"] == "http.disconnect":
                    raise Cancelled("the client disconnected before the end of its request")
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
        """Decompress a body into memory that is charged before."""
        most = bytes_max
        if coding == "gzip" and len(packed) >= GZIP_BYTES_MIN:
            most = min(int.from_bytes(packed[-_ISIZE_BYTES:], "little"), bytes_max)
        self._require_quota(most)
        target = self._budget.charged_array(most)
        if target is None:
            raise self._no_memory()
        size = max(len(packed), most)
        expanded = await _run(size, _expand, packed, coding, bytes_max, target)
        if isinstance(expanded, IskanderError):
            del target  # The traceback would keep the memory.
            raise expanded
        self._budget.shrink(target, len(expanded))
        self._bytes += len(expanded)
        self._quota.held_bytes += len(expanded)
        return expanded

    # Called by the receive budget.

    def evictable(self, now_ns: int) -> float:
        """Return the memory that a rejection frees, in bytes times nanoseconds."""
        return self._filled * float(now_ns - self._began_ns) if self._is_reading else 0.0

    def evict(self) -> bool:
        """Reject the body if it is being read; return whether it was."""
        if not self._is_reading or self._error is not None or not self._filled:
            return False
        self._stop(self._no_memory())
        return True

    def evict_stalled(self, now_ns: int, stall_ns: int) -> None:
        """Reject the body if it is this far behind the minimum rate."""
        is_stalled = self._is_reading and self._granted is None and self._error is None
        if is_stalled and now_ns - self._progress_ns > stall_ns:
            self._quota.count_ended("message_timeout")
            self._stop(_too_slow((now_ns - self._progress_ns) / NS_PER_S))

    def on_reserved(self) -> None:
        """Note that the memory of the body is reserved."""
        self._is_reserved = True
        self._charged += self._expected_bytes
        self._reserved_left = self._expected_bytes
        if self._granted is not None and not self._granted.done():
            self._granted.set_result(None)

    # Reading.

    async def _allocate(self, length: int | None) -> None:
        """Allocate the memory of a body; reserve that of a large one first."""
        if not length:
            self._body = bytearray()
            return
        self._require_quota(length)
        if length > RESERVED_BYTES_MIN:
            self._expected_bytes = length
            if self._budget.reserve(self, self, length):
                self.on_reserved()
            else:
                self._granted = asyncio.get_running_loop().create_future()
                try:
                    async with asyncio.timeout(self._quota.message_s):
                        await self._granted
                except TimeoutError:
                    raise self._no_memory() from None
                finally:
                    self._granted = None
            self._progress_ns = now_ns()
        self._body = message_memory(length)

    async def _next(self, receive: Receive) -> Message:
        left_s = self._quota.message_s - (now_ns() - self._progress_ns) / NS_PER_S
        try:
            async with asyncio.timeout(left_s) as self._waiting:
                message = await receive()
        except TimeoutError:
            self._require_accepted()
            self._quota.count_ended("message_timeout")
            raise _too_slow(self._quota.message_s) from None
        finally:
            self._waiting = None
        self._require_accepted()
        count = len(message.get("body", b""))
        self._progress_ns = progress_ns(self._progress_ns, now_ns(), count)
        return message

    def _append(self, piece: bytes) -> None:
        body, at = self._body, self._filled
        if isinstance(body, bytearray):
            body += piece
        elif body is not None:
            body[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
        self._filled = at + len(piece)

    def _stop(self, error: IskanderError) -> None:
        """Free the body, and raise an error in its reader."""
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
        if self._expected_bytes:
            reserved = self._expected_bytes if self._is_reserved else 0
            self._expected_bytes, self._is_reserved = 0, False
            self._budget.end_reservation(self, self, reserved)

    def _require_accepted(self) -> None:
        if self._error is not None:
            raise detach(self._error)

    def _require_quota(self, count: int) -> None:
        quota = self._quota
        if quota.held_bytes + count > quota.bytes_max:
            raise Overloaded(
                f"body of {count} bytes rejected: {quota.held_bytes} bytes of bodies are held, "
                f"limit {quota.bytes_max} (`http.bodies_bytes`)",
                retry_after_ms=RETRY_MS,
            )

    def _no_memory(self) -> Overloaded:
        limit = f"{self._budget.limit_bytes} bytes are in use (`limits.receive_bytes`)"
        return Overloaded(f"no memory to receive a body: {limit}", retry_after_ms=RETRY_MS)


async def read_body(
    receive: Receive, headers: Headers, bytes_max: int, received: ReceivedBody
) -> memoryview:
    """Read and decompress a request's body; `bytes_max` applies to either form.

    Raises:
        LimitExceeded: The body is too large; no more than the limit is read.
        DeadlineExceeded: The body arrived too slowly.
        MalformedInput: The compressed data is invalid.
        Unsupported: The coding is not supported.
        Cancelled: The client disconnected.
        Overloaded: There is no memory for it now.
    """
    declared = headers.get("content-length")
    length = None
    if declared is not None:
        length = int(declared) if len(declared) <= _DIGITS_MAX else bytes_max + 1
        if length > bytes_max:
            raise _too_large(bytes_max)
    coding = headers.get("content-encoding", "identity").strip().lower()
    if coding not in (*_WINDOWS, "identity"):
        raise Unsupported(f"body has coding {coding[:20]}; supported: identity, gzip, deflate")
    raw = await received.read(receive, length, bytes_max)
    return raw if coding == "identity" else await received.expand(raw, coding, bytes_max)


def response_coding(accepted: str) -> str | None:
    """Choose the coding of an answer from `Accept-Encoding`; None for no compression.

    HTTP libraries send a list of codings by default, and compression costs CPU time for all
    clients, so only a header with a single coding enables it.
    """
    name = accepted.strip().lower()
    return name if name in _WINDOWS else None


async def compress(parts: Iterable[bytes | memoryview], coding: str) -> bytes:
    """Compress a body; large ones in a thread."""
    packer = zlib.compressobj(COMPRESS_LEVEL, zlib.DEFLATED, _WINDOWS[coding])
    packed = bytearray()
    for part in parts:
        view = memoryview(part)
        for start in range(0, len(view), PIECE_BYTES):
            piece = view[start : start + PIECE_BYTES]
            packed += await _run(len(piece), packer.compress, piece)
    return bytes(packed + packer.flush())


async def _run(size: int, function: Callable[..., _T], *args: Any) -> _T:  # noqa: ANN401
    """Call a function, in a thread if its data is large."""
    if size <= AT_ONCE_BYTES:
        return function(*args)
    return await asyncio.get_running_loop().run_in_executor(THREADS, function, *args)


def _expand(
    packed: memoryview, coding: str, bytes_max: int, target: NDArray[np.uint8]
) -> memoryview | IskanderError:
    """Decompress a body into `target`; errors are returned, as a traceback would keep the memory.

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
            # numpy copies without the interpreter lock, which the event loop needs.
            target[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
            at += len(piece)
            if not (left or piece):
                return MalformedInput(f"the body's {coding} is truncated")
    except zlib.error as error:
        return MalformedInput(f"the body is not valid {coding}: {error}")
    if unpacker.unused_data or taken < len(packed):
        return MalformedInput(f"bytes follow after the body's {coding}")
    return view[:at]


def _too_slow(behind_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"body too slow: {behind_s:.0f} s behind {MESSAGE_RATE_MIN} bytes/s")


def _too_large(bytes_max: int) -> LimitExceeded:
    return LimitExceeded(f"body too large: limit {bytes_max} bytes", wanted=bytes_max)
