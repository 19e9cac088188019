"""The slow way for what is more than a plain batch: read, and where need be written, by pyarrow.

Compressed bodies, dictionaries, inputs that are not tensors as they come (`flight_inputs`), and
columns passed through that are lists, structs, maps, unions, views or run-end encoded. What comes
in is rewritten as a plain batch, with the inputs made beside it, and goes on like any other; what
goes out is written by pyarrow where a passed-through column asks for it.

Runs on: gateway loop, and the thread that reads large batches.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from iskander.arrow import ipc
from iskander.arrow.types import is_string
from iskander.arrow.utf8 import require_string_bytes, require_strings
from iskander.config.schema import LimitsConfig
from iskander.errors import LimitExceeded, MalformedInput
from iskander.memory.client_segment import SegmentRange
from iskander.protocols.flight.data import Parts, data_head
from iskander.protocols.flight.dictionaries import BatchReader, key_of
from iskander.protocols.flight.inputs import assemble, bucket_numbers
from iskander.protocols.flight.plan import Plan
from iskander.protocols.flight.results import result_columns

_I64 = struct.Struct("<q")


class BatchPortion(NamedTuple):
    """Rows of a batch that are one request.

    Attributes:
        tensors: Buffers of the contract's inputs, as a request has them.
        places: Which rows of the batch they are, in order; of a portion that is all of it, none.
        bucket: Number of the bucket that they are in.
    """

    rows: int
    tensors: list[memoryview]
    places: np.ndarray
    bucket: int


class RewrittenBatch(NamedTuple):
    """A batch as a plain one.

    Attributes:
        batch: Its header's numbers.
        kept: The passed-through columns, where the response cannot be plain.
        portions: The inputs, where they are not among the plain columns.
    """

    batch: ipc.Batch
    body: memoryview
    kept: list[pa.Array]
    portions: tuple[BatchPortion, ...]


class Converter:
    """One stream's slow way: the dictionaries that it has sent, and those that it was sent."""

    def __init__(self, plan: Plan, limits: LimitsConfig) -> None:
        self._plan = plan
        self._limits = limits
        self._reader = BatchReader(plan.schema, plan.schema_message, limits)
        self._sent: dict[int, tuple[bytes, pa.Buffer]] = {}
        self._sent_columns: list[pa.Array] = []
        self._sent_key: list[tuple[int, ...]] | None = None

    @property
    def held_bytes(self) -> int:
        """Memory of decoded dictionaries beside the messages that they came in."""
        return self._reader.held_bytes

    def work_bytes(self, batch: ipc.Batch, body: memoryview | SegmentRange) -> int:
        """Bytes that reading a message takes beside its own: decompressed, and dictionaries.

        Raises:
            MalformedInput: A compressed buffer is not inside the body.
            LimitExceeded: It is larger than allowed when it is expanded.
        """
        expanded = 0
        if batch.is_compressed:
            body = body if isinstance(body, memoryview) else body.read()
            expanded = self._require_expanded(batch, body)
        return expanded + self._reader.next_bytes

    def keep_dictionary(self, header: bytes, message: ipc.Message, body: memoryview) -> None:
        """Keep a dictionary for the batches after it; a new one takes the place of the old.

        Raises:
            LimitExceeded: The stream's dictionaries have too many bytes in all.
        """
        dictionary, is_delta, batch = ipc.read_dictionary(header, message)
        expanded = self._require_expanded(batch, body) if batch.is_compressed else 0
        body = body[: message.body_bytes]
        self._reader.keep(dictionary, header, body, expanded, is_delta=is_delta)

    def plain(self, header: bytes, batch: ipc.Batch, body: memoryview) -> RewrittenBatch:
        """A batch rewritten as a plain one.

        Raises:
            MalformedInput: It cannot be read.
            ContractError: A column holds what the model's input cannot.
            LimitExceeded: It is larger than allowed when it is expanded.
        """
        plan = self._plan
        if batch.is_compressed:
            self._require_expanded(batch, body)
        try:
            read, takeable = self._reader.read(header, body)
            self._require_decoded(takeable)
            portions = self._portions(takeable) if plan.is_converted else ()
            fields = plan.plain_schema
            columns = [read.column(field.name) for field in fields]
            plain = pa.RecordBatch.from_arrays(columns, schema=fields).serialize()
        except (pa.ArrowException, OSError, StopIteration) as error:
            text = str(error).split("\n", 1)[0]
            raise MalformedInput(f"the record batch cannot be read: {text}") from None
        kept = []
        if not plan.is_response_plain:
            kept = [read.column(field.name) for field in (*plan.passed, *plan.groups)]
        plain_header = ipc.header_of(plain)
        message = ipc.read_message(plain_header)
        plain_body = memoryview(plain).cast("B")[len(plain) - message.body_bytes :]
        plain_batch = ipc.read_batch(plain_header, message)._replace(rows=read.num_rows)
        return RewrittenBatch(plain_batch, plain_body, kept, portions)

    def _portions(self, read: pa.RecordBatch) -> tuple[BatchPortion, ...]:
        """The model's inputs, made of the columns: one request, or one for each bucket in use."""
        plan, rows = self._plan, read.num_rows
        contract = plan.contract
        if not rows:
            strings = sum(spec.is_string for spec in contract.inputs)
            empty = [memoryview(b"")] * (len(contract.inputs) + strings)
            return (BatchPortion(0, empty, np.arange(0), 0),)
        made = [maker.make(read) for maker in plan.makers]
        if not plan.buckets:
            portions: tuple[BatchPortion, ...] = (
                BatchPortion(rows, assemble(contract, made, None, 0), np.arange(0), 0),
            )
        else:
            numbers = bucket_numbers(made, plan.buckets)
            used = [(int(n), np.flatnonzero(numbers == n)) for n in np.unique(numbers)]
            sizes = [
                spec.buffer_bytes(len(places))
                for number, places in used
                for spec in plan.variants[number].inputs
            ]
            require_bytes(sum(sizes), self._limits)
            portions = tuple(
                BatchPortion(
                    len(places),
                    assemble(contract, made, places, plan.buckets[number]),
                    places,
                    number,
                )
                for number, places in used
            )
        self._require_texts(portions)
        return portions

    def _require_texts(self, portions: tuple[BatchPortion, ...]) -> None:
        """Refuse strings that are too many, or no UTF-8."""
        inputs, total = self._plan.contract.inputs, 0
        for portion in portions:
            joined = iter(portion.tensors[len(inputs) :])
            of = self._plan.variants[portion.bucket].inputs
            for spec, values in zip(of, portion.tensors, strict=False):
                if spec.is_string:
                    text = next(joined)
                    total += len(text)
                    require_string_bytes(total, self._limits)
                    count = portion.rows * spec.elements
                    require_strings(f"column `{spec.column}`", count, values, text)

    def assembled(
        self, rows: int, kept: list[pa.Array], results: bytes | memoryview
    ) -> pa.RecordBatch:
        """One response put together; may be called by another thread than the loop's."""
        plan = self._plan
        passed, groups = kept[: len(plan.passed)], kept[len(plan.passed) :]
        grouped = {field.name: group for field, group in zip(plan.groups, groups, strict=True)}
        columns = result_columns(plan.contract, rows, results, grouped)
        ordered = plan.order.of([*passed, *columns])
        return pa.RecordBatch.from_arrays(ordered, schema=plan.response_schema)

    def empty(self) -> list[pa.Array]:
        """Passed-through columns of no rows, with the dictionaries that were sent last."""
        if self._sent_columns:
            return self._sent_columns
        schema = pa.schema([*self._plan.passed, *self._plan.groups])
        return [column.combine_chunks() for column in schema.empty_table().columns]

    def frames(
        self, batch: pa.RecordBatch, kept: list[pa.Array], app_metadata: bytes
    ) -> list[Parts]:
        """The messages of one response; to be called in the stream's order.

        Dictionaries go before the batch that needs them, and only where they changed.

        Args:
            batch: The response.
            kept: Its passed-through columns, which alone have dictionaries.
            app_metadata: Of the batch.
        """
        columns = [column.slice(0, 0) for column in kept]
        key = [key_of_dictionaries(column) for column in kept]
        if key == self._sent_key:
            message = pa.ipc.read_message(batch.serialize())
            return [_frame(message, app_metadata)]
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        frames: list[Parts] = []
        reader = pa.ipc.MessageReader.open_stream(sink.getvalue())
        reader.read_next_message()  # The schema, which the stream began with.
        for message in reader:
            header = bytes(message.metadata)
            read = ipc.read_message(header)
            if read.kind != ipc.DICTIONARY_BATCH:
                frames.append(_frame(message, app_metadata))
                continue
            dictionary = ipc.read_dictionary(header, read)[0]
            sent = self._sent.get(dictionary)
            if sent is None or sent[0] != header or not sent[1].equals(message.body):
                self._sent[dictionary] = header, message.body
                frames.append(_frame(message, b""))
        self._sent_columns, self._sent_key = columns, key
        return frames

    def _require_expanded(self, batch: ipc.Batch, body: memoryview) -> int:
        """Refuse a bomb by what its buffers say they will expand to, before any is expanded."""
        total = 0
        for index in range(0, len(batch.buffers), 2):
            start, length = batch.buffers[index], batch.buffers[index + 1]
            if length == 0:
                continue
            if start < 0 or length < 8 or start + length > len(body):
                raise MalformedInput("a compressed buffer is not inside the body")
            total += max(_I64.unpack_from(body, start)[0], length - 8)
        require_bytes(total, self._limits)
        return total

    def _require_decoded(self, batch: pa.RecordBatch) -> None:
        # Where there are buckets, the smallest that the rows could be in; then by what they are in.
        inputs = self._plan.variants[0].inputs
        decoded = sum(spec.buffer_bytes(batch.num_rows) for spec in inputs)
        decoded += sum(maker.shared_bytes(batch) for maker in self._plan.makers)
        require_bytes(decoded, self._limits)
        # Not `nbytes`, which ends the process for some types (pyarrow 26, null and union arrays).
        buffers = (buffer for column in batch.columns for buffer in column.buffers() if buffer)
        require_bytes(sum(buffer.size for buffer in buffers), self._limits)
        used = {batch.schema.names[path.indices[0]] for m in self._plan.makers for path in m.paths}
        strings = sum(maker.text_bytes(batch) for maker in self._plan.makers) + sum(
            _string_bytes(column)
            for name, column in zip(batch.schema.names, batch.columns, strict=True)
            if name not in used
        )
        require_string_bytes(strings, self._limits)


