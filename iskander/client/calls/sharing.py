"""Use of shared memory by the streams of one connection: suitable batches, and failures.

The distribution `iskander-client` lacks the module `shared_memory`, which provides the regions.

Runs on: the caller's threads.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from iskander.client.calls.retry import Deadline
from iskander.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    IskanderError,
    ModelNotFound,
    PermissionDenied,
    ProtocolError,
    Unsupported,
)
from iskander.foundation import clock

if TYPE_CHECKING:
    from iskander.client.calls.shared_memory import RegionLease, RegionPool

WORTH_BYTES = 65_536
"""Smallest batch for shared memory; smaller batches cost less over the connection."""
RETRY_SHARED_S = 30.0
"""Time after a failure in which streams use the connection instead of shared memory."""
_NOT_OFFERED = (ConfigError, ModelNotFound, PermissionDenied, ProtocolError, Unsupported)
"""Permanent errors: a wrong installation, a server without regions, or no gateway."""


class Sharing:
    """Provides regions for the streams of a connection, or not after a failure.

    Args:
        open_pool: Creates the pool of regions at the first use, or raises ConfigError; None: no
            shared memory.
        is_required: Whether a failure is an error; otherwise the stream uses the connection.
        timeout_s: Limit of the time to get a region.
        now_ns: Clock.
    """

    def __init__(
        self,
        open_pool: Callable[[], RegionPool] | None,
        *,
        is_required: bool,
        timeout_s: float,
        now_ns: Callable[[], int] = clock.now_ns,
    ) -> None:
        self._open_pool = open_pool
        self._is_required = is_required
        self._timeout_s = timeout_s
        self._now_ns = now_ns
        self._lock = threading.Lock()
        self._pool: RegionPool | None = None
        self._retry_at_ns = 0

    def is_suitable(self, first: pa.RecordBatch) -> bool:
        """Whether to ask for a region for a stream that begins with this batch."""
        if self._open_pool is None or first.nbytes < WORTH_BYTES:
            return False
        return self._now_ns() >= self._retry_at_ns and can_share(first.schema)

    @contextlib.contextmanager
    def lease(self, first: pa.RecordBatch, deadline: Deadline) -> Iterator[RegionLease | None]:
        """Acquire a region for a stream, as `acquire`; release it after the block."""
        lease = self.acquire(first, deadline)
        try:
            yield lease
        finally:
            if lease is not None:
                lease.release()

    def acquire(self, first: pa.RecordBatch, deadline: Deadline) -> RegionLease | None:
        """Return a region for a stream that begins with this batch; None if it uses the connection.

        Raises:
            DeadlineExceeded: The deadline passed.
            IskanderError: A region is required and not available.
        """
        if not self.is_suitable(first):
            return None
        left_s = deadline.remaining_s()
        timeout_s = self._timeout_s if left_s is None else min(left_s, self._timeout_s)
        try:
            return self._opened_pool().acquire(first.schema, timeout_s)
        except IskanderError as error:
            is_late = isinstance(error, DeadlineExceeded) and deadline.ends_within(0)
            if self._is_required or is_late:
                raise
            self._switch_off(is_final=isinstance(error, _NOT_OFFERED))
            return None

    def discard(self, lease: RegionLease) -> None:
        """Close the region of a lease, which the server does not have, and all idle regions.

        The idle regions are probably of the same process. Unless regions are required, the next
        streams use the connection, because a proxy may send every call to another process.
        """
        lease.is_usable = False
        with self._lock:
            pool = self._pool
        if pool is not None:
            pool.close_idle()
        if not self._is_required:
            self._switch_off(is_final=False)

    def close(self) -> None:
        """Release idle regions now, and used regions at the end of their streams."""
        with self._lock:
            pool, self._pool, self._open_pool = self._pool, None, None
        if pool is not None:
            pool.close()

    def _switch_off(self, *, is_final: bool) -> None:
        if is_final:
            self.close()
        else:
            self._retry_at_ns = self._now_ns() + int(RETRY_SHARED_S * clock.NS_PER_S)

    def _opened_pool(self) -> RegionPool:
        with self._lock:
            if self._open_pool is None:
                raise Cancelled("shared memory was switched off")
            if self._pool is None:
                self._pool = self._open_pool()
            return self._pool


def can_share(schema: pa.Schema) -> bool:
    """Whether batches of a schema are single messages: dictionaries would be separate messages."""
    return not any(_has_dictionary(field.type) for field in schema)


def _has_dictionary(kind: Any) -> bool:  # noqa: ANN401
    kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    if pa.types.is_dictionary(kind):
        return True
    return any(_has_dictionary(kind.field(index).type) for index in range(kind.num_fields))
