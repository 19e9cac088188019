"""Arrow types seen as tensors: does a column of this type hold that tensor, and how many buffers.

Arrow has no bfloat16. Its column is an extension type over uint16, `iskander.bfloat16`: who does
not know it sees numbers, and the name in the field's metadata. A uint16 without the name is a
number everywhere else, and so it is here.

Pure. Runs on: gateway loop, once for each stream's schema.

Source: Arrow columnar format 1.5, "Serialization and Interprocess Communication", the buffer
layouts of each type; canonical extension `arrow.fixed_shape_tensor`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pyarrow as pa

from iskander.contract.column_types import ColumnType
from iskander.contract.dtypes import DTYPES
from iskander.contract.result_types import ListOf, ResultType, Value, parse_result_type
from iskander.contract.tensors import Contract, ResultColumn, TensorSpec


class BFloat16(pa.ExtensionType):  # type: ignore[misc]
    """The upper half of a float32, in a uint16."""

    def __init__(self) -> None:
        super().__init__(pa.uint16(), "iskander.bfloat16")

    def __hash__(self) -> int:
        return hash(self.extension_name)

    def __arrow_ext_serialize__(self) -> bytes:
        """It has no parameters."""
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage: pa.DataType, _: bytes) -> BFloat16:
        """Read by pyarrow from a schema of anybody's."""
        if storage != pa.uint16():
            raise pa.ArrowInvalid(f"iskander.bfloat16 is stored as uint16, not as {storage}")
        return cls()


pa.register_extension_type(BFloat16())

_ARROW_OF = {
    "bool": pa.bool_(),
    "bfloat16": BFloat16(),
    **{
        dtype.arrow: getattr(pa, dtype.arrow)()
        for dtype in DTYPES
        if dtype.arrow not in ("bool", "bfloat16")
    },
}
_NAME_OF = {
    **{arrow: name for name, arrow in _ARROW_OF.items()},
    pa.bool8(): "bool",
    pa.large_utf8(): "utf8",
    pa.string_view(): "utf8",
    pa.large_binary(): "binary",
    pa.binary_view(): "binary",
}
_STRINGS = (pa.utf8(), pa.binary())
_LARGE_STRINGS = (pa.large_utf8(), pa.large_binary())


class Extent(NamedTuple):
    """How much of a batch header one column takes."""

    nodes: int
    buffers: int


def to_arrow(column_type: ColumnType) -> pa.DataType:
    """The Arrow type that a manifest means."""
    arrow = _ARROW_OF[column_type.dtype_name]
    if column_type.is_tensor:
        return pa.fixed_shape_tensor(arrow, column_type.shape)
    for size in reversed(column_type.shape):
        arrow = pa.list_(arrow, size)
    return arrow


def as_tensor(arrow: pa.DataType) -> ColumnType | None:
    """The tensor that a column of this type holds; None where it holds none.

    Names of list items and whether they may be null say nothing about the tensor and do not
    count; a permuted `fixed_shape_tensor` has its elements in another order and is none.
    """
    if isinstance(arrow, pa.FixedShapeTensorType):
        name = _NAME_OF.get(arrow.value_type)
        is_permuted = arrow.permutation not in (None, list(range(len(arrow.shape))))
        if name is None or is_permuted:
            return None
        return ColumnType(name, tuple(arrow.shape), is_tensor=True)
    sizes = []
    while pa.types.is_fixed_size_list(arrow):
        sizes.append(arrow.list_size)
        arrow = arrow.value_type
    name = _NAME_OF.get(arrow)
    return None if name is None else ColumnType(name, tuple(sizes))


def element_name(arrow: pa.DataType) -> str | None:
    """The name of a type of single values, as manifests spell it; None where it has none."""
    arrow = values_of(arrow)
    if arrow in _NAME_OF:
        return _NAME_OF[arrow]
    if pa.types.is_date(arrow):
        return "date32" if pa.types.is_date32(arrow) else "date64"
    if pa.types.is_timestamp(arrow):
        return f"timestamp[{arrow.unit}]"
    if pa.types.is_time(arrow) or pa.types.is_duration(arrow):
        return str(arrow)
    return str(arrow) if pa.types.is_decimal(arrow) else None


def values_of(arrow: pa.DataType) -> pa.DataType:
    """The type of the values of a dictionary or of runs; any other type as it is."""
    is_encoded = pa.types.is_dictionary(arrow) or pa.types.is_run_end_encoded(arrow)
    return arrow.value_type if is_encoded else arrow


def levels(arrow: pa.DataType) -> tuple[int, ...]:
    """Length of each array of a column, for one row: `(1, 4, 12)` for a list of 4 lists of 3."""
    lengths = [1]
    arrow = storage_of(arrow)
    while pa.types.is_fixed_size_list(arrow):
        lengths.append(lengths[-1] * arrow.list_size)
        arrow = storage_of(arrow.value_type)
    return tuple(lengths)


def leaf_of(arrow: pa.DataType) -> pa.DataType:
    """The type of the innermost values of fixed-size lists."""
    arrow = storage_of(arrow)
    while pa.types.is_fixed_size_list(arrow):
        arrow = storage_of(arrow.value_type)
    return arrow


def storage_of(arrow: pa.DataType) -> pa.DataType:
    """The type that an extension type is stored as; any other type as it is."""
    return arrow.storage_type if isinstance(arrow, pa.BaseExtensionType) else arrow


