"""Arrow IPC message headers: parsing of untrusted bytes, and rendering from a template.

A record batch on the wire is a flatbuffer header and a body. The header describes the batch by two
arrays of structs, in depth-first order of the columns:

    nodes    (length, null count)          one per array, children after parents
    buffers  (offset, length) in the body  validity, offsets, values ... of each array

Reading unpacks each array at once. Rendering patches both arrays into a header that pyarrow wrote
once for the schema. pyarrow reads schemas, and batches to convert (see `protocols.flight.convert`).
The peer sends all positions; a position out of bounds raises MalformedInput.

Runs on: gateway loop. Source: Arrow columnar format 1.5, Message.fbs and Schema.fbs; flatbuffers
binary format.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import pyarrow as pa

from iskander.arrow.types import with_small_values
from iskander.contract.tensors import ALIGNMENT
from iskander.errors import MalformedInput

SCHEMA, DICTIONARY_BATCH, RECORD_BATCH = 1, 2, 3
METADATA_V5 = 4
CONTINUATION = b"\xff\xff\xff\xff"
LEGACY_COMPRESSION = b"ARROW:experimental_compression"
"""Key of custom metadata by which Arrow 0.17 declares a codec; pyarrow still reads it in V4."""

_U8, _U16, _I16 = struct.Struct("<B"), struct.Struct("<H"), struct.Struct("<h")
_U32, _I32, _I64 = struct.Struct("<I"), struct.Struct("<i"), struct.Struct("<q")
_MESSAGE_VERSION, _MESSAGE_KIND, _MESSAGE_HEADER, _MESSAGE_BODY_LENGTH = 0, 1, 2, 3
_BATCH_LENGTH, _BATCH_NODES, _BATCH_BUFFERS, _BATCH_COMPRESSION = 0, 1, 2, 3
_SCHEMA_ENDIANNESS = 0
_DICTIONARY_ID, _DICTIONARY_DATA, _DICTIONARY_IS_DELTA = 0, 1, 2

Bytes = bytes | bytearray | memoryview


class Message(NamedTuple):
    """Fields of every message header. `table` is the position of the schema or batch."""

    version: int
    kind: int
    table: int
    body_bytes: int


class Batch(NamedTuple):
    """A record batch's header; nodes and buffers are flattened pairs."""

    rows: int
    nodes: tuple[int, ...]
    buffers: tuple[int, ...]
    is_compressed: bool


def read_message(header: Bytes) -> Message:
    """Read the fields common to all message kinds."""
    try:
        root = _U32.unpack_from(header, 0)[0]
        version = _read_scalar(header, root, _MESSAGE_VERSION, _I16)
        kind = _read_scalar(header, root, _MESSAGE_KIND, _U8)
        body_bytes = _read_scalar(header, root, _MESSAGE_BODY_LENGTH, _I64)
        table = _target_at(header, root, _MESSAGE_HEADER)
    except struct.error:
        raise MalformedInput("the message header is not an Arrow IPC header") from None
    return Message(version, kind, table, body_bytes)


def is_big_endian(header: Bytes, message: Message) -> bool:
    """Return whether a schema declares big-endian buffers."""
    try:
        return _read_scalar(header, message.table, _SCHEMA_ENDIANNESS, _I16) != 0
    except struct.error:
        raise MalformedInput("the schema header is truncated") from None


def read_batch(header: Bytes, message: Message) -> Batch:
    """Read a record batch's header."""
    if message.version != METADATA_V5 and LEGACY_COMPRESSION in bytes(header):
        # `is_compressed` does not include it, so no check would limit its decompressed size.
        key = LEGACY_COMPRESSION.decode()
        raise MalformedInput(f"compression declared by `{key}` is not supported; use version V5")
    try:
        table = message.table
        rows = _read_scalar(header, table, _BATCH_LENGTH, _I64)
        nodes = _read_pairs(header, _target_at(header, table, _BATCH_NODES))
        buffers = _read_pairs(header, _target_at(header, table, _BATCH_BUFFERS))
        is_compressed = _field_at(header, table, _BATCH_COMPRESSION) != 0
    except struct.error:
        raise MalformedInput("the record batch header is truncated") from None
    if is_compressed and message.version != METADATA_V5:
        # pyarrow writes such batches, and reads their compressed bytes as values.
        text = "compression with metadata version V4 is not supported: send version V5, or no codec"
        raise MalformedInput(text)
    return Batch(rows, nodes, buffers, is_compressed)


