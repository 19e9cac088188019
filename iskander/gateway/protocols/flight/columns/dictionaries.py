"""pyarrow reader of one stream's batches, with decoded dictionaries kept between batches.

A dictionary is decoded and validated once, when its message arrives: a batch of 200 bytes may use a
dictionary of 60 MiB. Uncompressed dictionaries are not copied: their values stay in the received
message. A delta copies the dictionary that it extends, and an invalid batch makes the reader decode
all dictionaries again: the work of both is limited by the bytes that the stream has sent.

Runs on: gateway loop, and the threads that read large messages; one at a time for each stream.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import pyarrow as pa

from iskander.arrow import ipc
from iskander.arrow.layout import SchemaLayout, children, dictionaries_of, is_view, without_values
from iskander.arrow.utf8 import require_string_bytes
from iskander.arrow.values import plain_array, view_bytes
from iskander.config.schema import LimitsConfig
from iskander.errors import LimitExceeded, MalformedInput

PARTS_MAX: Final = 256
"""Limit of messages of one dictionary: each delta copies all earlier ones."""
REPEATED_BYTES: Final = 4 << 20
"""Bytes of dictionaries that a stream may let the server decode again."""
REPEATED_PER_BYTE: Final = 8
"""The same for each received byte."""
REPEATED_LIMITS: Final = 16
"""Upper limit of both, in units of `limits.bytes`."""
REPEATED_FREE_BYTES: Final = 64 * 1024
"""Not counted: it costs as little as any message."""


class _Source:
    """File object that pyarrow's reader reads messages from."""

    closed = False

    def __init__(self) -> None:
        self._pieces: list[memoryview] = []

    def feed(self, pieces: list[memoryview]) -> None:
        """Replace the unread bytes."""
        self._pieces = [piece for piece in reversed(pieces) if len(piece)]

    def readable(self) -> bool:
        return True

    def read(self, size: int) -> memoryview | bytes:
        """Read at most `size` bytes; bytes of one piece are not copied."""
        found: list[memoryview] = []
        while self._pieces and size > 0:
            piece = self._pieces.pop()
            if len(piece) > size:
                self._pieces.append(piece[size:])
                piece = piece[:size]
            found.append(piece)
            size -= len(piece)
        return found[0] if len(found) == 1 else b"".join(found)


class _Part(NamedTuple):
    """A dictionary message: framed header and body. `size` includes `expanded`."""

    message: list[memoryview]
    size: int
    expanded: int


class _Validated:
    """A validated dictionary, and the same in a type that supports `take`.

    The reference keeps the addresses in use, so `address_key` stays unique.
    """

    def __init__(self, dictionary: pa.Array, limits: LimitsConfig) -> None:
        require_valid(dictionary, limits)
        self.dictionary = dictionary
        self.plain = plain_array(dictionary)
        self.copied_bytes = 0
        if self.plain is not dictionary:
            self.copied_bytes = sum(each.size for each in self.plain.buffers() if each)


class _IndexReader:
    """Reads batches without the values of dictionaries, so that their indices can be validated.

    Dictionaries inside structs or lists cannot be exchanged in an array that pyarrow has read. So
    the same messages are read by another schema, whose dictionaries have as many nulls.
    """

    def __init__(self, schema: pa.Schema, lengths: list[int]) -> None:
        fields = [field.with_type(without_values(field.type)) for field in schema]
        stream = [pa.schema(fields).serialize().to_pybytes()]
        stream += [ipc.null_dictionary(number, length) for number, length in enumerate(lengths)]
        self.lengths = lengths
        self._source = _Source()
        self._waiting = [memoryview(each) for each in stream]
        self._source.feed(self._waiting[:1])
        self._reader = pa.ipc.open_stream(pa.PythonFile(self._source, "r"))
        self._waiting = self._waiting[1:]

    def validate(self, message: list[memoryview]) -> None:
        """Validate a batch, also the indices of its dictionaries."""
        self._source.feed([*self._waiting, *message])
        self._waiting = []
        self._reader.read_next_batch().validate(full=True)


