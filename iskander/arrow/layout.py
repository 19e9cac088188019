"""Numbers of nodes, buffers and dictionaries that a record batch has for its Arrow types.

Pure. Runs on: gateway loop, and the threads that build plans.

Source: Arrow columnar format 1.5, "Serialization and Interprocess Communication", the buffer
layouts of each type, in metadata version V5.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import pyarrow as pa

from iskander.arrow.types import is_string, storage_of


class Layout(NamedTuple):
    """Numbers of nodes, buffers and dictionaries of a column.

    Attributes:
        nodes: Number of nodes.
        buffers: Number of buffers, without the data buffers of string views.
        texts: Positions of the buffers with the bytes of strings, from the column's first buffer.
        has_views: Whether the column has string views, whose number of buffers depends on the data.
        dictionaries: Number of dictionaries, including those inside the values of others.
    """

    nodes: int
    buffers: int
    texts: tuple[int, ...]
    has_views: bool
    dictionaries: int


class SchemaLayout:
    """Layout of a schema's batches.

    Attributes:
        columns: Layout of each column.
        nodes: Number of nodes of a batch.
        dictionaries: Number of dictionaries at all depths.
        dictionary_columns: Indices of the columns that are dictionaries.
        nested_columns: Indices of the columns with dictionaries inside their types.
        has_inner_dictionaries: Whether a dictionary has dictionaries inside its values.
        view_columns: Indices of the columns with string views.
        starts: Position of each column's first buffer; wrong after a column with views.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self.columns = [layout_of(field.type) for field in schema]
        self.nodes = sum(column.nodes for column in self.columns)
        self.dictionaries = sum(column.dictionaries for column in self.columns)
        kinds = [storage_of(field.type) for field in schema]
        self.dictionary_columns = [
            index for index, field in enumerate(schema) if pa.types.is_dictionary(field.type)
        ]
        self.nested_columns = [
            index
            for index, column in enumerate(self.columns)
            if column.dictionaries and index not in set(self.dictionary_columns)
        ]
        outer = sum(map(_outer_dictionaries, kinds)) if self.dictionaries else 0
        self.has_inner_dictionaries = outer < self.dictionaries
        self.view_columns = [i for i, column in enumerate(self.columns) if column.has_views]
        ends = itertools.accumulate(column.buffers for column in self.columns)
        self.starts = [0, *ends]

    def texts(self, columns: Iterable[int]) -> list[int]:
        """Return the positions of buffers with string bytes, for the columns with these indices."""
        return [self.starts[i] + text for i in columns for text in self.columns[i].texts]


def layout_of(arrow: pa.DataType) -> Layout:
    """Return the layout of one column of this type."""
    arrow = storage_of(arrow)
    if pa.types.is_dictionary(arrow):
        inner = layout_of(arrow.value_type)
        return Layout(1, 2, (), has_views=False, dictionaries=1 + inner.dictionaries)
    if is_string(arrow):
        return Layout(1, 3, (2,), has_views=False, dictionaries=0)
    if is_view(arrow):
        return Layout(1, 2, (), has_views=True, dictionaries=0)
    nodes, buffers, dictionaries, has_views = 1, _own_buffers(arrow), 0, False
    texts: list[int] = []
    for child in map(layout_of, _child_types(arrow)):
        texts += [buffers + text for text in child.texts]
        nodes, buffers = nodes + child.nodes, buffers + child.buffers
        dictionaries += child.dictionaries
        has_views = has_views or child.has_views
    return Layout(nodes, buffers, tuple(texts), has_views, dictionaries)


def is_view(arrow: pa.DataType) -> bool:
    """Return whether a type is a view of text or binary values."""
    return bool(pa.types.is_string_view(arrow) or pa.types.is_binary_view(arrow))


def children(array: pa.Array) -> list[pa.Array]:
    """Return the arrays inside an array, without the values of a dictionary."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return [array.storage]
    if pa.types.is_struct(kind) or pa.types.is_union(kind):
        return [array.field(index) for index in range(kind.num_fields)]
    if pa.types.is_map(kind):
        return [array.keys, array.items]
    return [array.values] if kind.num_fields else []


def dictionaries_of(array: pa.Array) -> Iterator[pa.Array]:
    """Yield the dictionaries of a column, depth first, without dictionaries inside dictionaries."""
    if pa.types.is_dictionary(array.type):
        yield array.dictionary
    else:
        for child in children(array):
            yield from dictionaries_of(child)


def without_values(arrow: pa.DataType) -> pa.DataType:
    """Replace the value types of a type's dictionaries by null; the batch layout stays the same."""
    arrow = storage_of(arrow)
    if pa.types.is_dictionary(arrow):
        return pa.dictionary(arrow.index_type, pa.null())
    if not arrow.num_fields or not layout_of(arrow).dictionaries:
        return arrow
    if pa.types.is_run_end_encoded(arrow):
        return pa.run_end_encoded(arrow.run_end_type, without_values(arrow.value_type))
    if pa.types.is_map(arrow):
        return pa.map_(without_values(arrow.key_type), without_values(arrow.item_type))
    fields = [arrow.field(index) for index in range(arrow.num_fields)]
    fields = [field.with_type(without_values(field.type)) for field in fields]
    for is_kind, make in _NESTED:
        if is_kind(arrow):
            return make(arrow, fields)
    raise AssertionError(f"{arrow} has fields of an unknown kind")


_NESTED: tuple[tuple[Callable[[pa.DataType], bool], Callable[..., pa.DataType]], ...] = (
    (pa.types.is_struct, lambda _, fields: pa.struct(fields)),
    (
        pa.types.is_union,
        lambda arrow, fields: pa.union(fields, mode=arrow.mode, type_codes=arrow.type_codes),
    ),
    (pa.types.is_fixed_size_list, lambda arrow, fields: pa.list_(fields[0], arrow.list_size)),
    (pa.types.is_list, lambda _, fields: pa.list_(fields[0])),
    (pa.types.is_large_list, lambda _, fields: pa.large_list(fields[0])),
    (pa.types.is_list_view, lambda _, fields: pa.list_view(fields[0])),
    (pa.types.is_large_list_view, lambda _, fields: pa.large_list_view(fields[0])),
)


def _outer_dictionaries(arrow: pa.DataType) -> int:
    """Return the number of a type's dictionaries that are not inside another dictionary."""
    arrow = storage_of(arrow)
    if pa.types.is_dictionary(arrow):
        return 1
    return sum(map(_outer_dictionaries, _child_types(arrow)))


def _own_buffers(arrow: pa.DataType) -> int:
    """Return the number of buffers of a type, without the buffers of its children."""
    types = pa.types
    if types.is_null(arrow) or types.is_run_end_encoded(arrow):
        return 0
    if types.is_struct(arrow) or types.is_fixed_size_list(arrow):
        return 1
    if types.is_union(arrow):
        return 2 if arrow.mode == "dense" else 1
    return 3 if types.is_list_view(arrow) or types.is_large_list_view(arrow) else 2


def _child_types(arrow: pa.DataType) -> list[pa.DataType]:
    if pa.types.is_run_end_encoded(arrow):
        return [arrow.run_end_type, arrow.value_type]
    if pa.types.is_map(arrow):
        return [pa.struct([arrow.key_field, arrow.item_field])]
    return [arrow.field(index).type for index in range(arrow.num_fields)]