def read_dictionary(header: Bytes, message: Message) -> tuple[int, bool, Batch]:
    """Read a dictionary batch's id, its delta flag, and its batch."""
    try:
        dictionary = _read_scalar(header, message.table, _DICTIONARY_ID, _I64)
        is_delta = _read_scalar(header, message.table, _DICTIONARY_IS_DELTA, _U8) != 0
        data = _target_at(header, message.table, _DICTIONARY_DATA)
    except struct.error:
        raise MalformedInput("the dictionary batch header is truncated") from None
    batch = read_batch(header, message._replace(table=data))
    if min(batch.rows, 0, *batch.nodes[::2]) < 0:
        # pyarrow accepts the batch, and then fails on each access to the array's length.
        raise MalformedInput("an array of a dictionary batch has a negative length")
    return dictionary, is_delta, batch


def encapsulate(header: Bytes, body: Bytes = b"") -> bytes:
    """Join header and body to one encapsulated message.

    Layout:
        Continuation, metadata length, header, padding to 64 bytes, body.
    """
    padded = (8 + len(header) + ALIGNMENT - 1) & -ALIGNMENT
    padding = bytes(padded - 8 - len(header))
    return b"".join((CONTINUATION, _I32.pack(padded - 8), header, padding, body))


def header_of(encapsulated: pa.Buffer) -> bytes:
    """Return the header of an encapsulated message."""
    raw = memoryview(encapsulated)
    return bytes(raw[8 : 8 + _I32.unpack_from(raw, 4)[0]])


def error_text(error: Exception) -> str:
    """Return the first line of an error."""
    return str(error).split("\n", 1)[0]


def empty_messages(schema: pa.Schema) -> list[bytes]:
    """Return the encapsulated messages of a batch without rows; its dictionaries come first.

    Builds no value of the schema's types: arrays without values have the same messages in all
    sizes.
    """
    small = pa.schema([field.with_type(with_small_values(field.type)) for field in schema])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, small) as writer:
        columns = [pa.nulls(0, field.type) for field in small]
        writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=small))
    reader = pa.ipc.MessageReader.open_stream(sink.getvalue())
    reader.read_next_message()  # The schema.
    return [encapsulate(_with_zero_lengths(bytes(message.metadata))) for message in reader]


def null_dictionary(dictionary: int, length: int) -> bytes:
    """Return the encapsulated message of a dictionary with this id and `length` nulls."""
    column = pa.DictionaryArray.from_arrays(pa.array([], pa.int8()), pa.nulls(length))
    sink = pa.BufferOutputStream()
    batch = pa.record_batch([column, column], ["0", "1"])
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    # The second dictionary: pyarrow omits an id of 0, which leaves no position to patch.
    _, _, message, _ = pa.ipc.MessageReader.open_stream(sink.getvalue())
    header = bytearray(message.metadata)
    at = _field_at(header, read_message(header).table, _DICTIONARY_ID)
    _I64.pack_into(header, at, dictionary)
    return encapsulate(header)


def empty_batch(schema: pa.Schema) -> pa.RecordBatch:
    """Return a batch without rows, of any types; builds no value of them."""
    stream = (schema.serialize().to_pybytes(), *empty_messages(schema))
    return pa.ipc.open_stream(b"".join(stream)).read_next_batch()


def _with_zero_lengths(header: bytes) -> bytearray:
    """Return the header of a batch or dictionary with all its lengths set to zero.

    pyarrow writes one value for each child of a dense union, also without rows.
    """
    message = read_message(header)
    emptied, table = bytearray(header), message.table
    if message.kind == DICTIONARY_BATCH:
        table = _target_at(header, table, _DICTIONARY_DATA)
    for vector in (_BATCH_NODES, _BATCH_BUFFERS):
        at = _target_at(header, table, vector)
        size = 16 * _U32.unpack_from(header, at)[0]
        emptied[at + 4 : at + 4 + size] = bytes(size)
    root = _U32.unpack_from(header, 0)[0]
    for parent, field in ((table, _BATCH_LENGTH), (root, _MESSAGE_BODY_LENGTH)):
        at = _field_at(header, parent, field)
        if at:
            _I64.pack_into(emptied, at, 0)
    return emptied