class BatchReader:
    """Reads the batches of one stream.

    Args:
        schema: Of the stream.
        schema_message: The schema as the client sent it.
        layout: Of the schema.
        limits: Limits of batches.
    """

    def __init__(
        self,
        schema: pa.Schema,
        schema_message: bytes,
        layout: SchemaLayout,
        limits: LimitsConfig,
    ) -> None:
        self._schema = schema
        self._schema_message = schema_message
        self._layout = layout
        self._limits = limits
        self._parts: dict[int, list[_Part]] = {}
        self._total = 0
        self._source = _Source()
        self._reader: pa.RecordBatchStreamReader | None = None
        self._validated: dict[int, _Validated] = {}
        self._nested: list[pa.Array] = []  # Validated dictionaries inside types.
        self._nested_keys: list[tuple[int, ...]] = []
        self._indices: _IndexReader | None = None
        self._has_read = self._has_decoded = False
        self._empty = memoryview(b"")  # Message of a batch without rows.
        self._repeatable_bytes = REPEATED_BYTES
        self._expanded_bytes = 0  # Memory of dictionaries beside their messages.

    @property
    def decoded_bytes(self) -> int:
        """Memory in addition to the messages of dictionaries: expanded, joined, or copied."""
        copies = sum(each.copied_bytes for each in self._validated.values())
        return self._expanded_bytes + copies

    @property
    def dictionary_bytes(self) -> int:
        """Bytes of all dictionaries, decompressed."""
        return self._total

    @property
    def next_bytes(self) -> int:
        """Bytes of dictionaries that the next batch decodes."""
        return self._total if self._reader is None else 0

    @property
    def has_nested(self) -> bool:
        """Whether batches are read twice."""
        return bool(self._layout.nested_columns)

    def joined_bytes(self, dictionary: int) -> int:
        """Bytes that a delta of a dictionary decodes again."""
        if self._reader is None or self._layout.has_inner_dictionaries:
            return self._total
        return _total_bytes(self._parts.get(dictionary, []))

    def add_dictionary(
        self, dictionary: int, header: bytes, body: memoryview, expanded: int, *, is_delta: bool
    ) -> None:
        """Store a dictionary message, and decode it once the stream's dictionaries are complete.

        A delta extends the dictionary. `expanded` counts the bytes of decompressed buffers.
        """
        stored = self._parts.get(dictionary, [])
        if not stored and len(self._parts) >= self._layout.dictionaries:
            known = f"its schema has {self._layout.dictionaries} dictionaries"
            raise MalformedInput(f"the stream has another dictionary with id {dictionary}; {known}")
        message = [memoryview(ipc.encapsulate(header)), body]
        parts = [
            *(stored if is_delta else []),
            _Part(message, len(header) + len(body) + expanded, expanded),
        ]
        total = self._total - _total_bytes(stored) + _total_bytes(parts)
        if total > self._limits.bytes or len(parts) > PARTS_MAX:
            sizes = f"{total} bytes, limit {self._limits.bytes} (`limits.bytes`)"
            count = f"{len(parts)} parts, limit {PARTS_MAX}"
            raise LimitExceeded(f"dictionaries of the stream too large: {sizes}; this one: {count}")
        self._earn(len(header) + len(body))
        if self._has_decoded and (is_delta or self._reader is None):
            self._repeat(self.joined_bytes(dictionary))
        self._parts[dictionary] = parts
        self._total = total
        self._expanded_bytes += _decoded_bytes(parts) - _decoded_bytes(stored)
        if self._has_read or len(self._parts) >= self._layout.dictionaries:
            self._decode(message)

    def read(self, header: bytes, body: memoryview) -> tuple[pa.RecordBatch, pa.RecordBatch]:
        """Read a batch; also returns it with dictionaries of types that support `take`.

        An invalid batch raises `ArrowException`, `OSError` or `StopIteration`.
        """
        layout = self._layout
        message = [memoryview(ipc.encapsulate(header)), body]
        self._earn(len(header) + len(body))
        if self._reader is None and self._has_decoded:
            self._repeat(self._total)
        batch = self._next([], message)
        batch.validate()
        if layout.view_columns:
            # Views may share their bytes, and validation reads those of each.
            views = sum(_view_bytes(batch.column(index)) for index in layout.view_columns)
            require_string_bytes(views, self._limits)
        if not layout.dictionaries:
            batch.validate(full=True)
            return batch, batch
        if layout.nested_columns:
            self._validate_nested(batch)
            self._validate_indices(batch, message)
        plain, is_plain = list(batch.columns), True
        for index, column in enumerate(batch.columns):
            if index not in layout.dictionary_columns:
                if not layout.nested_columns:
                    column.validate(full=True)
                continue
            validated = self._validate(index, column)
            if validated.plain is not validated.dictionary:
                is_plain = False
                plain[index] = pa.DictionaryArray.from_arrays(
                    column.indices, validated.plain, ordered=column.type.ordered, safe=False
                )
        if is_plain:
            return batch, batch
        return batch, pa.RecordBatch.from_arrays(plain, names=batch.schema.names)

    def _earn(self, size: int) -> None:
        """Count received bytes."""
        most = REPEATED_LIMITS * self._limits.bytes
        self._repeatable_bytes = min(self._repeatable_bytes + REPEATED_PER_BYTE * size, most)

    def _repeat(self, size: int) -> None:
        """Count dictionary bytes that are decoded again; raises LimitExceeded if they are many."""
        if size <= REPEATED_FREE_BYTES:
            return
        if size > self._repeatable_bytes:
            text = f"deltas or errors of the stream make the server decode {size} bytes of "
            text += f"dictionaries again; {self._repeatable_bytes} are left of {REPEATED_PER_BYTE} "
            text += "for each received byte: send larger deltas, or whole dictionaries"
            raise LimitExceeded(text)
        self._repeatable_bytes -= size

    def _validate(self, index: int, column: pa.DictionaryArray) -> _Validated:
        """Validate a column; its dictionary only if it changed."""
        dictionary = column.dictionary
        validated = self._validated.get(index)
        if validated is None or address_key(validated.dictionary) != address_key(dictionary):
            validated = self._validated[index] = _Validated(dictionary, self._limits)
        # Validates the indices against the dictionary's length, without its values.
        nulls = pa.nulls(len(dictionary))
        pa.DictionaryArray.from_arrays(column.indices, nulls, safe=False).validate(full=True)
        return validated

    def _validate_nested(self, batch: pa.RecordBatch) -> None:
        """Validate the dictionaries inside the types of columns, if they changed."""
        columns = map(batch.column, self._layout.nested_columns)
        found = [dictionary for column in columns for dictionary in dictionaries_of(column)]
        keys = [deep_key(dictionary) for dictionary in found]
        if keys != self._nested_keys:
            for dictionary, key in zip(found, keys, strict=True):
                if key not in self._nested_keys:
                    require_valid(dictionary, self._limits)
            self._nested, self._nested_keys = found, keys

    def _validate_indices(self, batch: pa.RecordBatch, message: list[memoryview]) -> None:
        """Validate a batch without the values of its dictionaries."""
        lengths = [len(each) for column in batch.columns for each in dictionaries_of(column)]
        if self._indices is None or self._indices.lengths != lengths:
            self._indices = _IndexReader(self._schema, lengths)
        reader, self._indices = self._indices, None
        reader.validate(message)
        self._indices = reader  # Not after an error: its position is undefined.

    def _decode(self, dictionary: list[memoryview]) -> None:
        """Decode and validate a stored dictionary, by reading a batch without rows."""
        try:
            if not self._empty:
                self._empty = memoryview(ipc.empty_messages(self._schema)[-1])
            batch = self._next(dictionary, [self._empty])
            for index in self._layout.dictionary_columns:
                self._validate(index, batch.column(index))
            self._validate_nested(batch)
        except (pa.ArrowException, OSError, StopIteration):
            # The first batch that uses the dictionary fails with the same error.
            self._reader = None

    def _next(self, dictionary: list[memoryview], message: list[memoryview]) -> pa.RecordBatch:
        """Read a batch message after a new dictionary; a new reader reads all that are stored."""
        try:
            if self._reader is None:
                parts = [part for parts in self._parts.values() for part in parts]
                dictionary = [piece for part in parts for piece in part.message]
                self._has_decoded = bool(dictionary)
                self._validated.clear()
                self._nested, self._nested_keys = [], []
                self._source = _Source()
                self._source.feed([memoryview(self._schema_message)])
                self._reader = pa.ipc.open_stream(pa.PythonFile(self._source, "r"))
            self._source.feed([*dictionary, *message])
            batch = self._reader.read_next_batch()
        except BaseException:
            # The reader's position is undefined.
            self._reader = None
            raise
        self._has_read = True
        return batch