def extent(arrow: pa.DataType) -> Extent | None:
    """Nodes and buffers of a column whose header alone says all; None for any other type.

    That is: fixed widths, fixed-size lists of them, strings and binaries. Dictionaries come in
    messages of their own, views have a number of buffers that differs by batch, and lists,
    structs, maps and unions are rare enough here to leave their reading to pyarrow.
    """
    if isinstance(arrow, pa.BaseExtensionType):
        return extent(arrow.storage_type)
    if pa.types.is_fixed_size_list(arrow):
        child = extent(arrow.value_type)
        return child and Extent(1 + child.nodes, 1 + child.buffers)
    if is_string(arrow):
        return Extent(1, 3)
    if pa.types.is_null(arrow) or pa.types.is_dictionary(arrow) or arrow.num_fields:
        return None
    return Extent(1, 2) if is_fixed_width(arrow) else None


def is_fixed_width(arrow: pa.DataType) -> bool:
    """Whether every value of this type takes the same bits, without lists."""
    try:
        return bool(arrow.bit_width > 0)
    except ValueError:
        return False


def is_string(arrow: pa.DataType) -> bool:
    """Whether values of this type have a length of their own, counted in bytes."""
    return arrow in _STRINGS or arrow in _LARGE_STRINGS


def plain_of(arrow: pa.DataType) -> pa.DataType:
    """The type in which a column of strings or booleans can be copied as it is; others as they are.

    Not text but bytes where it has to be made: whether they are UTF-8 is looked at in one place.
    """
    if arrow == pa.bool8():
        return pa.bool_()
    if pa.types.is_fixed_size_list(arrow):
        field = arrow.value_field
        return pa.list_(field.with_type(plain_of(field.type)), arrow.list_size)
    is_other = arrow in _NAME_OF and arrow not in _STRINGS and _NAME_OF[arrow] in ("utf8", "binary")
    return pa.binary() if is_other else arrow


def depth(arrow: pa.DataType) -> int:
    """Levels of nesting; 1 for a primitive."""
    if isinstance(arrow, pa.BaseExtensionType):
        return depth(arrow.storage_type)
    if pa.types.is_dictionary(arrow) or pa.types.is_run_end_encoded(arrow):
        return depth(arrow.value_type)
    if pa.types.is_map(arrow):
        return 2 + max(depth(arrow.key_type), depth(arrow.item_type))
    children = (arrow.field(index).type for index in range(arrow.num_fields))
    return 1 + max(map(depth, children), default=0)


def has_negative_size(arrow: pa.DataType) -> bool:
    """Whether lists of a type, at any depth, have a size below 0, which pyarrow takes."""
    if isinstance(arrow, pa.BaseExtensionType):
        return has_negative_size(arrow.storage_type)
    if pa.types.is_dictionary(arrow) or pa.types.is_run_end_encoded(arrow):
        return has_negative_size(arrow.value_type)
    if pa.types.is_fixed_size_list(arrow) and arrow.list_size < 0:
        return True
    return any(has_negative_size(arrow.field(index).type) for index in range(arrow.num_fields))


def input_schema(contract: Contract) -> pa.Schema:
    """The columns that a model takes."""
    return _schema(contract.inputs)


def output_schema(contract: Contract) -> pa.Schema:
    """The columns that a model makes, without those that are passed through."""
    if not contract.columns:
        return _schema(contract.outputs)
    types = [_result_type(contract, column) for column in contract.columns]
    names = [column.column for column in contract.columns]
    return pa.schema(list(zip(names, types, strict=True)))


def columns_without_nulls(
    specs: tuple[TensorSpec, ...],
    rows: int,
    offsets: list[int],
    strings: Sequence[tuple[int, int]] = (),
) -> tuple[list[int], list[int]]:
    """Nodes and buffers of a batch header for columns that lie at `offsets` of the body.

    Args:
        specs: Of the columns.
        rows: Of the batch.
        offsets: Of the columns, as `body_layout` says.
        strings: Start and end of the bytes of each column that is strings.

    Returns:
        Length and null count of each array, and offset and length of each buffer; both flat.
    """
    nodes: list[int] = []
    buffers: list[int] = []
    texts = iter(strings)
    for spec, offset in zip(specs, offsets, strict=True):
        for level in levels(to_arrow(spec.type)):
            nodes += (rows * level, 0)
            buffers += (0, 0)
        buffers += (offset, spec.buffer_bytes(rows))
        if spec.is_string:
            start, stop = next(texts)
            buffers += (start, stop - start)
    return nodes, buffers


def _schema(specs: tuple[TensorSpec, ...]) -> pa.Schema:
    return pa.schema([pa.field(spec.column, to_arrow(spec.type)) for spec in specs])


def _result_type(contract: Contract, column: ResultColumn) -> pa.DataType:
    kind = parse_result_type(column.type)
    if kind is not None:
        return _composed(kind)
    return pa.int32() if column.rank else to_arrow(contract.outputs[column.outputs[0]].type)


def _composed(kind: ResultType) -> pa.DataType:
    if isinstance(kind, Value):
        return _ARROW_OF[kind.dtype_name]
    if isinstance(kind, ListOf):
        item = _composed(kind.item)
        return pa.list_(item) if kind.size is None else pa.list_(item, kind.size)
    return pa.struct([(name, _composed(field)) for name, field in kind.fields])
