"""A batch that is several requests, one for each bucket of its rows: and its results, in order.

Runs on: gateway loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from iskander.arrow.values import text_buffers
from iskander.clock import now_ns
from iskander.contract.strings import string_lengths, string_ranges
from iskander.contract.tensors import Contract, body_layout
from iskander.errors import IskanderError
from iskander.protocols.flight.codec import ParsedBatch
from iskander.protocols.flight.convert import BatchPortion
from iskander.protocols.stream_terms import StreamTerms
from iskander.scheduling.lane import Lane
from iskander.scheduling.request import Request


class SplitBatch:
    """Stands in a stream's window for a batch of several requests, and is their caller.

    Args:
        contract: Of the model version.
        portions: Of the batch; each has its rows' places.
        on_end: Called when the results of all are there, or one has failed.

    Attributes:
        requests: One for each portion, to be filled by the stream.
        results_bytes: Of all portions, at most.
        taken: What the response is made of; None until then.
        error: Why there will be none.
        held_bytes: What it keeps of private memory at most.
    """

    def __init__(
        self,
        contract: Contract,
        portions: Sequence[BatchPortion],
        on_end: Callable[[SplitBatch], None],
    ) -> None:
        self._contract = contract
        self._places = [portion.places for portion in portions]
        self._bodies: list[bytes | memoryview | None] = [None] * len(portions)
        self._on_end = on_end
        self.requests: list[Request] = []
        self.results_bytes = 0
        self.arrived: Any = None
        self.taken: Any = None
        self.error: IskanderError | None = None
        self.held_bytes = 0

    def deliver(self, request: Request, results: bytes | memoryview) -> None:
        """Take the results of one portion."""
        self._bodies[self.requests.index(request)] = results
        bodies = [body for body in self._bodies if body is not None]
        if len(bodies) == len(self._bodies) and self.error is None:
            self._on_end(self)

    def results(self) -> memoryview:
        """Those of the whole batch, once all are there; large ones are for a thread."""
        bodies = [body for body in self._bodies if body is not None]
        return merge_results(self._contract, self._places, bodies)

    def fail(self, request: Request, error: IskanderError) -> None:
        """Take the failure of one portion, which is that of the batch."""
        del request
        if self.error is None:
            self.error = error
            self._on_end(self)


def split_batch(
    lane: Lane,
    arrived: ParsedBatch,
    raw_bytes: int,
    terms: StreamTerms,
    on_end: Callable[[SplitBatch], None],
) -> SplitBatch:
    """A batch whose rows are in several buckets, as a request for each.

    Args:
        lane: Of the model version.
        arrived: The batch.
        raw_bytes: Of its message.
        terms: Of its stream.
        on_end: As `SplitBatch` has it.
    """
    assert lane.contract is not None
    divided = SplitBatch(lane.contract, arrived.portions, on_end)
    said = terms.of(arrived.app_metadata)
    divided.requests = [
        Request(
            lane,
            divided,
            portion.rows,
            portion.tensors,
            terms=said,
            arrived_ns=now_ns(),
            call_deadline_ns=terms.deadline_ns,
            bucket=portion.bucket,
        )
        for portion in arrived.portions
    ]
    for request in divided.requests[1:]:
        request.is_part = True
    divided.arrived = arrived.without_inputs()
    divided.results_bytes = sum(request.layout.output_bytes for request in divided.requests)
    divided.held_bytes = max(raw_bytes, len(arrived.body)) + 2 * divided.results_bytes
    return divided


def merge_results(
    contract: Contract,
    places: Sequence[np.ndarray],
    bodies: Sequence[bytes | memoryview],
) -> memoryview:
    """The results of a whole batch.

    Args:
        contract: Of the model version.
        places: Of each portion, the rows of the batch that its rows are.
        bodies: Of each portion, its results.
    """
    specs, rows = contract.outputs, sum(map(len, places))
    offsets, texts = body_layout(specs, rows)[0], []
    layouts = [body_layout(specs, len(each))[0] for each in places]
    order = np.argsort(np.concatenate(places))
    columns: list[np.ndarray] = []
    for index, spec in enumerate(specs):
        found = [
            np.frombuffer(body, np.uint8)[layout[index] :][: spec.buffer_bytes(len(each))]
            for each, body, layout in zip(places, bodies, layouts, strict=True)
        ]
        if spec.is_string:
            which = sum(other.is_string for other in specs[:index])
            whole = _texts(contract, which, found, places, bodies, layouts)
            at = order[:, None] * spec.elements + np.arange(spec.elements)
            ends, joined = text_buffers(whole.take(pa.array(at.reshape(-1))))
            columns.append(np.frombuffer(ends, np.uint8))
            texts.append(joined)
        elif spec.type.dtype.arrow_bits == 1:
            counts = [len(each) * spec.elements for each in places]
            bits = [
                np.unpackbits(raw, count=count, bitorder="little")
                for raw, count in zip(found, counts, strict=True)
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
    which: int,
    found: Sequence[np.ndarray],
    places: Sequence[np.ndarray],
    bodies: Sequence[bytes | memoryview],
    layouts: Sequence[list[int]],
) -> pa.Array:
    """One output of strings of all portions, one after the other."""
    arrays, specs = [], contract.outputs
    spec = [each for each in specs if each.is_string][which]
    for ends, each, body, layout in zip(found, places, bodies, layouts, strict=True):
        lengths = string_lengths(specs, len(each), body, layout)
        start, stop = string_ranges(specs, len(each), lengths, layout)[0][which]
        buffers = [None, pa.py_buffer(ends), pa.py_buffer(memoryview(body)[start:stop])]
        arrays.append(pa.Array.from_buffers(pa.binary(), len(each) * spec.elements, buffers))
    return pa.concat_arrays(arrays)