class BatchTemplate:
    """Record batch header of a schema whose node and buffer counts do not depend on the data."""

    def __init__(self, schema: pa.Schema) -> None:
        # One null row: a null is valid in every type, and pyarrow omits fields that are zero, which
        # leaves no position to patch.
        nulls = [pa.nulls(1, with_small_values(field.type)) for field in schema]
        self._header = header_of(pa.RecordBatch.from_arrays(nulls, schema.names).serialize())
        header, root = self._header, _U32.unpack_from(self._header, 0)[0]
        table = _target_at(header, root, _MESSAGE_HEADER)
        self._rows_at = _field_at(header, table, _BATCH_LENGTH)
        self._body_bytes_at = _field_at(header, root, _MESSAGE_BODY_LENGTH)
        assert self._rows_at and self._body_bytes_at, "pyarrow omitted a field"
        nodes_at = _target_at(header, table, _BATCH_NODES)
        buffers_at = _target_at(header, table, _BATCH_BUFFERS)
        self._nodes_at, self._buffers_at = nodes_at + 4, buffers_at + 4
        self._nodes = struct.Struct(f"<{2 * _U32.unpack_from(header, nodes_at)[0]}q")
        self._buffers = struct.Struct(f"<{2 * _U32.unpack_from(header, buffers_at)[0]}q")

    def render(self, rows: int, nodes: list[int], buffers: list[int], body_bytes: int) -> bytearray:
        """Render a header; `nodes` and `buffers` are flat, as in `Batch`."""
        header = bytearray(self._header)
        _I64.pack_into(header, self._rows_at, rows)
        _I64.pack_into(header, self._body_bytes_at, body_bytes)
        self._nodes.pack_into(header, self._nodes_at, *nodes)
        self._buffers.pack_into(header, self._buffers_at, *buffers)
        return header


def read_number(buffer: Bytes, table: int, slot: int, kind: str, default: int = 0) -> int:
    """Read a scalar field; raises `struct.error` outside the buffer, as the next functions do."""
    at = _field_at(buffer, table, slot)
    return int(struct.unpack_from(kind, buffer, at)[0]) if at else default


def read_table(buffer: Bytes, table: int, slot: int) -> int:
    """Return the position of a table field."""
    return _target_at(buffer, table, slot)


def vector_length(buffer: Bytes, table: int, slot: int) -> int:
    """Return the length of a vector or text field; 0 if it is omitted."""
    if not _field_at(buffer, table, slot):
        return 0
    return int(_U32.unpack_from(buffer, _target_at(buffer, table, slot))[0])


def read_tables(buffer: Bytes, table: int, slot: int, count_max: int) -> list[int] | None:
    """Return the positions of a vector of tables; None above `count_max`."""
    count = vector_length(buffer, table, slot)
    if not count:
        return []
    if count > count_max:
        return None
    first = _target_at(buffer, table, slot) + 4
    offsets = struct.unpack_from(f"<{count}I", buffer, first)
    return [first + 4 * index + offset for index, offset in enumerate(offsets)]


def read_text(buffer: bytes, table: int, slot: int) -> bytes:
    """Return the bytes of a text field, which may be truncated; empty if it is omitted."""
    length = vector_length(buffer, table, slot)
    if not length:
        return b""
    start = _target_at(buffer, table, slot) + 4
    return buffer[start : start + length]


def _field_at(buffer: Bytes, table: int, slot: int) -> int:
    """Return the position of a table's field; 0 if omitted."""
    vtable = table - _I32.unpack_from(buffer, table)[0]
    if vtable < 0:
        # `unpack_from` counts a negative position from the end.
        raise struct.error
    if 4 + 2 * slot >= _U16.unpack_from(buffer, vtable)[0]:
        return 0
    offset = int(_U16.unpack_from(buffer, vtable + 4 + 2 * slot)[0])
    return table + offset if offset else 0


def _read_scalar(buffer: Bytes, table: int, slot: int, kind: struct.Struct) -> int:
    at = _field_at(buffer, table, slot)
    return int(kind.unpack_from(buffer, at)[0]) if at else 0


def _target_at(buffer: Bytes, table: int, slot: int) -> int:
    """Return the position that an offset field points to; `struct.error` if it is omitted."""
    at = _field_at(buffer, table, slot)
    if not at:
        raise struct.error
    return at + int(_U32.unpack_from(buffer, at)[0])


def _read_pairs(buffer: Bytes, vector: int) -> tuple[int, ...]:
    count = _U32.unpack_from(buffer, vector)[0]
    if count > len(buffer) // 16:
        raise struct.error
    return struct.unpack_from(f"<{2 * count}q", buffer, vector + 4)
