"""A batch split into one request per bucket, and the merge of its results.

Runs on: gateway loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from iskander.arrow.values import text_buffers
from iskander.contract.processing.strings import string_lengths, string_ranges
from iskander.contract.tensors import Contract, body_layout
from iskander.errors import ExecutionFailed, IskanderError
from iskander.foundation.clock import now_ns
from iskander.gateway.protocols.flight.codec import ParsedBatch
from iskander.gateway.protocols.flight.columns.convert import BatchPortion
from iskander.gateway.protocols.stream_terms import StreamTerms
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.scheduling.request import Request


class SplitBatch:
    """Window entry of a split batch, and caller of its requests.

    Calls `on_end` when all portions have results, or one has failed.
    """

    def __init__(
        self,
        contract: Contract,
        portions: Sequence[BatchPortion],
        on_end: Callable[[SplitBatch], None],
    ) -> None:
        self._contract = contract
        self._places = [portion.places for portion in portions]
        self._bodies: dict[int, bytes | memoryview] = {}
        self._on_end = on_end
        self.requests: list[Request] = []
        self.results_bytes = 0
        self.parsed: Any = None
        self.response: Any = None
        self.error: IskanderError | None = None
        self.held_bytes = 0

    def deliver(self, request: Request, results: bytes | memoryview) -> None:
        """Accept the results of one portion."""
        self._bodies[self.requests.index(request)] = results
        if len(self._bodies) == len(self._places) and self.error is None:
            self._on_end(self)

    def results(self) -> memoryview:
        """Merge the results of all portions; call on a thread if they are large."""
        bodies = [self._bodies[index] for index in range(len(self._places))]
        return merge_results(self._contract, self._places, bodies)

    def fail(self, request: Request, error: IskanderError) -> None:
        """Accept the failure of one portion, which fails the batch."""
        if self.error is None:
            if isinstance(error, ExecutionFailed) and error.row is not None:
                places = self._places[self.requests.index(request)]
                error = error.located(int(places[error.row]), error.column)
            self.error = error
            self._on_end(self)


def split_batch(
    lane: Lane,
    parsed: ParsedBatch,
    raw_bytes: int,
    terms: StreamTerms,
    on_end: Callable[[SplitBatch], None],
) -> SplitBatch:
    """Split a batch with rows in several buckets; `raw_bytes` is the size of its message."""
    assert lane.contract is not None
    split = SplitBatch(lane.contract, parsed.portions, on_end)
    batch_terms = terms.of(parsed.app_metadata)
    split.requests = [
        Request(
            lane,
            split,
            portion.rows,
            portion.tensors,
            terms=batch_terms,
            arrived_ns=now_ns(),
            call_deadline_ns=terms.deadline_ns,
            bucket=portion.bucket,
        )
        for portion in parsed.portions
    ]
    for request in split.requests[1:]:
        request.is_part = True
    sizes = [len(tensor) for portion in parsed.portions for tensor in portion.tensors]
    split.requests[0].whole = (parsed.rows, sum(sizes))
    split.parsed = parsed.without_inputs()
    split.results_bytes = sum(request.layout.output_bytes for request in split.requests)
    split.held_bytes = max(raw_bytes, len(parsed.body)) + 2 * split.results_bytes
    return split


def merge_results(
    contract: Contract, places: Sequence[np.ndarray], bodies: Sequence[bytes | memoryview]
) -> memoryview:
    """Merge the results of portions in row order; `places` are the row numbers of each portion."""
    specs, rows = contract.outputs, sum(map(len, places))
    offsets = body_layout(specs, rows)[0]
    texts: list[memoryview] = []
    layouts = [body_layout(specs, len(each))[0] for each in places]
    order = np.argsort(np.concatenate(places))
    columns: list[np.ndarray] = []
    for index, spec in enumerate(specs):
        found = [
            np.frombuffer(body, np.uint8)[layout[index] :][: spec.buffer_bytes(len(each))]
            for each, body, layout in zip(places, bodies, layouts, strict=True)
        ]
        if spec.is_string:
            whole = _texts(contract, len(texts), found, places, bodies, layouts)
            at = order[:, None] * spec.elements + np.arange(spec.elements)
            ends, joined = text_buffers(whole.take(pa.array(at.reshape(-1))))
            columns.append(np.frombuffer(ends, np.uint8))
            texts.append(joined)
        elif spec.type.dtype.arrow_bits == 1:
            bits = [
                np.unpackbits(raw, count=len(each) * spec.elements, bitorder="little")
                for raw, each in zip(found, places, strict=True)
            ]
            whole_bits = np.concatenate(bits).reshape(rows, -1)[order]
            columns.append(np.packbits(whole_bits.reshape(-1), bitorder="little"))
        else:
            columns.append(np.concatenate(found).reshape(rows, -1)[order].reshape(-1))
    ranges, end = string_ranges(specs, rows, [len(text) for text in texts], offsets)
    body = np.zeros(end, np.uint8)
    for offset, column in zip(offsets, columns, strict=True):
        body[offset : offset + len(column)] = column
    for (start, stop), text in zip(ranges, texts, strict=True):
        body[start:stop] = np.frombuffer(text, np.uint8)
    return body.data


def _texts(
    contract: Contract,
    string_number: int,
    found: Sequence[np.ndarray],
    places: Sequence[np.ndarray],
    bodies: Sequence[bytes | memoryview],
    layouts: Sequence[list[int]],
) -> pa.Array:
    """One string output of all portions, concatenated."""
    arrays, specs = [], contract.outputs
    spec = [each for each in specs if each.is_string][string_number]
    for ends, each, body, layout in zip(found, places, bodies, layouts, strict=True):
        lengths = string_lengths(specs, len(each), body, layout)
        start, stop = string_ranges(specs, len(each), lengths, layout)[0][string_number]
        buffers = [None, pa.py_buffer(ends), pa.py_buffer(memoryview(body)[start:stop])]
        arrays.append(pa.Array.from_buffers(pa.binary(), len(each) * spec.elements, buffers))
    return pa.concat_arrays(arrays)
