"""Arrow IPC message headers: read from hostile bytes, and written from a template.

A record batch on the wire is a flatbuffer header and a body. All that the header says of a batch
are two arrays of structs, in the order of a depth-first walk over the columns:

    nodes    (length, null count)          one for each array, children after parents
    buffers  (offset, length) in the body  validity, offsets, values ... of each array

Those are read with two unpacks, and written by patching them into the header that pyarrow made
for the same schema once. pyarrow reads schemas, and every batch that is more than this (see
`frontends.flight_codec`). Every position comes from the peer, so every read is checked against
the header's end.

Runs on: gateway loop. Source: Arrow columnar format 1.5, Message.fbs and Schema.fbs; flatbuffers
binary format.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import pyarrow as pa

from iskander.contract.tensors import ALIGNMENT
from iskander.errors import MalformedInput

SCHEMA, DICTIONARY_BATCH, RECORD_BATCH = 1, 2, 3
METADATA_V5 = 4
CONTINUATION = b"\xff\xff\xff\xff"

_U8, _U16, _I16 = struct.Struct("<B"), struct.Struct("<H"), struct.Struct("<h")
_U32, _I32, _I64 = struct.Struct("<I"), struct.Struct("<i"), struct.Struct("<q")
_MESSAGE_VERSION, _MESSAGE_KIND, _MESSAGE_HEADER, _MESSAGE_BODY_LENGTH = 0, 1, 2, 3
_BATCH_LENGTH, _BATCH_NODES, _BATCH_BUFFERS, _BATCH_COMPRESSION = 0, 1, 2, 3
_SCHEMA_ENDIANNESS = 0
_DICTIONARY_ID, _DICTIONARY_DATA, _DICTIONARY_IS_DELTA = 0, 1, 2

Bytes = bytes | bytearray | memoryview


class Message(NamedTuple):
    """What every header says. `table` is the position of the schema or batch in the header."""

    version: int
    kind: int
    table: int
    body_bytes: int


class Batch(NamedTuple):
    """A record batch's header.

    Attributes:
        nodes: Length and null count of each array, flat.
        buffers: Offset and length of each buffer in the body, flat.
    """

    rows: int
    nodes: tuple[int, ...]
    buffers: tuple[int, ...]
    is_compressed: bool


def read_message(header: Bytes) -> Message:
    """Read what kind of message a header is.

    Raises:
        MalformedInput: The bytes are no flatbuffer message.
    """
    try:
        root = _U32.unpack_from(header, 0)[0]
        version = _scalar(header, root, _MESSAGE_VERSION, _I16)
        kind = _scalar(header, root, _MESSAGE_KIND, _U8)
        body_bytes = _scalar(header, root, _MESSAGE_BODY_LENGTH, _I64)
        table = _reference(header, root, _MESSAGE_HEADER)
    except struct.error:
        raise MalformedInput("the message header is not an Arrow IPC header") from None
    return Message(version, kind, table, body_bytes)


def is_big_endian(header: Bytes, message: Message) -> bool:
    """Whether a schema announces big-endian buffers."""
    try:
        return _scalar(header, message.table, _SCHEMA_ENDIANNESS, _I16) != 0
    except struct.error:
        raise MalformedInput("the schema's header ends early") from None


def read_batch(header: Bytes, message: Message) -> Batch:
    """Read a record batch's header.

    Raises:
        MalformedInput: It ends early, or its arrays are not where it says.
    """
    try:
        table = message.table
        rows = _scalar(header, table, _BATCH_LENGTH, _I64)
        nodes = _pairs(header, _reference(header, table, _BATCH_NODES))
        buffers = _pairs(header, _reference(header, table, _BATCH_BUFFERS))
        is_compressed = _field(header, table, _BATCH_COMPRESSION) != 0
    except struct.error:
        raise MalformedInput("the record batch's header ends early") from None
    return Batch(rows, nodes, buffers, is_compressed)


def read_dictionary(header: Bytes, message: Message) -> tuple[int, bool, Batch]:
    """Read a dictionary batch's id, whether it adds to the one before, and its batch.

    Raises:
        MalformedInput: It ends early, or an array of it has a negative length.
    """
    try:
        dictionary = _scalar(header, message.table, _DICTIONARY_ID, _I64)
        is_delta = _scalar(header, message.table, _DICTIONARY_IS_DELTA, _U8) != 0
        data = _reference(header, message.table, _DICTIONARY_DATA)
    except struct.error:
        raise MalformedInput("the dictionary batch's header ends early") from None
    batch = read_batch(header, message._replace(table=data))
    if min(batch.rows, 0, *batch.nodes[::2]) < 0:
        # pyarrow reads it, and every look at the array's length fails.
        raise MalformedInput("an array of a dictionary batch has a negative length")
    return dictionary, is_delta, batch


def encapsulate(header: Bytes, body: Bytes = b"") -> bytes:
    """Header and body as one encapsulated message, as a file or stream holds it.

    Layout:
        Continuation, metadata length, header, padding to 64 bytes, body.
    """
    prefix, padding = _framing(len(header))
    return b"".join((prefix, header, padding, body))


def header_of(encapsulated: pa.Buffer) -> bytes:
    """The flatbuffer of an encapsulated message, without its framing."""
    raw = memoryview(encapsulated)
    return bytes(raw[8 : 8 + _I32.unpack_from(raw, 4)[0]])


class BatchTemplate:
    """The header of every record batch of one schema, with the numbers to be filled in.

    Args:
        schema: Of columns whose count of nodes and buffers does not depend on the data.
    """

    def __init__(self, schema: pa.Schema) -> None:
        # A row of nulls is in any type's range, and keeps pyarrow from leaving out fields that
        # are zero and would have no place to be written to.
        nulls = [pa.nulls(1, _small_type(field.type)) for field in schema]
        row = pa.RecordBatch.from_arrays(nulls, schema.names)
        self._header = header_of(row.serialize())
        header, root = self._header, _U32.unpack_from(self._header, 0)[0]
        table = _reference(header, root, _MESSAGE_HEADER)
        self._rows_at = _field(header, table, _BATCH_LENGTH)
        self._body_bytes_at = _field(header, root, _MESSAGE_BODY_LENGTH)
        assert self._rows_at and self._body_bytes_at, "pyarrow left out a field"
        nodes_at = _reference(header, table, _BATCH_NODES)
        buffers_at = _reference(header, table, _BATCH_BUFFERS)
        self._nodes_at, self._buffers_at = nodes_at + 4, buffers_at + 4
        self._nodes = struct.Struct(f"<{2 * _U32.unpack_from(header, nodes_at)[0]}q")
        self._buffers = struct.Struct(f"<{2 * _U32.unpack_from(header, buffers_at)[0]}q")

    def render(self, rows: int, nodes: list[int], buffers: list[int], body_bytes: int) -> bytearray:
        """A header with these numbers.

        Args:
            rows: Rows of the batch.
            nodes: Length and null count of each array, flat.
            buffers: Offset and length of each buffer, flat.
            body_bytes: Length of the body.
        """
        header = bytearray(self._header)
        _I64.pack_into(header, self._rows_at, rows)
        _I64.pack_into(header, self._body_bytes_at, body_bytes)
        self._nodes.pack_into(header, self._nodes_at, *nodes)
        self._buffers.pack_into(header, self._buffers_at, *buffers)
        return header


def _small_type(arrow: pa.DataType) -> pa.DataType:
    """A type of as many arrays and buffers, whose rows are small whatever size the type declares.

    A schema may declare lists of 2 billion values in a few bytes.
    """
    if pa.types.is_fixed_size_list(arrow):
        return pa.list_(_small_type(arrow.value_type), 1)
    return pa.binary(1) if pa.types.is_fixed_size_binary(arrow) else arrow


def _framing(header_bytes: int) -> tuple[bytes, bytes]:
    padded = (8 + header_bytes + ALIGNMENT - 1) & -ALIGNMENT
    return CONTINUATION + _I32.pack(padded - 8), bytes(padded - 8 - header_bytes)


def _field(buffer: Bytes, table: int, slot: int) -> int:
    """Position of a table's field; 0 where it is left out."""
    vtable = table - _I32.unpack_from(buffer, table)[0]
    if vtable < 0:
        # A negative position would be taken from the end by `unpack_from`.
        raise struct.error
    if 4 + 2 * slot >= _U16.unpack_from(buffer, vtable)[0]:
        return 0
    offset = int(_U16.unpack_from(buffer, vtable + 4 + 2 * slot)[0])
    return table + offset if offset else 0


def _scalar(buffer: Bytes, table: int, slot: int, kind: struct.Struct) -> int:
    at = _field(buffer, table, slot)
    return int(kind.unpack_from(buffer, at)[0]) if at else 0


def _reference(buffer: Bytes, table: int, slot: int) -> int:
    at = _field(buffer, table, slot)
    if not at:
        raise struct.error
    return at + int(_U32.unpack_from(buffer, at)[0])


def _pairs(buffer: Bytes, vector: int) -> tuple[int, ...]:
    count = _U32.unpack_from(buffer, vector)[0]
    if count > len(buffer) // 16:
        raise struct.error
    return struct.unpack_from(f"<{2 * count}q", buffer, vector + 4)
