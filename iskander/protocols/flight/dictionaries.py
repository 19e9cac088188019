"""One stream's batches read by pyarrow, whose reader keeps the stream's dictionaries decoded.

A dictionary is decoded and validated once, when its message comes, and not for each batch that uses
it: a batch of 200 bytes may use a dictionary of 60 MiB. Uncompressed dictionaries are not copied:
their values stay in the message as it was received.

Runs on: gateway loop, and the thread that reads large messages; one at a time for each stream.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import pyarrow as pa

from iskander.arrow import ipc
from iskander.arrow.types import plain_of
from iskander.config.schema import LimitsConfig
from iskander.errors import LimitExceeded

PARTS_MAX: Final = 256
"""A dictionary and the deltas to it: each delta is joined to all before."""


class _Feed:
    """The file that a reader reads from: the messages that it is given."""

    closed = False

    def __init__(self) -> None:
        self._pieces: list[memoryview] = []

    def give(self, pieces: list[memoryview]) -> None:
        """The next bytes; what was left of those before is dropped."""
        self._pieces = [piece for piece in reversed(pieces) if len(piece)]

    def readable(self) -> bool:
        return True

    def read(self, size: int) -> memoryview | bytes:
        """The next bytes, at most `size`; those of one piece are not copied."""
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
    """A message of a dictionary.

    Attributes:
        message: The framed header, and the body.
        size: Bytes of header and body, and what they are expanded to beside that.
        expanded: The latter alone.
    """

    message: list[memoryview]
    size: int
    expanded: int


class _Checked:
    """A column's dictionary that was validated.

    Attributes:
        dictionary: Kept, so that its memory is not another's.
        plain: The same in a type that elements can be taken from.
    """

    def __init__(self, dictionary: pa.Array) -> None:
        dictionary.validate(full=True)
        self.dictionary = dictionary
        plain = plain_of(dictionary.type)
        is_plain = plain == dictionary.type or plain == pa.bool_()
        self.plain = dictionary if is_plain else dictionary.cast(plain)


class BatchReader:
    """Reads the batches of one stream.

    Args:
        schema: Of the stream.
        schema_message: The same, encapsulated, as the client sent it.
        limits: Of the server.

    Attributes:
        held_bytes: Memory of decoded dictionaries beside the messages that they came in.
    """

    def __init__(self, schema: pa.Schema, schema_message: bytes, limits: LimitsConfig) -> None:
        self._schema = schema
        self._schema_message = schema_message
        self._limits = limits
        self._count = sum(_count(field.type) for field in schema)
        self._top = [
            index for index, field in enumerate(schema) if pa.types.is_dictionary(field.type)
        ]
        self.has_nested = any(
            _count(field.type) and not pa.types.is_dictionary(field.type) for field in schema
        )
        self._parts: dict[int, list[_Part]] = {}
        self._total = 0
        self._pending: list[memoryview] = []
        self._pending_bytes = 0
        self._feed = _Feed()
        self._reader: pa.RecordBatchStreamReader | None = None
        self._checked: dict[int, _Checked] = {}
        self._has_read = False
        self.held_bytes = 0

    @property
    def next_bytes(self) -> int:
        """Bytes of dictionaries that the next batch has to look at."""
        if self._reader is None or self.has_nested:
            return self._total
        return self._pending_bytes

    def keep(
        self, dictionary: int, header: bytes, body: memoryview, expanded: int, *, is_delta: bool
    ) -> None:
        """Take a dictionary message; a new dictionary takes the place of the old.

        Args:
            dictionary: Its number.
            header: Of the message.
            body: Of the message; kept.
            expanded: Bytes of its buffers beside the body when they are decompressed.
            is_delta: It adds to the dictionary before.

        Raises:
            LimitExceeded: The stream's dictionaries have too many bytes in all.
        """
        if not is_delta:
            self._total -= sum(part.size for part in self._parts.pop(dictionary, []))
        known = self._parts.get(dictionary, [])
        size = len(header) + len(body) + expanded
        total = self._total + size
        if total > self._limits.bytes or len(known) >= PARTS_MAX:
            raise LimitExceeded(
                f"a stream's dictionaries may have {self._limits.bytes} bytes in all, and each "
                f"{PARTS_MAX} parts; got {total} bytes and {len(known) + 1} parts"
            )
        message = [memoryview(ipc.encapsulate(header)), body]
        self._parts[dictionary] = [*known, _Part(message, size, expanded)]
        self._total = total
        self._pending += message
        self._pending_bytes += total if is_delta else size
        self.held_bytes = sum(
            sum(part.size for part in parts) if len(parts) > 1 else parts[0].expanded
            for parts in self._parts.values()
        )
        if self._has_read or len(self._parts) >= self._count:
            self._decode()

    def read(self, header: bytes, body: memoryview) -> tuple[pa.RecordBatch, pa.RecordBatch]:
        """Read a batch.

        Returns:
            The batch, and the same with dictionaries that elements can be taken from.

        Raises:
            ArrowException, OSError, StopIteration: It cannot be read.
        """
        batch = self._next([memoryview(ipc.encapsulate(header)), body])
        batch.validate()
        plain: list[pa.Array] | None = None
        for index, column in enumerate(batch.columns):
            if index in self._top:
                checked = self._check(index, column)
                if checked.plain is not checked.dictionary:
                    plain = plain or list(batch.columns)
                    plain[index] = pa.DictionaryArray.from_arrays(
                        column.indices, checked.plain, ordered=column.type.ordered, safe=False
                    )
            else:
                column.validate(full=True)
        if plain is None:
            return batch, batch
        return batch, pa.RecordBatch.from_arrays(plain, names=batch.schema.names)

    def _check(self, index: int, column: pa.DictionaryArray) -> _Checked:
        """Validate a column; its dictionary only where it is another than before."""
        dictionary = column.dictionary
        checked = self._checked.get(index)
        if checked is None or key_of(checked.dictionary) != key_of(dictionary):
            checked = self._checked[index] = _Checked(dictionary)
        # Indices against the length of the dictionary, and not against its values again.
        pa.DictionaryArray.from_arrays(
            column.indices, pa.nulls(len(dictionary)), safe=False
        ).validate(full=True)
        return checked

    def _decode(self) -> None:
        """Decode and validate the dictionaries that came, with a batch of no rows."""
        try:
            empty = pa.RecordBatch.from_arrays(
                [pa.nulls(0, field.type) for field in self._schema], schema=self._schema
            )
            message = memoryview(empty.serialize()).cast("B")
            batch = self._next([message])
            for index in self._top:
                self._check(index, batch.column(index))
        except (pa.ArrowException, OSError, StopIteration):
            # The batch that uses it fails by the same cause, and its error names it.
            self._reader = None

    def _next(self, message: list[memoryview]) -> pa.RecordBatch:
        try:
            if self._reader is None:
                known = [part for parts in self._parts.values() for part in parts]
                pieces = [piece for part in known for piece in part.message]
                self._checked.clear()
                self._feed = _Feed()
                self._feed.give([memoryview(self._schema_message)])
                self._reader = pa.ipc.open_stream(pa.PythonFile(self._feed, "r"))
            else:
                pieces = self._pending
            self._pending, self._pending_bytes = [], 0
            self._feed.give([*pieces, *message])
            batch = self._reader.read_next_batch()
        except BaseException:
            # What it has read of the message is not known.
            self._reader = None
            raise
        self._has_read = True
        return batch


def key_of(array: pa.Array) -> tuple[int, ...]:
    """What tells an array in memory from another while both are kept: where it is."""
    key: list[int] = [len(array), array.offset]
    for buffer in array.buffers():
        key += (0, 0) if buffer is None else (buffer.address, buffer.size)
    if pa.types.is_dictionary(array.type):
        key += key_of(array.dictionary)
    return tuple(key)


def _count(arrow: pa.DataType) -> int:
    """Dictionaries in a type."""
    if isinstance(arrow, pa.BaseExtensionType):
        return _count(arrow.storage_type)
    if pa.types.is_dictionary(arrow):
        return 1 + _count(arrow.value_type)
    return sum(_count(arrow.field(index).type) for index in range(arrow.num_fields))
