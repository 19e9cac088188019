"""A stream whose client shares memory: a batch may say where its body is, instead of having one.

What is told of the batch came over the stream. Of the body, which the client can change at any
time, only tensors of fixed width are read where they are, once, into the input arena; what has to
be looked into is copied first.

Runs on: gateway loop.
"""

from __future__ import annotations

from builtins import memoryview  # Where mypyc looks for the types of fields.
from collections.abc import Callable

import numpy as np

from iskander.config import LimitsConfig
from iskander.errors import MalformedInput
from iskander.gateway.frontends.flight_codec import Arrived, StreamCodec
from iskander.gateway.frontends.flight_data import read_flight_data
from iskander.gateway.frontends.flight_plan import Plan
from iskander.wire.sharing import Located, read_located


class SharedCodec(StreamCodec):
    """The codec of such a stream.

    Args:
        plan: Of the stream.
        limits: Of the server.
        region: Finds the bytes that the client shares; it raises where they are not any more.
    """

    def __init__(self, plan: Plan, limits: LimitsConfig, region: Callable[[], memoryview]) -> None:
        super().__init__(plan, limits)
        self._region = region

    def is_quick(self, raw: bytes | memoryview) -> bool:
        """As of any codec; a body elsewhere counts as one that came."""
        located = _located(raw)
        if located is None:
            return super().is_quick(raw)
        return self.is_quick_of(located.header, len(located.header) + located.body[1])

    def read(self, raw: bytes | memoryview) -> Arrived | None:
        """As of any codec.

        Raises:
            IskanderError: As `decode`, or there is no such place in the region.
        """
        located = _located(raw)
        if located is None:
            return super().read(raw)
        region, (start, length) = self._region(), located.body
        if start < 0 or length < 0 or start + length > len(region):
            raise MalformedInput(
                f"the batch is said to have {length} bytes at {start} of a region of {len(region)}"
            )
        body = region[start : start + length]
        return self.decode(memoryview(located.header), body, located.app_metadata)

    def own(self, body: memoryview) -> memoryview:
        """A copy, which nobody changes; made without the interpreter's lock."""
        return np.frombuffer(body, np.uint8).copy().data


def _located(raw: bytes | memoryview) -> Located | None:
    """Where a message says that its batch is; None where it has one."""
    data = read_flight_data(raw)
    return None if data.header or not data.app_metadata else read_located(data.app_metadata)