def _frame(message: pa.ipc.Message, app_metadata: bytes) -> Parts:
    body = memoryview(message.body).cast("B")
    return data_head(bytes(message.metadata), app_metadata, len(body)), body


def key_of_dictionaries(array: pa.Array) -> tuple[int, ...]:
    """Where the dictionaries in a column are; what tells them from others while both are kept."""
    key: list[int] = []
    if pa.types.is_dictionary(array.type):
        key += key_of(array.dictionary)
    for child in _children(array):
        key += key_of_dictionaries(child)
    return tuple(key)


def require_bytes(count: int, limits: LimitsConfig) -> None:
    """Refuse a batch of too many bytes.

    Raises:
        LimitExceeded: Says how many may be.
    """
    if count > limits.bytes:
        raise LimitExceeded(
            f"a batch may have {limits.bytes} bytes, got {count}", wanted=limits.bytes
        )


def _string_bytes(array: pa.Array) -> int:
    """Bytes of text and binary values, at any depth."""
    kind = array.type
    if is_string(kind):
        values = array.buffers()[2]
        return 0 if values is None else int(values.size)
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        return sum(buffer.size for buffer in array.buffers()[2:])
    return sum(_string_bytes(child) for child in _children(array))


def _children(array: pa.Array) -> list[pa.Array]:
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return [array.storage]
    if pa.types.is_dictionary(kind):
        return [array.dictionary]
    if pa.types.is_struct(kind) or pa.types.is_union(kind):
        return [array.field(index) for index in range(kind.num_fields)]
    if pa.types.is_map(kind):
        return [array.keys, array.items]
    return [array.values] if kind.num_fields else []
