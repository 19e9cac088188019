"""Mapping between Arrow types and tensor types; node and buffer counts of columns.

Arrow has no bfloat16. The extension type `iskander.bfloat16` stores it as uint16: other readers
see integers, and the name in the field's metadata. A plain uint16 is an integer.

Pure. Runs on: gateway loop, once for each stream's schema.

Source: Arrow columnar format 1.5, "Serialization and Interprocess Communication", the buffer
layouts of each type; canonical extension `arrow.fixed_shape_tensor`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        """Return no bytes: the type has no parameters."""
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage: pa.DataType, _: bytes) -> BFloat16:
        """Check the storage of an untrusted schema."""
        if storage != pa.uint16():
            raise pa.ArrowInvalid(f"iskander.bfloat16 is stored as uint16, not as {storage}")
        return cls()


pa.register_extension_type(BFloat16())

_OTHER = {"bool": pa.bool_(), "bfloat16": BFloat16()}
_ARROW_OF = _OTHER | {d.arrow: getattr(pa, d.arrow)() for d in DTYPES if d.arrow not in _OTHER}
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


_SHRUNK: tuple[tuple[Callable[[pa.DataType], bool], Callable[..., pa.DataType]], ...] = (
    (pa.types.is_fixed_size_binary, lambda arrow, _: pa.binary(min(arrow.byte_width, 1))),
    (pa.types.is_fixed_size_list, lambda arrow, of: pa.list_(of[0], min(arrow.list_size, 1))),
    (
        pa.types.is_dictionary,
        lambda arrow, _: pa.dictionary(arrow.index_type, with_small_values(arrow.value_type)),
    ),
    (
        pa.types.is_run_end_encoded,
        lambda arrow, _: pa.run_end_encoded(
            arrow.run_end_type, with_small_values(arrow.value_type)
        ),
    ),
    (
        pa.types.is_map,
        lambda arrow, _: _map_with_small_values(arrow),
    ),
    (pa.types.is_struct, lambda _, of: pa.struct(of)),
    (
        pa.types.is_union,
        lambda arrow, of: pa.union(of, mode=arrow.mode, type_codes=arrow.type_codes),
    ),
    (pa.types.is_list, lambda _, of: pa.list_(of[0])),
    (pa.types.is_large_list, lambda _, of: pa.large_list(of[0])),
    (pa.types.is_list_view, lambda _, of: pa.list_view(of[0])),
    (pa.types.is_large_list_view, lambda _, of: pa.large_list_view(of[0])),
)


class HeaderCounts(NamedTuple):
    """Node and buffer counts of one column in a batch header."""

    nodes: int
    buffers: int


def to_arrow(column_type: ColumnType) -> pa.DataType:
    """Return the Arrow type of a manifest's column type."""
    arrow = _ARROW_OF[column_type.dtype_name]
    if column_type.is_tensor:
        return pa.fixed_shape_tensor(arrow, column_type.shape)
    for size in reversed(column_type.shape):
        arrow = pa.list_(arrow, size)
    return arrow


def as_tensor(arrow: pa.DataType) -> ColumnType | None:
    """Return the tensor type of a column; None if the column is not a tensor.

    Ignores names and nullability of list items. A permuted `fixed_shape_tensor` is not a tensor
    here: its elements are not in row-major order.
    """
    if isinstance(arrow, pa.FixedShapeTensorType):
        name = _NAME_OF.get(arrow.value_type)
        if name is None or is_permuted(arrow):
            return None
        return ColumnType(name, tuple(arrow.shape), is_tensor=True)
    sizes = []
    while pa.types.is_fixed_size_list(arrow):
        sizes.append(arrow.list_size)
        arrow = arrow.value_type
    name = _NAME_OF.get(arrow)
    return None if name is None else ColumnType(name, tuple(sizes))


def is_permuted(arrow: pa.FixedShapeTensorType) -> bool:
    """Return whether a tensor's elements are not in row-major order."""
    return arrow.permutation not in (None, list(range(len(arrow.shape))))


def element_name(arrow: pa.DataType) -> str | None:
    """Return the manifest's name of `values_of(arrow)`.

    None if manifests have no name for the type.
    """
    arrow = values_of(arrow)
    if arrow in _NAME_OF:
        return _NAME_OF[arrow]
    if pa.types.is_date(arrow):
        return "date32" if pa.types.is_date32(arrow) else "date64"
    if pa.types.is_timestamp(arrow):
        return f"timestamp[{arrow.unit}]"
    if pa.types.is_time(arrow) or pa.types.is_duration(arrow) or pa.types.is_decimal(arrow):
        return str(arrow)
    return None


def values_of(arrow: pa.DataType) -> pa.DataType:
    """Return the value type of a dictionary or run-end encoded type; any other type unchanged."""
    is_encoded = pa.types.is_dictionary(arrow) or pa.types.is_run_end_encoded(arrow)
    return arrow.value_type if is_encoded else arrow


def array_lengths(arrow: pa.DataType) -> tuple[int, ...]:
    """Return array lengths per row, outermost first: `(1, 4, 12)` for a list of 4 lists of 3."""
    lengths = [1]
    arrow = storage_of(arrow)
    while pa.types.is_fixed_size_list(arrow):
        lengths.append(lengths[-1] * arrow.list_size)
        arrow = storage_of(arrow.value_type)
    return tuple(lengths)


