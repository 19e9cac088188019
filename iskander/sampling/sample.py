"""A sampled request, and the interface of its consumers.

Runs on: the observer process.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import pyarrow as pa


class Sample(NamedTuple):
    """Inputs and outputs of a sampled request, in memory of this process.

    Attributes:
        model: Name of the model.
        version: Version that computed the outputs.
        time_ns: Unix time of the results.
        rows: Rows of both batches.
        trace_id: Id of the caller's trace, or made for this request; 32 hexadecimal digits.
        inputs: A column for each input of the contract; a tensor of more than one dimension is a
            fixed-size list of its rows.
        outputs: The tensors of the outputs, likewise.
    """

    model: str
    version: str
    time_ns: int
    rows: int
    trace_id: str
    inputs: pa.RecordBatch
    outputs: pa.RecordBatch


class Consumer(Protocol):
    """Something that processes samples. Called on one thread, in turn with the other consumers."""

    def consume(self, sample: Sample) -> None:
        """Process a sample."""

    def tick(self, now_ns: int) -> None:
        """Do periodic work; called at least once a second with the Unix time."""

    def report(self) -> dict[str, Any]:
        """Return a small state for the gateway, as JSON values."""

    def close(self) -> None:
        """Finish; the gateway is stopping."""
