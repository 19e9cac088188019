"""pyarrow reader of one stream's batches, with decoded dictionaries kept between batches.

A dictionary is decoded and validated once, when its message arrives: a batch of 200 bytes may use a
dictionary of 60 MiB. Uncompressed dictionaries are not copied: their values stay in the received
message.

Runs on: gateway loop, and the thread that reads large messages; one at a time for each stream.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import pyarrow as pa

from iskander.arrow import ipc
from iskander.arrow.values import plain_array
from iskander.config.schema import LimitsConfig
from iskander.errors import LimitExceeded, MalformedInput

PARTS_MAX: Final = 256
"""Limit of messages of one dictionary: each delta copies all earlier ones."""


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

    def __init__(self, dictionary: pa.Array) -> None:
        dictionary.validate(full=True)
        self.dictionary = dictionary
        self.plain = plain_array(dictionary)


class BatchReader:
    """Reads the batches of one stream; `schema_message` is its schema as the client sent it."""

    def __init__(self, schema: pa.Schema, schema_message: bytes, limits: LimitsConfig) -> None:
        self._schema = schema
        self._schema_message = schema_message
        self._limits = limits
        self._dictionaries_count = sum(_count_dictionaries(field.type) for field in schema)
        self._dictionary_columns = [
            i for i, field in enumerate(schema) if pa.types.is_dictionary(field.type)
        ]
        others = [field.type for i, field in enumerate(schema) if i not in self._dictionary_columns]
        self._has_nested = any(map(_count_dictionaries, others))
        self._parts: dict[int, list[_Part]] = {}
        self._total = 0
        self._source = _Source()
        self._reader: pa.RecordBatchStreamReader | None = None
        self._validated: dict[int, _Validated] = {}
        self._has_read = False
        self._empty = memoryview(b"")  # Message of a batch without rows.
        self.decoded_bytes = 0

    @property
    def next_bytes(self) -> int:
        """Bytes of dictionaries that the next batch decodes or validates."""
        return self._total if self._reader is None or self._has_nested else 0

    def add_dictionary(
        self, dictionary: int, header: bytes, body: memoryview, expanded: int, *, is_delta: bool
    ) -> None:
        """Store a dictionary message, and decode it once the stream's dictionaries are complete.

        A delta extends the dictionary. `expanded` counts the bytes of decompressed buffers.
        """
        stored = self._parts.get(dictionary, [])
        if not stored and len(self._parts) >= self._dictionaries_count:
            known = f"its schema has {self._dictionaries_count} dictionaries"
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
        self._parts[dictionary] = parts
        self._total = total
        self.decoded_bytes += _decoded_bytes(parts) - _decoded_bytes(stored)
        if self._has_read or len(self._parts) >= self._dictionaries_count:
            self._decode(message)

    def read(self, header: bytes, body: memoryview) -> tuple[pa.RecordBatch, pa.RecordBatch]:
        """Read a batch; also returns it with dictionaries of types that support `take`.

        An invalid batch raises `ArrowException`, `OSError` or `StopIteration`.
        """
        batch = self._next([], [memoryview(ipc.encapsulate(header)), body])
        batch.validate()
        plain, is_plain = list(batch.columns), True
        for index, column in enumerate(batch.columns):
            if index not in self._dictionary_columns:
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

    def _validate(self, index: int, column: pa.DictionaryArray) -> _Validated:
        """Validate a column; its dictionary only if it changed."""
        dictionary = column.dictionary
        validated = self._validated.get(index)
        if validated is None or address_key(validated.dictionary) != address_key(dictionary):
            validated = self._validated[index] = _Validated(dictionary)
        # Validates the indices against the dictionary's length, without its values.
        nulls = pa.nulls(len(dictionary))
        pa.DictionaryArray.from_arrays(column.indices, nulls, safe=False).validate(full=True)
        return validated

    def _decode(self, dictionary: list[memoryview]) -> None:
        """Decode and validate a stored dictionary, by reading a batch without rows."""
        try:
            if not self._empty:
                self._empty = memoryview(ipc.empty_messages(self._schema)[-1])
            batch = self._next(dictionary, [self._empty])
            for index in self._dictionary_columns:
                self._validate(index, batch.column(index))
        except (pa.ArrowException, OSError, StopIteration):
            # The first batch that uses the dictionary fails with the same error.
            self._reader = None

    def _next(self, dictionary: list[memoryview], message: list[memoryview]) -> pa.RecordBatch:
        """Read a batch message after a new dictionary; a new reader reads all that are stored."""
        try:
            if self._reader is None:
                parts = [part for parts in self._parts.values() for part in parts]
                dictionary = [piece for part in parts for piece in part.message]
                self._validated.clear()
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
        key += address_key(array.dictionary)
    return tuple(key)


def _count_dictionaries(arrow: pa.DataType) -> int:
    """Number of dictionaries in a type, at any depth."""
    if isinstance(arrow, pa.BaseExtensionType):
        return _count_dictionaries(arrow.storage_type)
    if pa.types.is_dictionary(arrow):
        return 1 + _count_dictionaries(arrow.value_type)
    return sum(_count_dictionaries(arrow.field(index).type) for index in range(arrow.num_fields))