def innermost_type(arrow: pa.DataType) -> pa.DataType:
    """Return the type of the innermost values of fixed-size lists."""
    arrow = storage_of(arrow)
    while pa.types.is_fixed_size_list(arrow):
        arrow = storage_of(arrow.value_type)
    return arrow


def storage_of(arrow: pa.DataType) -> pa.DataType:
    """Return the storage type of an extension type; any other type unchanged."""
    return arrow.storage_type if isinstance(arrow, pa.BaseExtensionType) else arrow


def header_counts(arrow: pa.DataType) -> HeaderCounts | None:
    """Return node and buffer counts of a column.

    None if the batch header does not fully describe it.

    Fully described: fixed-width values, fixed-size lists of them, strings and binaries. Views have
    a data-dependent buffer count, dictionaries have messages of their own, and other nested types
    are rare enough to leave to pyarrow.
    """
    if isinstance(arrow, pa.BaseExtensionType):
        return header_counts(arrow.storage_type)
    if pa.types.is_fixed_size_list(arrow):
        child = header_counts(arrow.value_type)
        return child and HeaderCounts(1 + child.nodes, 1 + child.buffers)
    if is_string(arrow):
        return HeaderCounts(1, 3)
    if pa.types.is_null(arrow) or pa.types.is_dictionary(arrow) or arrow.num_fields:
        return None
    try:
        return HeaderCounts(1, 2) if arrow.bit_width > 0 else None
    except ValueError:  # The width varies.
        return None


def is_string(arrow: pa.DataType) -> bool:
    """Return whether a type is utf8 or binary, also large, but not a view."""
    return arrow in _STRINGS or arrow in _LARGE_STRINGS


def received_type(arrow: pa.DataType) -> pa.DataType:
    """Return `binary` for large strings and views, `bool` for bool8, also in lists.

    Any other type unchanged.

    Text becomes `binary` too, because only `utf8` is validated as UTF-8.
    """
    if arrow == pa.bool8():
        return pa.bool_()
    if pa.types.is_fixed_size_list(arrow):
        field = arrow.value_field
        return pa.list_(field.with_type(received_type(field.type)), arrow.list_size)
    is_converted = arrow not in _STRINGS and _NAME_OF.get(arrow) in ("utf8", "binary")
    return pa.binary() if is_converted else arrow


def _map_with_small_values(arrow: pa.MapType) -> pa.MapType:
    if pa.types.is_null(arrow.key_type):
        return arrow  # pyarrow reads such a map, which can only be empty, and makes none.
    return pa.map_(with_small_values(arrow.key_type), with_small_values(arrow.item_type))


def with_small_values(arrow: pa.DataType) -> pa.DataType:
    """Return a type with the same nodes and buffers in a batch header, whose values are small.

    A schema of a hundred bytes may declare values of 2 GiB, and pyarrow writes a null or an absent
    child of such a type in full.
    """
    arrow = storage_of(arrow)
    for is_kind, make in _SHRUNK:
        if is_kind(arrow):
            fields = [arrow.field(index) for index in range(arrow.num_fields)]
            return make(arrow, [field.with_type(with_small_values(field.type)) for field in fields])
    return arrow


def input_schema(contract: Contract) -> pa.Schema:
    """Return the schema of a model's inputs."""
    return _tensor_schema(contract.inputs)


def output_schema(contract: Contract) -> pa.Schema:
    """Return the schema of a model's results, without passthrough columns."""
    if not contract.columns:
        return _tensor_schema(contract.outputs)
    return pa.schema(
        [(column.column, _column_to_arrow(contract, column)) for column in contract.columns]
    )


def columns_without_nulls(
    specs: tuple[TensorSpec, ...],
    rows: int,
    offsets: list[int],
    strings: Sequence[tuple[int, int]] = (),
) -> tuple[list[int], list[int]]:
    """Return the nodes and buffers of a batch header, flat, for columns without nulls.

    `strings` has the start and end of each string column's bytes.
    """
    nodes: list[int] = []
    buffers: list[int] = []
    ranges = iter(strings)
    for spec, offset in zip(specs, offsets, strict=True):
        for level in array_lengths(to_arrow(spec.type)):
            nodes += (rows * level, 0)
            buffers += (0, 0)
        buffers += (offset, spec.buffer_bytes(rows))
        if spec.is_string:
            start, stop = next(ranges)
            buffers += (start, stop - start)
    return nodes, buffers


def _tensor_schema(specs: tuple[TensorSpec, ...]) -> pa.Schema:
    return pa.schema([pa.field(spec.column, to_arrow(spec.type)) for spec in specs])


def _column_to_arrow(contract: Contract, column: ResultColumn) -> pa.DataType:
    kind = parse_result_type(column.type)
    if kind is not None:
        return _result_to_arrow(kind)
    return pa.int32() if column.rank else to_arrow(contract.outputs[column.outputs[0]].type)


def _result_to_arrow(kind: ResultType) -> pa.DataType:
    if isinstance(kind, Value):
        return _ARROW_OF[kind.dtype_name]
    if isinstance(kind, ListOf):
        item = _result_to_arrow(kind.item)
        return pa.list_(item) if kind.size is None else pa.list_(item, kind.size)
    return pa.struct([(name, _result_to_arrow(field)) for name, field in kind.fields])
