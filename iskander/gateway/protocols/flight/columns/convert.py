"""Conversion by pyarrow of batches that the codec cannot read itself.

Handles compressed bodies, dictionaries, inputs that are built from columns (`inputs`), and
passed-through columns that are lists, structs, maps, unions, views or run-end encoded. A request is
rewritten as a plain batch, with its inputs built beside it. pyarrow writes the response if a
passed-through column requires it.

Runs on: gateway loop, and the thread that reads large batches.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from iskander.arrow import ipc
from iskander.arrow.layout import children, dictionaries_of, is_view
from iskander.arrow.types import is_string
from iskander.arrow.utf8 import require_string_bytes, require_strings
from iskander.arrow.values import view_bytes
from iskander.config.schema import LimitsConfig
from iskander.errors import MalformedInput
from iskander.gateway.protocols.flight.batch_message import BatchMessage
from iskander.gateway.protocols.flight.columns.dictionaries import BatchReader, deep_key
from iskander.gateway.protocols.flight.columns.inputs import assemble, bucket_numbers
from iskander.gateway.protocols.flight.columns.results import result_columns
from iskander.gateway.protocols.flight.data import Parts, data_head
from iskander.gateway.protocols.flight.plan import Plan, require_limit
from iskander.interprocess.memory.client_segment import SegmentRange

_I64 = struct.Struct("<q")


class BatchPortion(NamedTuple):
    """Rows of one bucket, which form a request; `places` are their numbers in a split batch."""

    rows: int
    tensors: list[memoryview]
    places: np.ndarray
    bucket: int


class Cost(NamedTuple):
    """Cost of a batch, known from its header and the schema.

    Attributes:
        lengths: Bytes of each buffer, decompressed.
        decoded_bytes: Bytes of the decompressed and decoded batch, without those of its strings.
        work_bytes: Temporary memory to decode it.
    """

    lengths: Sequence[int]
    decoded_bytes: int
    work_bytes: int


class LongMessage(Exception):
    """Reading this message costs milliseconds, and must happen on a thread."""


class RewrittenBatch(NamedTuple):
    """A batch rewritten as a plain one; see `ParsedBatch` for the other attributes."""

    batch: ipc.Batch
    body: memoryview
    passthrough: list[pa.Array]
    portions: tuple[BatchPortion, ...]


class Converter:
    """Converter of one stream; tracks the dictionaries received and sent.

    Attributes:
        is_whole: All rows of a batch form one portion, in the largest bucket that a row needs.
    """

    is_whole = False

    def __init__(self, plan: Plan, limits: LimitsConfig) -> None:
        self._plan = plan
        self._limits = limits
        self.reader = BatchReader(plan.schema, plan.schema_message, plan.layout, limits)
        self._sent: dict[int, tuple[bytes, bytes]] = {}  # Header, and digest of the body.
        self._sent_columns: list[pa.Array] = []
        self._sent_key: list[tuple[int, ...]] | None = None

    def cost(self, batch: ipc.Batch, body: memoryview | SegmentRange) -> Cost:
        """The cost of a batch; raises LimitExceeded if it is too large when decoded."""
        plan, rows = self._plan, batch.rows
        lengths: Sequence[int] = batch.buffers[1::2]
        expanded = 0
        if batch.is_compressed:
            lengths = self._expanded_lengths(batch, body)
            expanded = sum(lengths)
        elif min(lengths, default=0) < 0:
            raise MalformedInput("a buffer of the record batch has a negative length")
        require_limit("bytes", sum(lengths), self._limits.bytes)
        if self.reader.has_nested:
            expanded *= 2  # The batch is read a second time to validate indices.
        # With buckets, a lower bound by the smallest one; `_portions` checks the exact size.
        decoded = rows * plan.row_bytes_min
        require_limit("bytes", decoded, self._limits.bytes)
        first = expanded + self.reader.next_bytes
        if not plan.is_converted:
            return Cost(lengths, first, first)
        decoded = rows * plan.row_decoded_bytes
        return Cost(lengths, first + decoded, first + rows * plan.row_work_bytes)

    def dictionary_work_bytes(self, message: BatchMessage) -> int:
        """Temporary memory to decode a dictionary; raises LimitExceeded if it is too large."""
        dictionary, is_delta, batch = message.dictionary
        work = 0
        if batch.is_compressed:
            work = sum(self._expanded_lengths(batch, message.body))
            require_limit("bytes", work, self._limits.bytes)
        return work + (self.reader.joined_bytes(dictionary) if is_delta else self.reader.next_bytes)

    def add_dictionary(self, message: BatchMessage, body: memoryview) -> None:
        """Store a dictionary, or a delta of one, for the batches after it; `body` is private."""
        dictionary, is_delta, batch = message.dictionary
        expanded = sum(self._expanded_lengths(batch, body)) if batch.is_compressed else 0
        require_limit("bytes", expanded, self._limits.bytes)
        body, header = body[: message.head.body_bytes], bytes(message.header)
        self.reader.add_dictionary(dictionary, header, body, expanded, is_delta=is_delta)

    def plain(
        self, message: BatchMessage, body: memoryview, cost: Cost, text_bytes_max: int
    ) -> RewrittenBatch:
        """Rewrite a batch as a plain one; `body` is private.

        Raises:
            LongMessage: The decoded strings have more than `text_bytes_max` bytes.
            MalformedInput: pyarrow cannot read the batch.
        """
        plan = self._plan
        try:
            # pyarrow can take rows of `selectable`, whose dictionaries may have other types.
            read, selectable = self.reader.read(bytes(message.header), body)
            self._require_decoded(selectable, cost, text_bytes_max)
            portions = self._portions(selectable) if plan.is_converted else ()
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
        plain_head = ipc.read_message(plain_header)
        plain_body = memoryview(plain).cast("B")[len(plain) - plain_head.body_bytes :]
        plain_batch = ipc.read_batch(plain_header, plain_head)._replace(rows=read.num_rows)
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
            if self.is_whole:
                numbers[:] = numbers.max()
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

    def serialized(self, batch: pa.RecordBatch, app_metadata: bytes) -> Parts:
        """Render the message of a response, without dictionaries. Runs on: any thread."""
        return _frame(pa.ipc.read_message(batch.serialize()), app_metadata)

    def has_sent(self, passthrough: list[pa.Array]) -> bool:
        """Whether the dictionaries of a response are those sent last."""
        return self._sent_key == list(map(_dictionaries_key, passthrough))

    def changed_dictionaries(
        self, batch: pa.RecordBatch, passthrough: list[pa.Array]
    ) -> list[Parts]:
        """Render the changed dictionaries of a response; call in stream order, on any thread.

        Only passed-through columns have dictionaries.
        """
        columns = [column.slice(0, 0) for column in passthrough]
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch.slice(0, 0))
        frames: list[Parts] = []
        reader = pa.ipc.MessageReader.open_stream(sink.getvalue())
        reader.read_next_message()  # The schema, which was sent at the start of the stream.
        for message in reader:
            header = bytes(message.metadata)
            read = ipc.read_message(header)
            if read.kind != ipc.DICTIONARY_BATCH:
                continue
            dictionary = ipc.read_dictionary(header, read)[0]
            sent = header, sha256(message.body or b"").digest()
            if self._sent.get(dictionary) != sent:
                self._sent[dictionary] = sent
                frames.append(_frame(message, b""))
        self._sent_columns = columns
        self._sent_key = list(map(_dictionaries_key, passthrough))
        return frames

    def _expanded_lengths(self, batch: ipc.Batch, body: memoryview | SegmentRange) -> list[int]:
        """The declared sizes of compressed buffers, before decompression."""
        lengths = []
        for start, length in zip(batch.buffers[::2], batch.buffers[1::2], strict=True):
            if length == 0:
                lengths.append(0)
                continue
            if start < 0 or length < 8 or start + length > len(body):
                raise MalformedInput("a compressed buffer is not inside the body")
            declared = body[start : start + 8]
            declared = declared.read() if isinstance(declared, SegmentRange) else declared
            size = int(_I64.unpack(declared)[0])
            lengths.append(length - 8 if size < 0 else size)  # -1: the buffer is not compressed.
        return lengths

    def _require_decoded(self, batch: pa.RecordBatch, cost: Cost, text_bytes_max: int) -> None:
        """Check the sizes that depend on values: list views, and strings when decoded."""
        plan, builders = self._plan, self._plan.builders
        index_bytes = sum(builder.view_index_bytes(batch) for builder in builders)
        decoded = batch.num_rows * plan.row_bytes_min + index_bytes
        require_limit("bytes", decoded, self._limits.bytes)
        decoded = index_bytes
        strings = sum(builder.text_bytes(batch) for builder in builders)
        decoded += strings
        strings += sum(cost.lengths[index] for index in plan.text_buffers)
        strings += sum(_string_bytes(batch.column(index)) for index in plan.walked_columns)
        require_string_bytes(strings, self._limits)
        if decoded > text_bytes_max:
            raise LongMessage


def _frame(message: pa.ipc.Message, app_metadata: bytes) -> Parts:
    body = memoryview(message.body).cast("B")
    return data_head(bytes(message.metadata), app_metadata, len(body)), body


def _dictionaries_key(array: pa.Array) -> tuple[int, ...]:
    """Addresses of the dictionaries in a column; unique among live dictionaries."""
    return tuple(number for each in dictionaries_of(array) for number in deep_key(each))


def _string_bytes(array: pa.Array) -> int:
    """Bytes of text and binary values, at any depth and in dictionaries."""
    kind = array.type
    if is_string(kind):
        values = array.buffers()[2]
        return 0 if values is None else int(values.size)
    if is_view(kind):
        return view_bytes(array)
    inner = [array.dictionary] if pa.types.is_dictionary(kind) else children(array)
    return sum(map(_string_bytes, inner))
