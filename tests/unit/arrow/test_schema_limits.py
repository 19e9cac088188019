"""Limits of schemas: fields, depth, metadata, sizes, decimals, and headers whose parts overlap."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_examples import up_to

from iskander.arrow import ipc
from iskander.arrow.empty_unions import column_with_empty_union
from iskander.arrow.schema_limits import require_schema_limits
from iskander.config.schema import LimitsConfig
from iskander.errors import ContractError, IskanderError, LimitExceeded, MalformedInput

LIMITS = LimitsConfig()


def header_of(*types: pa.DataType, **options: Any) -> bytes:
    fields = [pa.field(f"c{index}", arrow) for index, arrow in enumerate(types)]
    return ipc.header_of(pa.schema(fields, **options).serialize())


def require(header: bytes, **limits: int) -> None:
    require_schema_limits(header, msgspec.structs.replace(LIMITS, **limits))


@pytest.mark.parametrize(
    ("arrow", "levels_of_nesting", "fields"),
    [
        (pa.int8(), 1, 1),
        (pa.string(), 1, 1),
        (pa.timestamp("us", "Europe/Paris"), 1, 1),
        (pa.list_(pa.int8(), 3), 2, 2),
        (pa.list_(pa.list_(pa.int8())), 3, 3),
        (pa.struct([("a", pa.int8()), ("b", pa.list_(pa.int8()))]), 3, 4),
        (pa.struct([]), 1, 1),
        (pa.map_(pa.string(), pa.list_(pa.int8())), 4, 5),
        (pa.dictionary(pa.int8(), pa.string()), 1, 1),
        (pa.dictionary(pa.int8(), pa.list_(pa.int8())), 2, 2),
        (pa.run_end_encoded(pa.int32(), pa.list_(pa.int8())), 2, 4),
        (pa.fixed_shape_tensor(pa.int8(), [2, 3]), 2, 2),
        (pa.list_view(pa.int8()), 2, 2),
        (pa.union([pa.field("a", pa.list_(pa.int8()))], "dense"), 3, 3),
    ],
    ids=str,
)
def test_levels_and_fields_of_a_type_are_counted(
    arrow: pa.DataType, levels_of_nesting: int, fields: int
) -> None:
    """The limit below is exceeded, the limit itself is not."""
    header = header_of(arrow)
    require(header, nesting=levels_of_nesting, fields=fields)

    with pytest.raises(LimitExceeded, match=r"`limits\.fields`"):
        require(header, fields=fields - 1)
    if levels_of_nesting > 1:
        with pytest.raises(LimitExceeded, match=r"`c0` .*`limits\.nesting`"):
            require(header, nesting=levels_of_nesting - 1)


def test_columns_are_counted() -> None:
    header = header_of(pa.int8(), pa.int8())
    require(header, columns=2)

    with pytest.raises(LimitExceeded, match=r"2 columns, limit 1 \(`limits\.columns`\)"):
        require(header, columns=1)


def test_metadata_is_limited() -> None:
    """That of the schema and of each field, also inside types."""
    inner = pa.field("a", pa.int8(), metadata={"k": "v" * 100})
    header = header_of(pa.struct([inner, inner]), metadata={"key": "value" * 40})
    size = 2 * (1 + 100 + 8) + 3 + 200 + 8
    require(header, schema_metadata_bytes=size)

    with pytest.raises(LimitExceeded, match=r"`limits\.schema_metadata_bytes`"):
        require(header, schema_metadata_bytes=size - 1)


DECIMALS = {
    "decimal32": (pa.decimal32(9, 0), 9),
    "decimal64": (pa.decimal64(18, 0), 18),
    "decimal128": (pa.decimal128(38, 0), 38),
    "decimal256": (pa.decimal256(76, 0), 76),
}


def decimal_header(arrow: pa.DataType, precision: int, scale: int) -> bytes:
    """A header with any precision and scale; pyarrow writes no invalid ones."""
    written = type(arrow)  # Only to fail early for a type that is no decimal.
    assert written.__name__.startswith("Decimal")
    digits = arrow.precision
    make = getattr(pa, f"decimal{arrow.bit_width}")
    header = header_of(make(digits, 7))
    before = struct.pack("<ii", digits, 7)
    assert header.count(before) == 1, "scale and precision are adjacent"
    return header.replace(before, struct.pack("<ii", precision, scale))


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("name", DECIMALS)
def test_precision_and_scale_of_decimals_are_limited(name: str, is_nested: bool) -> None:
    """Also a negative scale, and decimals inside other types. 10 ** scale is computed later."""
    arrow, digits = DECIMALS[name]
    scale = max(digits, 38)
    for accepted in ((1, 0), (digits, scale), (digits, -scale)):
        require(decimal_header(arrow, *accepted))
    assert header_of(arrow, pa.list_(arrow))
    for precision, found in (
        (0, 0), (-1, 0), (digits + 1, 0), (digits, scale + 1), (digits, -scale - 1),
        (digits, 16_777_216), (digits, 2**31 - 1), (digits, -(2**31)),
    ):  # fmt: skip
        header = decimal_header(arrow, precision, found)
        with pytest.raises(MalformedInput, match=rf"`c0` has decimals of {arrow.bit_width} bits"):
            require(header)


@pytest.mark.parametrize("mode", ["sparse", "dense"])
def test_unions_without_fields_are_rejected(mode: str) -> None:
    """pyarrow ends the process when it makes an empty array of them."""
    empty = pa.union([], mode)
    for arrow in (
        empty,
        pa.list_(empty),
        pa.struct([("a", pa.int8()), ("u", empty)]),
        pa.dictionary(pa.int8(), empty),
        pa.union([pa.field("u", empty)], "dense"),
    ):
        with pytest.raises(ContractError, match="`c1` has a union without fields"):
            require(header_of(pa.int8(), arrow))
        schema = pa.schema([("a", pa.int8()), ("b", arrow)])
        assert column_with_empty_union(schema) == "b"
    assert not column_with_empty_union(pa.schema([("a", pa.struct([]))]))


@pytest.mark.parametrize("unit", [0, 1])
@pytest.mark.parametrize("is_nested", [False, True])
def test_intervals_without_arrays_are_rejected(unit: int, is_nested: bool) -> None:
    """pyarrow reads their schema, and raises `KeyError` for their arrays; it writes none."""
    arrow = pa.month_day_nano_interval()
    header = header_of(pa.list_(arrow) if is_nested else arrow)
    require(header)
    found = []
    for at in range(len(header)):
        if header[at : at + 2] == b"\2\0":
            try:
                require(header[:at] + bytes([unit, 0]) + header[at + 2 :])
            except ContractError as error:
                found.append(error.message)
            except MalformedInput:
                pass  # Another part of the header.
    assert found and all("column `c0` has intervals of months" in text for text in found)


def test_decimals_inside_other_types_are_limited() -> None:
    kind = pa.decimal128(38, 7)
    before = struct.pack("<ii", 38, 7)
    for arrow in (
        pa.list_(kind),
        pa.struct([("a", kind)]),
        pa.dictionary(pa.int8(), kind),
        pa.run_end_encoded(pa.int32(), kind),
        pa.map_(pa.string(), kind),
    ):
        header = header_of(arrow)
        assert header.count(before) == 1
        with pytest.raises(MalformedInput, match="scale 16777216"):
            require(header.replace(before, struct.pack("<ii", 38, 16_777_216)))


def shared_child(name: str, count: int, depth: int = 1) -> bytes:
    """A header of structs of `count` fields, all of which are one field of the header."""
    kind: pa.DataType = pa.int8()
    for _ in range(depth):
        fields = [
            pa.field(name, kind),
            *(pa.field(str(index), pa.int8()) for index in range(count)),
        ]
        kind = pa.struct(fields)
    header = bytearray(header_of(kind))
    message = ipc.read_message(header)
    (table,) = ipc.read_tables(header, message.table, 1, 1) or []
    for _ in range(depth):
        children = ipc.read_tables(header, table, 5, count + 1)
        assert children is not None
        vector = ipc.read_table(header, table, 5) + 4
        for index in range(count + 1):
            at = vector + 4 * index
            struct.pack_into("<I", header, at, children[0] - at)
        table = children[0]
    return bytes(header)


def test_text_that_many_fields_share_is_rejected() -> None:
    """pyarrow copies the name for each of them: 1 MiB would become 4 GiB."""
    schema = pa.ipc.read_schema(pa.py_buffer(ipc.encapsulate(shared_child("name", 2))))
    assert [field.name for field in schema.field(0).type] == ["name"] * 3
    require(shared_child("name", 10))

    with pytest.raises(MalformedInput, match="overlap"):
        require(shared_child("n" * 2000, 10))


def test_fields_that_are_used_several_times_count_each_time() -> None:
    """Ten levels of ten uses are 10**10 fields in a header of 10 kB."""
    header = shared_child("n", 9, depth=10)
    assert len(header) < 20_000

    with pytest.raises(LimitExceeded, match=r"more than 4096 fields at all depths"):
        require(header)


@settings(deadline=None, max_examples=up_to(300))
@given(st.binary(max_size=300) | st.integers(0, 3000), st.integers(0, 255))
def test_changed_header_raises_only_expected_errors(found: bytes | int, value: int) -> None:
    if isinstance(found, bytes):
        header = found
    else:
        changed = bytearray(header_of(pa.struct([("a", pa.decimal128(3))]), pa.list_(pa.int8())))
        changed[found % len(changed)] = value
        header = bytes(changed)
    try:
        require(header)
    except IskanderError as error:
        assert isinstance(error, (LimitExceeded, MalformedInput))