def require_valid(dictionary: pa.Array, limits: LimitsConfig) -> None:
    """Validate a dictionary, with those inside it; raises LimitExceeded for large string views."""
    dictionary.validate()
    count = _view_bytes(dictionary)
    if count > limits.bytes:
        text = f"the string views of a dictionary refer to {count} bytes in total"
        raise LimitExceeded(f"{text}, limit {limits.bytes} (`limits.bytes`)", wanted=limits.bytes)
    dictionary.validate(full=True)


def _view_bytes(array: pa.Array) -> int:
    if is_view(array.type):
        return view_bytes(array)
    if pa.types.is_dictionary(array.type):
        return 0
    return sum(map(_view_bytes, children(array)))


def _total_bytes(parts: list[_Part]) -> int:
    return sum(part.size for part in parts)


def _decoded_bytes(parts: list[_Part]) -> int:
    """Memory in addition to the messages: joined deltas, or decompressed buffers."""
    return _total_bytes(parts) if len(parts) > 1 else sum(part.expanded for part in parts)


def address_key(array: pa.Array) -> tuple[int, ...]:
    """Addresses and lengths of an array's buffers; unique among live arrays."""
    key: list[int] = [len(array), array.offset]
    for buffer in array.buffers():
        key += (0, 0) if buffer is None else (buffer.address, buffer.size)
    if pa.types.is_dictionary(array.type):
        key += deep_key(array.dictionary)
    return tuple(key)


def deep_key(array: pa.Array) -> tuple[int, ...]:
    """Addresses of an array and of all dictionaries in it; unique among live arrays."""
    if pa.types.is_dictionary(array.type):
        return address_key(array)
    key = address_key(array)
    for dictionary in dictionaries_of(array):
        key += deep_key(dictionary)
    return key
