"""Mapping of a stream's schema to a model's contract: the tensor of each node and buffer.

Built once per schema, and shared by all streams with that schema.

Runs on: gateway loop.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice
from typing import Any, Final, NamedTuple

import pyarrow as pa

from iskander.arrow import ipc, types
from iskander.arrow.layout import SchemaLayout, layout_of
from iskander.arrow.rank import can_group
from iskander.arrow.schema_limits import require_schema_limits
from iskander.config.schema import HEADER_BYTES_MAX, LimitsConfig
from iskander.contract.inputs import entries_of
from iskander.contract.outputs import ColumnOrder
from iskander.contract.processing.buckets import buckets_of, contracts_of_buckets
from iskander.contract.tensors import Contract, TensorSpec
from iskander.errors import ContractError, LimitExceeded, MalformedInput
from iskander.gateway.protocols.flight.columns.inputs import InputBuilder

NODES_ON_LOOP: Final = 256
"""Converted batches with more arrays, at all depths, are read and written on threads; so are
batches with more string columns."""
DICTIONARY_NODES: Final = 8
"""Arrays that cost as much as a dictionary."""


HEADER_CACHE_BYTES_MAX: Final = 256 * 1024
"""Checked headers of a plan; batches of one size have identical headers."""
HEADER_CACHE_FACTOR: Final = 8
"""Memory of a checked header, with the response header and all positions, for each of its bytes."""
PLAN_BYTES: Final = 32 * 1024
HEADER_FACTOR: Final = 5
FIELD_BYTES: Final = 512
"""Upper bound of a plan's memory: a base, and for each byte of the schema's header, field and
column. Measured: 1 to 3 MB for 1,000 columns."""


class Column(NamedTuple):
    """Position of one column of a plain batch in the header's arrays."""

    name: str
    type: pa.DataType
    first_node: int
    first_buffer: int
    levels: tuple[int, ...]  # Values per row in each of its nodes.
    bits: int  # Of one value; 0 for strings, whose offsets must be read.
    spec: TensorSpec | None  # None if only passed through.

    @property
    def values_buffer(self) -> int:
        """Index of the buffer of innermost values; for strings, of offsets, followed by bytes."""
        return self.first_buffer + len(self.levels)


class PassthroughLayout(NamedTuple):
    """The passed-through columns of a plain response."""

    nodes: list[int]
    buffers: list[int]  # Relative to the end of the results.
    ranges: list[tuple[int, int, bytes]]  # Start and end in the request's body, and padding.
    length_bytes: int


class ResponseLayout(NamedTuple):
    """A plain response without its results, which come first in the body."""

    header: bytes
    head: bytes  # The encoded message up to its body, without `app_metadata`.
    results_bytes: int
    ranges: list[tuple[int, int, bytes]]  # Of the passed-through columns.
    body_bytes: int


class CachedHeader(NamedTuple):
    """A header that passed all checks, which hold for any body of that length."""

    rows: int
    body_bytes: int
    tensors: list[tuple[int, int]]
    response: ResponseLayout | PassthroughLayout | None


class Order:
    """Column order of a response; the first `passed_count` columns are passed through."""

    def __init__(self, columns: list[pa.Field], passed_count: int, order: ColumnOrder) -> None:
        names = [field.name for field in columns]
        places = list(range(len(names)))
        if order == "outputs_first":
            places = places[passed_count:] + places[:passed_count]
        elif order != "passthrough_first":
            places = [names.index(name) for name in order if name in names]
        self._places = places
        self._is_default = places == sorted(places)
        extents = [
            size for field in columns if (size := types.header_counts(field.type)) is not None
        ]
        self._nodes = [size.nodes for size in extents]
        self._buffers = [size.buffers for size in extents]

    def of(self, values: list[Any]) -> list[Any]:
        """Reorder one value per column."""
        return [values[place] for place in self._places]

    def numbers(self, nodes: list[int], buffers: list[int]) -> tuple[list[int], list[int]]:
        """Reorder a header's flat node and buffer pairs."""
        if self._is_default:
            return nodes, buffers
        return self._reorder(nodes, self._nodes), self._reorder(buffers, self._buffers)

    def _reorder(self, numbers: list[int], counts: list[int]) -> list[int]:
        rest = iter(numbers)
        return list(chain.from_iterable(self.of([list(islice(rest, 2 * n)) for n in counts])))


