"""A client's regions: one for each stream that is open, and some for the next ones.

Runs on: the caller's threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from iskander.client.region import WORTH_BYTES, Region, can_share
from iskander.errors import NotReady

IDLE_MAX = 4
"""Kept; more than so many streams at once borrow anew."""


class Regions:
    """What a client has been lent.

    Args:
        lender: Finds the path at which the gateway lends.
        length_bytes: Of each region; 0: none is wanted.
        timeout_s: For the gateway's answer.
    """

    def __init__(self, lender: Callable[[], Path], length_bytes: int, timeout_s: float) -> None:
        self._lender = lender
        self._length_bytes = length_bytes
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._idle: list[Region] = []
        self._is_closed = False

    def for_stream(self, first: pa.RecordBatch) -> Region | None:
        """Memory for a stream that begins with this batch, where that is worth it.

        Raises:
            NotReady: Nobody lends any at the path.
            IskanderError: Why there is none.
        """
        if not self._length_bytes or first.nbytes < WORTH_BYTES or not can_share(first.schema):
            return None
        region = self._idle_one() or self._borrow()
        region.begin(first.schema)
        return region

    def put_by(self, region: Region, *, is_usable: bool = True) -> None:
        """Keep a region for the next stream, where one can use it."""
        with self._lock:
            if is_usable and not self._is_closed and len(self._idle) < IDLE_MAX:
                self._idle.append(region)
                return
        region.close()

    def close(self) -> None:
        """Give back what no stream is using; the others as they end."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for region in idle:
            region.close()

    def _idle_one(self) -> Region | None:
        with self._lock:
            while self._idle:
                region = self._idle.pop()
                if region.is_lent:
                    return region
                region.close()
        return None

    def _borrow(self) -> Region:
        path = self._lender()
        try:
            return Region(path, self._length_bytes, self._timeout_s)
        except OSError as error:
            raise NotReady(f"no gateway of this machine lends memory at {path}: {error}") from error
