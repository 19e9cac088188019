"""Conversion by pyarrow of batches that the codec cannot read itself.

Handles compressed bodies, dictionaries, inputs that are built from columns (`inputs`), and
passed-through columns that are lists, structs, maps, unions, views or run-end encoded. A request is
rewritten as a plain batch, with its inputs built beside it. pyarrow writes the response if a
passed-through column requires it.

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
from iskander.errors import MalformedInput
from iskander.memory.client_segment import SegmentRange
from iskander.protocols.flight.data import Parts, data_head
from iskander.protocols.flight.dictionaries import BatchReader, address_key
from iskander.protocols.flight.inputs import assemble, bucket_numbers
from iskander.protocols.flight.plan import Plan, require_limit
from iskander.protocols.flight.results import result_columns

_I64 = struct.Struct("<q")


class BatchPortion(NamedTuple):
    """Rows of one bucket, which form a request; `places` are their row numbers in a split batch."""

    rows: int
    tensors: list[memoryview]
    places: np.ndarray
    bucket: int


class RewrittenBatch(NamedTuple):
    """A batch rewritten as a plain one; see `ParsedBatch` for the other attributes."""

    batch: ipc.Batch
    body: memoryview
    passthrough: list[pa.Array]
    portions: tuple[BatchPortion, ...]


class Converter:
    """Converter of one stream; tracks the dictionaries received and sent."""

    def __init__(self, plan: Plan, limits: LimitsConfig) -> None:
        self._plan = plan
        self._limits = limits
        self.reader = BatchReader(plan.schema, plan.schema_message, limits)
        self._sent: dict[int, tuple[bytes, pa.Buffer]] = {}
        self._sent_columns: list[pa.Array] = []
        self._sent_key: list[tuple[int, ...]] | None = None

    def work_bytes(self, batch: ipc.Batch, body: memoryview | SegmentRange) -> int:
        """Temporary memory to read a message: decompressed buffers and dictionaries."""
        expanded = 0
        if batch.is_compressed:
            expanded = self._require_expanded(batch, body)
        return expanded + self.reader.next_bytes

    def add_dictionary(self, header: bytes, message: ipc.Message, body: memoryview) -> None:
        """Store a dictionary, or a delta of one, for the batches after it."""
        dictionary, is_delta, batch = ipc.read_dictionary(header, message)
        expanded = self._require_expanded(batch, body) if batch.is_compressed else 0
        body = body[: message.body_bytes]
        self.reader.add_dictionary(dictionary, header, body, expanded, is_delta=is_delta)

    def plain(self, header: bytes, batch: ipc.Batch, body: memoryview) -> RewrittenBatch:
        """Rewrite a batch as a plain one; checks its size decompressed and decoded."""
        plan = self._plan
        if batch.is_compressed:
            self._require_expanded(batch, body)
        try:
            read, takeable = self.reader.read(header, body)
            self._require_decoded(takeable)
            portions = self._portions(takeable) if plan.is_converted else ()
            fields = plan.plain_schema
            columns = [read.column(field.name) for field in fields]
            plain = pa.RecordBatch.from_arrays(columns, schema=fields).serialize()
        except (pa.ArrowException, OSError, StopIteration) as error:
            text = ipc.error_text(error)
            raise MalformedInput(f"the record batch cannot be read: {text}") from None
        passthrough = []
        if not plan.is_response_plain:
            fields = (*plan.passthrough, *plan.group_columns)
            passthrough = [read.column(field.name) for field in fields]
        plain_header = ipc.header_of(plain)
        message = ipc.read_message(plain_header)
        plain_body = memoryview(plain).cast("B")[len(plain) - message.body_bytes :]
        plain_batch = ipc.read_batch(plain_header, message)._replace(rows=read.num_rows)
        return RewrittenBatch(plain_batch, plain_body, passthrough, portions)

    def _portions(self, read: pa.RecordBatch) -> tuple[BatchPortion, ...]:
        """Build the model's inputs: one request, or one for each bucket in use."""
        plan, rows = self._plan, read.num_rows
        contract = plan.contract
        if not rows:
            strings = sum(spec.is_string for spec in contract.inputs)
            empty = [memoryview(b"")] * (len(contract.inputs) + strings)
            return (BatchPortion(0, empty, np.arange(0), 0),)
        built = [builder.make(read) for builder in plan.builders]
        if not plan.buckets:
            portions = [BatchPortion(rows, assemble(contract, built, None, 0), np.arange(0), 0)]
        else:
            numbers = bucket_numbers(built, plan.buckets)
            used = [(int(n), np.flatnonzero(numbers == n)) for n in np.unique(numbers)]
            inputs = ((at, spec) for number, at in used for spec in plan.variants[number].inputs)
            size = sum(spec.buffer_bytes(len(at)) for at, spec in inputs)
            require_limit("bytes", size, self._limits.bytes)
            portions = []
            for number, at in used:
                tensors = assemble(contract, built, at, plan.buckets[number])
                portions.append(BatchPortion(len(at), tensors, at, number))
        self._require_texts(portions)
        return tuple(portions)

    def _require_texts(self, portions: list[BatchPortion]) -> None:
        """Check the size and encoding of string inputs."""
        total = 0
        for portion in portions:
            specs = self._plan.variants[portion.bucket].inputs
            joined = iter(portion.tensors[len(specs) :])
            for spec, values in zip(specs, portion.tensors, strict=False):
                if spec.is_string:
                    text = next(joined)
                    total += len(text)
                    require_string_bytes(total, self._limits)
                    count = portion.rows * spec.elements
                    require_strings(f"column `{spec.column}`", count, values, text)

    def assemble(
        self, rows: int, passthrough: list[pa.Array], results: bytes | memoryview
    ) -> pa.RecordBatch:
        """Assemble one response. Runs on: any thread."""
        plan, count = self._plan, len(self._plan.passthrough)
        names = [field.name for field in plan.group_columns]
        groups = dict(zip(names, passthrough[count:], strict=True))
        columns = result_columns(plan.contract, rows, results, groups)
        ordered = plan.order.of([*passthrough[:count], *columns])
        return pa.RecordBatch.from_arrays(ordered, schema=plan.response_schema)

    def empty(self) -> list[pa.Array]:
        """Passed-through columns without rows, with the dictionaries sent last."""
        if self._sent_columns:
            return self._sent_columns
        schema = pa.schema([*self._plan.passthrough, *self._plan.group_columns])
        return list(ipc.empty_batch(schema).columns)

    def frames(
        self, batch: pa.RecordBatch, passthrough: list[pa.Array], app_metadata: bytes
    ) -> list[Parts]:
        """Render the messages of one response, after changed dictionaries; call in stream order.

        Only passed-through columns have dictionaries.
        """
        columns = [column.slice(0, 0) for column in passthrough]
        key = [_dictionaries_key(column) for column in passthrough]
        if key == self._sent_key:
            return [_frame(pa.ipc.read_message(batch.serialize()), app_metadata)]
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        frames: list[Parts] = []
        reader = pa.ipc.MessageReader.open_stream(sink.getvalue())
        reader.read_next_message()  # The schema, which was sent at the start of the stream.
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

    def _require_expanded(self, batch: ipc.Batch, body: memoryview | SegmentRange) -> int:
        """Reject a decompression bomb by its declared sizes, before decompression."""
        total = 0
        for start, length in zip(batch.buffers[::2], batch.buffers[1::2], strict=True):
            if length == 0:
                continue
            if start < 0 or length < 8 or start + length > len(body):
                raise MalformedInput("a compressed buffer is not inside the body")
            declared = body[start : start + 8]
            declared = declared.read() if isinstance(declared, SegmentRange) else declared
            total += max(_I64.unpack(declared)[0], length - 8)
        require_limit("bytes", total, self._limits.bytes)
        return total

    def _require_decoded(self, batch: pa.RecordBatch) -> None:
        # With buckets, a lower bound by the smallest one; `_portions` checks the exact size.
        inputs, builders = self._plan.variants[0].inputs, self._plan.builders
        decoded = sum(spec.buffer_bytes(batch.num_rows) for spec in inputs)
        decoded += sum(builder.view_index_bytes(batch) for builder in builders)
        require_limit("bytes", decoded, self._limits.bytes)
        # `nbytes` crashes the process for some types (pyarrow 26, null and union arrays).
        buffers = (buffer for column in batch.columns for buffer in column.buffers() if buffer)
        require_limit("bytes", sum(buffer.size for buffer in buffers), self._limits.bytes)
        names = batch.schema.names
        used = {names[path.indices[0]] for builder in builders for path in builder.paths}
        strings = sum(builder.text_bytes(batch) for builder in builders)
        unused = (batch.column(name) for name in names if name not in used)
        require_string_bytes(strings + sum(map(_string_bytes, unused)), self._limits)


def _frame(message: pa.ipc.Message, app_metadata: bytes) -> Parts:
    body = memoryview(message.body).cast("B")
    return data_head(bytes(message.metadata), app_metadata, len(body)), body


def _dictionaries_key(array: pa.Array) -> tuple[int, ...]:
    """Addresses of the dictionaries in a column; unique among live dictionaries."""
    key: list[int] = []
    if pa.types.is_dictionary(array.type):
        key += address_key(array.dictionary)
    for child in _children(array):
        key += _dictionaries_key(child)
    return tuple(key)


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