class Plan:
    """Mapping of a schema, given as its message header, to a contract.

    Raises MalformedInput, LimitExceeded, or ContractError with the mismatched columns.
    """

    def __init__(self, header: bytes, contract: Contract, limits: LimitsConfig) -> None:
        require_header(header)
        self.contract = contract
        self.schema = _read_schema(header, limits)
        self.schema_message = ipc.encapsulate(header)
        self.buckets, self.variants = buckets_of(contract), contracts_of_buckets(contract)
        entries = entries_of(contract)
        self.builders = [InputBuilder(entry, contract, self.schema) for entry in entries]
        used = _match(self.schema, contract, self.builders)
        self.layout = SchemaLayout(self.schema)
        self.passthrough = _passthrough_fields(self.schema, contract, used)
        self.group_columns = _group_columns(self.schema, contract)
        # Not plain: an assembled result (list, struct, rank), or a passed-through column that its
        # header does not fully describe. Then all passed-through columns are kept as arrays.
        self.is_assembled = any(column.is_assembled for column in contract.columns)
        is_described = all(types.header_counts(field.type) for field in self.passthrough)
        self.is_response_plain = is_described and not self.is_assembled
        # A plain batch of a converted stream has the passed-through columns only; the inputs are
        # built beside it.
        self.is_converted = (
            ipc.read_message(header).version != ipc.METADATA_V5
            or (not self.is_response_plain and bool(self.passthrough or self.group_columns))
            or bool(contract.sources)
            or any(builder.is_nested for builder in self.builders)
            or any(_needs_rewrite(field, used) for field in self.schema)
        )
        # The cost of a conversion: wide schemas cost milliseconds for each batch, and a column of
        # a few bytes may become a large tensor or text.
        weight = self.layout.nodes + DICTIONARY_NODES * self.layout.dictionaries
        self.is_wide = self.is_converted and weight > NODES_ON_LOOP
        kept = [*self.passthrough, *self.group_columns]
        self.passes_dictionaries = any(layout_of(field.type).dictionaries for field in kept)
        self.row_bytes_min = sum(spec.buffer_bytes(1) for spec in self.variants[0].inputs)
        self.row_decoded_bytes = sum(builder.row_decoded_bytes for builder in self.builders)
        self.row_work_bytes = sum(builder.row_work_bytes for builder in self.builders)
        self.has_texts = any(builder.sent.is_text for builder in self.builders)
        self.expands_texts = any(builder.expands_text for builder in self.builders)
        self.text_buffers, self.walked_columns = _text_places(self.schema, self.layout, used)
        self.plain_schema = self.schema
        if self.is_converted:
            self.plain_schema = pa.schema(self.passthrough if self.is_response_plain else [])
        specs = {} if self.is_converted else {spec.column: spec for spec in contract.inputs}
        columns = {column.name: column for column in _lay_out(self.plain_schema, specs)}
        self.inputs = [columns[name] for name in specs]
        forwarded = self.passthrough if self.is_response_plain else []
        self.forwarded = [columns[field.name] for field in forwarded]
        self.nodes_count = sum(len(column.levels) for column in columns.values())
        sizes = (len(column.levels) + (1 if column.bits else 2) for column in columns.values())
        self.buffers_count = sum(sizes)
        fields = [*self.passthrough, *types.output_schema(contract)]
        self.order = Order(fields, len(self.passthrough), contract.column_order)
        self.response_schema = pa.schema(self.order.of(fields))
        self.response_header = ipc.header_of(self.response_schema.serialize())
        self.template = ipc.BatchTemplate(self.response_schema) if self.is_response_plain else None
        self.strings = [each for each in (*self.inputs, *self.forwarded) if not each.bits]
        # Each of them is validated for each batch.
        self.is_wide = self.is_wide or len(self.strings) > NODES_ON_LOOP
        # Checks of strings depend on the body; all others only on the header and body length.
        self.is_header_sufficient = not self.strings
        self.has_string_inputs = any(not column.bits for column in self.inputs)
        # The response's header depends on string results.
        self.has_string_results = any(spec.is_string for spec in contract.outputs)
        self.header_cache: dict[bytes, CachedHeader] = {}
        self.header_cache_bytes = 0
        fields_count = self.layout.nodes + len(self.schema)
        self.memory_bytes = (
            PLAN_BYTES
            + HEADER_CACHE_BYTES_MAX
            + HEADER_FACTOR * len(header)
            + FIELD_BYTES * fields_count
        )

    def remember(self, header: bytes, checked: CachedHeader) -> None:
        """Keep a header that passed all checks."""
        size = HEADER_CACHE_FACTOR * len(header)
        if self.header_cache_bytes + size > HEADER_CACHE_BYTES_MAX:
            self.header_cache.clear()
            self.header_cache_bytes = 0
        self.header_cache[header] = checked
        self.header_cache_bytes += size


