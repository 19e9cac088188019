"""Arrow IPC headers: reading, writing, malformed headers, and Arrow types as tensors."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.random_examples import up_to

from iskander.arrow import ipc
from iskander.arrow.types import (
    BFloat16,
    HeaderCounts,
    array_lengths,
    as_tensor,
    header_counts,
    received_type,
    to_arrow,
)
from iskander.contract.tensors import ALIGNMENT
from iskander.errors import MalformedInput

ROWS = 5


def strings(kind: pa.DataType) -> pa.Array:
    values: list[Any] = ["", "a", None, "ccc", "é"]
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        values = [None if value is None else value.encode() for value in values]
    return pa.array(values, kind)


def lists(item: pa.DataType, size: int, values: pa.Array) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(values, type=pa.list_(item, size))


# Columns of five rows that are read from the header, without pyarrow.
PLAIN = {
    "int64": pa.array([1, 2, 3, 4, 5]),
    "int8 with nulls": pa.array([1, None, 3, None, 5], pa.int8()),
    "bool": pa.array([True, False, None, True, True]),
    "float16": pa.array([0.5, 1.5, 2.5, None, 4.5], pa.float16()),
    "decimal": pa.array([1, 2, None, 4, 5], pa.decimal128(7, 2)),
    "timestamp": pa.array([1, 2, 3, 4, 5], pa.timestamp("us", "UTC")),
    "fixed size binary": pa.array([b"abc"] * ROWS, pa.binary(3)),
    "string": strings(pa.string()),
    "large string": strings(pa.large_string()),
    "binary": strings(pa.binary()),
    "list of strings": pa.array([["a", "b"]] * ROWS, pa.list_(pa.string(), 2)),
    "list": lists(pa.int32(), 3, pa.array(range(3 * ROWS), pa.int32())),
    "list of lists": lists(
        pa.list_(pa.int16(), 2), 4, lists(pa.int16(), 2, pa.array(range(8 * ROWS), pa.int16()))
    ),
    "tensor": pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.float32(), [2, 3]),
        lists(pa.float32(), 6, pa.array(range(6 * ROWS), pa.float32())),
    ),
}

# Columns that only pyarrow reads.
OTHER = {
    "null": pa.nulls(ROWS),
    "list": pa.array([[1], [], None, [2, 3], [4]]),
    "struct": pa.array([{"a": 1, "b": "x"}] * ROWS),
    "map": pa.array([[("a", 1)]] * ROWS, pa.map_(pa.string(), pa.int8())),
    "dictionary": pa.array(["a", "b", "a", None, "b"]).dictionary_encode(),
    "string view": pa.array(["a", "b", "c", "d", "e"], pa.string_view()),
    "list of string views": pa.array([["a", "b"]] * ROWS, pa.list_(pa.string_view(), 2)),
    "run ends": pa.RunEndEncodedArray.from_arrays(pa.array([2, 5], pa.int32()), pa.array([1, 2])),
    "empty binary": pa.array([b""] * ROWS, pa.binary(0)),
}


def batch_of(*columns: pa.Array) -> pa.RecordBatch:
    return pa.record_batch(list(columns), names=[str(index) for index in range(len(columns))])


def arrays_of(array: pa.Array) -> list[tuple[int, int]]:
    """Return length and null count of an array and its children, in the order of a header."""
    if isinstance(array, pa.ExtensionArray):
        return arrays_of(array.storage)
    children = arrays_of(array.flatten()) if pa.types.is_fixed_size_list(array.type) else []
    return [(len(array), array.null_count), *children]


def pairs(flat: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(zip(flat[::2], flat[1::2], strict=True))


def messages(*batches: pa.RecordBatch, **options: Any) -> list[tuple[bytes, memoryview]]:
    """Return header and body of each message of a stream after its schema."""
    sink = pa.BufferOutputStream()
    write_options = pa.ipc.IpcWriteOptions(**options)
    with pa.ipc.new_stream(sink, batches[0].schema, options=write_options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    _, *rest = pa.ipc.MessageReader.open_stream(sink.getvalue())
    return [(bytes(each.metadata), memoryview(each.body).cast("B")) for each in rest]


def header_and_body(batch: pa.RecordBatch, **options: Any) -> tuple[bytes, memoryview]:
    return messages(batch, **options)[-1]


@pytest.mark.parametrize("name", PLAIN)
def test_batch_header_is_read_as_written(name: str) -> None:
    batch = batch_of(PLAIN[name], PLAIN["int64"], PLAIN[name])

    header, body = header_and_body(batch)
    message = ipc.read_message(header)
    read = ipc.read_batch(header, message)

    assert (message.version, message.kind) == (ipc.METADATA_V5, ipc.RECORD_BATCH)
    assert message.body_bytes == len(body)
    assert (read.rows, read.is_compressed) == (ROWS, False)
    expected = [pair for column in batch.columns for pair in arrays_of(column)]
    assert pairs(read.nodes) == expected
    for start, length in pairs(read.buffers):
        assert start % 8 == 0 and 0 <= start <= start + length <= len(body)


@pytest.mark.parametrize("name", PLAIN)
def test_extent_of_a_column_matches_pyarrow(name: str) -> None:
    header, _ = header_and_body(batch_of(PLAIN[name]))
    read = ipc.read_batch(header, ipc.read_message(header))

    actual = header_counts(PLAIN[name].type)

    assert actual == HeaderCounts(len(read.nodes) // 2, len(read.buffers) // 2)
    assert [length for length, _ in pairs(read.nodes)] == [
        ROWS * level for level in array_lengths(PLAIN[name].type)
    ]


@pytest.mark.parametrize("name", OTHER)
def test_column_that_needs_pyarrow_has_no_extent(name: str) -> None:
    assert header_counts(OTHER[name].type) is None


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_compression_is_detected(codec: str) -> None:
    header, _ = header_and_body(batch_of(PLAIN["int64"]), compression=codec)

    assert ipc.read_batch(header, ipc.read_message(header)).is_compressed


@pytest.mark.parametrize("rows", [0, 1, ROWS])
def test_zero_rows_and_zero_columns_are_read(rows: int) -> None:
    """A flatbuffer omits fields with their default value, 0."""
    header, _ = header_and_body(batch_of(PLAIN["int64"]).slice(0, rows))
    empty, _ = header_and_body(pa.RecordBatch.from_arrays([], names=[]))

    assert ipc.read_batch(header, ipc.read_message(header)).rows == rows
    assert ipc.read_batch(empty, ipc.read_message(empty)) == ipc.Batch(0, (), (), False)


@pytest.mark.parametrize(
    ("version", "number"), [(pa.ipc.MetadataVersion.V4, 3), (pa.ipc.MetadataVersion.V5, 4)]
)
def test_the_metadata_version_is_read(version: Any, number: int) -> None:
    header, _ = header_and_body(batch_of(PLAIN["int64"]), metadata_version=version)

    assert ipc.read_message(header).version == number
    assert (number == ipc.METADATA_V5) == (version is pa.ipc.MetadataVersion.V5)


@pytest.mark.parametrize("is_big", [False, True])
def test_byte_order_of_a_schema_is_read(is_big: bool) -> None:
    """pyarrow omits the field for the native byte order; the test patches the other one in."""
    header = bytearray(ipc.header_of(pa.schema([("a", pa.int64())]).serialize()))
    table = ipc.read_message(header).table
    vtable = table - struct.unpack_from("<i", header, table)[0]
    if is_big:
        struct.pack_into("<H", header, vtable + 4, header.index(b"\x01\x00", table) - table)

    message = ipc.read_message(header)

    assert message.kind == ipc.SCHEMA
    assert ipc.is_big_endian(header, message) is is_big


def test_dictionaries_are_read_with_their_ids_and_deltas() -> None:
    """pyarrow writes a delta for the second batch because its dictionary is longer."""
    first = pa.DictionaryArray.from_arrays([0, 1], pa.array(["a", "b"]))
    grown = pa.DictionaryArray.from_arrays([2], pa.array(["a", "b", "ccc"]))

    read = []
    for header, _ in messages(batch_of(first), batch_of(grown), emit_dictionary_deltas=True):
        message = ipc.read_message(header)
        if message.kind == ipc.DICTIONARY_BATCH:
            dictionary, is_delta, batch = ipc.read_dictionary(header, message)
            read.append((dictionary, is_delta, batch.rows, len(batch.buffers) // 2))

    assert read == [(0, False, 2, 3), (0, True, 1, 3)]


def test_dictionary_with_negative_length_is_malformed() -> None:
    """pyarrow accepts it, and a later `len` fails."""
    column = pa.DictionaryArray.from_arrays([0], pa.array(["a"] * 7))
    header = next(
        header
        for header, _ in messages(batch_of(column))
        if ipc.read_message(header).kind == ipc.DICTIONARY_BATCH
    )
    node, wrong = struct.pack("<qq", 7, 0), struct.pack("<qq", -7, 0)
    assert header.count(node) == 1
    malformed = header.replace(node, wrong)

    with pytest.raises(MalformedInput, match="negative length"):
        ipc.read_dictionary(malformed, ipc.read_message(malformed))


@pytest.mark.parametrize("body", [b"", b"x" * 64])
@pytest.mark.parametrize("name", ["int64", "list", "string"])
def test_body_of_an_encapsulated_message_is_aligned(name: str, body: bytes) -> None:
    header, _ = header_and_body(batch_of(PLAIN[name]))

    full = ipc.encapsulate(header, body)

    assert (len(full) - len(body)) % ALIGNMENT == 0
    assert full.endswith(body)
    assert full[:4] == ipc.CONTINUATION
    assert ipc.header_of(pa.py_buffer(full)).rstrip(b"\x00") == header.rstrip(b"\x00")


@pytest.mark.parametrize("name", PLAIN)
def test_pyarrow_reads_an_encapsulated_message(name: str) -> None:
    batch = batch_of(PLAIN[name])

    full = ipc.encapsulate(*header_and_body(batch))

    assert pa.ipc.read_record_batch(pa.py_buffer(full), batch.schema).equals(batch)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("rows", [0, 1, ROWS])
def test_pyarrow_reads_a_rendered_template(name: str, rows: int) -> None:
    """With the numbers of a batch from pyarrow, the template's header equals pyarrow's header."""
    batch = batch_of(PLAIN["bool"], PLAIN[name]).slice(0, rows)
    header, body = header_and_body(batch)
    read = ipc.read_batch(header, ipc.read_message(header))
    template = ipc.BatchTemplate(batch.schema)

    rendered = template.render(rows, list(read.nodes), list(read.buffers), len(body))

    assert ipc.read_batch(rendered, ipc.read_message(rendered)) == read
    decoded = pa.ipc.read_record_batch(pa.py_buffer(ipc.encapsulate(rendered, body)), batch.schema)
    decoded.validate(full=True)
    assert decoded.equals(batch)


def test_rendering_does_not_change_the_template() -> None:
    template = ipc.BatchTemplate(batch_of(PLAIN["int64"]).schema)

    first = template.render(1, [1, 0], [0, 0, 0, 8], 64)
    template.render(2, [2, 1], [0, 1, 64, 16], 128)

    assert template.render(1, [1, 0], [0, 0, 0, 8], 64) == first


@pytest.mark.parametrize(
    "declared",
    [
        pa.binary(1 << 26),
        pa.list_(pa.int8(), 1 << 26),
        pa.list_(pa.list_(pa.binary(1 << 10), 1 << 8), 1 << 8),
    ],
    ids=str,
)
def test_template_allocates_no_memory_for_the_declared_size_of_a_type(
    declared: pa.DataType,
) -> None:
    before = pa.default_memory_pool()
    counting_pool = pa.proxy_memory_pool(before)
    pa.set_memory_pool(counting_pool)
    try:
        template = ipc.BatchTemplate(pa.schema([("x", declared), ("y", pa.utf8())]))
    finally:
        pa.set_memory_pool(before)
    assert counting_pool.max_memory() < 1 << 16
    arrays = 1 + str(declared).count("<")
    assert struct.calcsize(template._nodes.format) // 16 == arrays + 1


# Malformed headers.

HEADERS = [header_and_body(batch_of(column))[0] for column in PLAIN.values()]
HEADERS += [ipc.header_of(batch_of(column).schema.serialize()) for column in PLAIN.values()]
HEADERS += [header for header, _ in messages(batch_of(OTHER["dictionary"]))]


def read_all(header: bytes) -> None:
    """Call every reader on a header, whatever its kind."""
    message = ipc.read_message(header)
    for read in (ipc.read_batch, ipc.read_dictionary, ipc.is_big_endian):
        try:
            read(header, message)
        except MalformedInput:
            continue


@st.composite
def mutated(draw: st.DrawFn, headers: list[bytes]) -> bytes:
    """Return a valid header with a few words overwritten, and possibly truncated."""
    header = bytearray(draw(st.sampled_from(headers)))
    for _ in range(draw(st.integers(1, 4))):
        width = draw(st.sampled_from([1, 2, 4, 8]))
        at = draw(st.integers(0, len(header) - width))
        value = draw(
            st.sampled_from([0, 1, (1 << 8 * width) - 1, 1 << (8 * width - 1)])
            | st.integers(0, (1 << 8 * width) - 1)
            | st.integers(0, min(len(header), (1 << 8 * width) - 1))
        )
        header[at : at + width] = value.to_bytes(width, "little")
    return bytes(header[: draw(st.just(len(header)) | st.integers(0, len(header)))])


@settings(deadline=None, max_examples=up_to(300))
@example(b"")
@example(b"\x00" * 4)
@example(b"\xff" * 64)
@given(st.binary(max_size=256))
def test_random_bytes_raise_only_malformed_input(header: bytes) -> None:
    with contextlib.suppress(MalformedInput):
        read_all(header)


@settings(deadline=None, max_examples=up_to(500))
@given(mutated(HEADERS))
def test_mutated_headers_are_read_or_malformed(header: bytes) -> None:
    with contextlib.suppress(MalformedInput):
        read_all(header)


@pytest.mark.parametrize("header", HEADERS[: len(PLAIN)], ids=list(PLAIN))
def test_every_shorter_header_is_malformed_or_read_correctly(header: bytes) -> None:
    full = ipc.read_batch(header, ipc.read_message(header))
    for length in range(len(header)):
        try:
            read = ipc.read_batch(header[:length], ipc.read_message(header[:length]))
        except MalformedInput:
            continue
        assert read == full


def test_count_beyond_the_header_is_malformed() -> None:
    header = bytearray(header_and_body(batch_of(PLAIN["int64"]))[0])
    at = header.index(struct.pack("<Iqq", 1, ROWS, 0))
    struct.pack_into("<I", header, at, 2**32 - 1)

    with pytest.raises(MalformedInput):
        ipc.read_batch(header, ipc.read_message(header))


def test_vtable_offset_behind_the_header_is_malformed() -> None:
    """The vtable offset points behind the header, which Python would read as a negative index."""
    header = bytearray(header_and_body(batch_of(PLAIN["int64"]))[0])
    (root,) = struct.unpack_from("<I", header)
    vtable = root - struct.unpack_from("<i", header, root)[0]
    copied = header[vtable : vtable + struct.unpack_from("<H", header, vtable)[0]]
    struct.pack_into("<i", header, root, root + len(copied))

    with pytest.raises(MalformedInput):
        ipc.read_message(header + copied)


# Arrow types as tensors.


@pytest.mark.parametrize(
    ("arrow", "text"),
    [
        (pa.float32(), "float32"),
        (pa.bool_(), "bool"),
        (pa.utf8(), "utf8"),
        (pa.binary(), "binary"),
        (pa.list_(pa.utf8(), 3), "fixed_size_list<utf8>[3]"),
        (BFloat16(), "bfloat16"),
        (pa.list_(BFloat16(), 3), "fixed_size_list<bfloat16>[3]"),
        (pa.list_(pa.int8(), 3), "fixed_size_list<int8>[3]"),
        (pa.list_(pa.field("other", pa.int8(), False), 3), "fixed_size_list<int8>[3]"),
        (pa.list_(pa.list_(pa.int8(), 3), 2), "fixed_size_list<fixed_size_list<int8>[3]>[2]"),
        (pa.fixed_shape_tensor(pa.float16(), [2, 3]), "fixed_shape_tensor<float16>[2, 3]"),
        (
            pa.fixed_shape_tensor(pa.float16(), [2, 3], permutation=[0, 1]),
            "fixed_shape_tensor<float16>[2, 3]",
        ),
        (
            pa.fixed_shape_tensor(pa.float16(), [2, 3], dim_names=["a", "b"]),
            "fixed_shape_tensor<float16>[2, 3]",
        ),
    ],
)
def test_arrow_type_as_a_tensor_type(arrow: pa.DataType, text: str) -> None:
    column_type = as_tensor(arrow)

    assert str(column_type) == text
    assert column_type is not None and as_tensor(to_arrow(column_type)) == column_type


@pytest.mark.parametrize(
    ("arrow", "plain"),
    [
        (pa.utf8(), pa.utf8()),
        (pa.binary(), pa.binary()),
        (pa.large_utf8(), pa.binary()),
        (pa.large_binary(), pa.binary()),
        (pa.string_view(), pa.binary()),
        (pa.binary_view(), pa.binary()),
        (pa.list_(pa.large_utf8(), 3), pa.list_(pa.binary(), 3)),
        (pa.list_(pa.utf8(), 3), pa.list_(pa.utf8(), 3)),
        (pa.int64(), pa.int64()),
    ],
    ids=str,
)
def test_plain_type_of_a_column(arrow: pa.DataType, plain: pa.DataType) -> None:
    """All are the same tensor, but only the plain types have the layout of a body."""
    assert received_type(arrow) == plain
    original, copied = as_tensor(arrow), as_tensor(plain)
    assert original is not None and copied is not None
    assert (original.dtype.onnx, original.shape) == (copied.dtype.onnx, copied.shape)


def test_bfloat16_is_stored_as_uint16_only() -> None:
    """A client's schema can use the extension name with another storage type."""
    name = {"ARROW:extension:name": "iskander.bfloat16", "ARROW:extension:metadata": ""}
    right, wrong = (
        pa.schema([pa.field("x", arrow, metadata=name)]).serialize()
        for arrow in (pa.uint16(), pa.float16())
    )

    assert pa.ipc.read_schema(right).field("x").type == BFloat16()
    with pytest.raises(pa.ArrowInvalid, match="stored as uint16, not as halffloat"):
        pa.ipc.read_schema(wrong)


@pytest.mark.parametrize(
    "arrow",
    [
        pa.null(),
        pa.date32(),
        pa.decimal128(5, 2),
        pa.list_(pa.float32()),
        pa.list_(pa.string()),
        pa.binary(4),
        pa.struct([("a", pa.float32())]),
        pa.dictionary(pa.int8(), pa.float32()),
        pa.fixed_shape_tensor(pa.float32(), [2, 3], permutation=[1, 0]),
        pa.fixed_shape_tensor(pa.date32(), [2]),
        pa.list_(pa.fixed_shape_tensor(pa.float32(), [2]), 3),
    ],
    ids=str,
)
def test_arrow_type_without_a_tensor_type(arrow: pa.DataType) -> None:
    assert as_tensor(arrow) is None