def require_header(header: bytes | memoryview) -> None:
    """Raise LimitExceeded if a header is too long for any batch within the limits."""
    if len(header) > HEADER_BYTES_MAX:
        raise LimitExceeded(f"the message header has {len(header)} bytes, limit {HEADER_BYTES_MAX}")


def require_limit(name: str, count: int, limit: int) -> None:
    """Raise LimitExceeded if a batch exceeds the setting `limits.{name}`."""
    if not 0 <= count <= limit:
        text = f"the batch has {count} {name}, limit {limit} (`limits.{name}`)"
        raise LimitExceeded(text, wanted=limit)


def _read_schema(header: bytes, limits: LimitsConfig) -> pa.Schema:
    message = ipc.read_message(header)
    if message.kind != ipc.SCHEMA:
        raise MalformedInput("the stream must begin with a schema")
    if ipc.is_big_endian(header, message):
        raise MalformedInput("big-endian streams are not supported; send little-endian buffers")
    require_schema_limits(header, limits)
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(ipc.encapsulate(header)))
        duplicates = {name for name in schema.names if len(schema.get_all_field_indices(name)) > 1}
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise MalformedInput(f"the schema cannot be read: {ipc.error_text(error)}") from None
    if duplicates:
        raise ContractError(f"duplicate columns {_quoted(duplicates)}")
    return schema.remove_metadata()


def _match(schema: pa.Schema, contract: Contract, builders: list[InputBuilder]) -> set[str]:
    """The columns that inputs use; raises a ContractError that lists every mismatch."""
    problems = [problem for builder in builders for problem in builder.problems]
    used = {schema.names[path.indices[0]] for builder in builders for path in builder.paths}
    passthrough = contract.passthrough
    if passthrough != "all":
        named = {name.split(".")[0] for builder in builders for name in builder.names}
        allowed = {*used, *named, *(passthrough if isinstance(passthrough, tuple) else ())}
        allowed |= {rank.within for rank in contract.ranks}
        extra = [name for name in schema.names if name not in allowed]
        if extra:
            problems.append(f"columns {_quoted(extra)} are neither model inputs nor passed through")
    _raise_all(problems)
    return used


def _group_columns(schema: pa.Schema, contract: Contract) -> list[pa.Field]:
    """Columns that rows are ranked within, each once."""
    names = list(dict.fromkeys(rank.within for rank in contract.ranks if rank.within))
    problems = []
    for name in names:
        index = schema.get_field_index(name)
        if index < 0:
            problems.append(f"column `{name}` is missing: rows are ranked within it")
        elif not can_group(schema.field(index).type):
            kind = schema.field(index).type
            use = f"rows are ranked within it, and {kind} cannot be a group key"
            problems.append(f"column `{name}`: {use}")
    _raise_all(problems)
    return [schema.field(name) for name in names]


def _raise_all(problems: list[str]) -> None:
    if problems:
        raise ContractError("; ".join(problems))


def _passthrough_fields(schema: pa.Schema, contract: Contract, used: set[str]) -> list[pa.Field]:
    if contract.passthrough == "all":
        fields = [field for field in schema if field.name not in used]
    else:
        named = contract.passthrough if isinstance(contract.passthrough, tuple) else ()
        fields = [field for field in schema if field.name in named]
    produced = {column.column for column in contract.columns or contract.outputs}
    both = [field.name for field in fields if field.name in produced]
    if both:
        raise ContractError(f"columns {_quoted(both)} would be passed through and are also results")
    return fields


def _text_places(
    schema: pa.Schema, layout: SchemaLayout, used: set[str]
) -> tuple[list[int], list[int]]:
    """Buffers with the strings of unused columns, and the columns whose strings need a walk."""
    unused = [index for index, field in enumerate(schema) if field.name not in used]
    if layout.view_columns:
        return [], unused
    walked = [index for index in unused if layout.columns[index].dictionaries]
    return layout.texts(index for index in unused if index not in set(walked)), walked


def _needs_rewrite(field: pa.Field, used: set[str]) -> bool:
    """Whether a column's header does not fully describe it, or an input needs a cast."""
    is_other = field.name in used and types.received_type(field.type) != field.type
    return is_other or types.header_counts(field.type) is None


def _lay_out(schema: pa.Schema, specs: dict[str, TensorSpec]) -> list[Column]:
    columns, node, buffer = [], 0, 0
    for field in schema:
        name, kind = field.name, field.type
        size, leaf = types.header_counts(kind), types.innermost_type(kind)
        assert size is not None, "a plain schema has only columns with an extent"
        bits = 0 if types.is_string(leaf) else leaf.bit_width
        columns.append(
            Column(name, kind, node, buffer, types.array_lengths(kind), bits, specs.get(name))
        )
        node, buffer = node + size.nodes, buffer + size.buffers
    return columns


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))
