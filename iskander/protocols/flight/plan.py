"""What a stream's schema means for a contract: which nodes and buffers are which tensor.

Made once for a schema, and shared by all streams that begin with it.

Runs on: gateway loop.
"""

from __future__ import annotations

from itertools import islice
from typing import Any, NamedTuple

import pyarrow as pa

from iskander.arrow import ipc
from iskander.arrow.rank import can_group
from iskander.arrow.types import (
    depth,
    extent,
    has_negative_size,
    is_string,
    leaf_of,
    levels,
    output_schema,
    plain_of,
)
from iskander.config.schema import HEADER_ROOM_BYTES, LimitsConfig
from iskander.contract.buckets import buckets_of, variants
from iskander.contract.inputs import entries_of
from iskander.contract.outputs import ColumnOrder
from iskander.contract.tensors import Contract, TensorSpec
from iskander.errors import ContractError, LimitExceeded, MalformedInput
from iskander.protocols.flight.inputs import InputBuilder


class Column(NamedTuple):
    """Where one column of a plain batch is in the header's arrays.

    Attributes:
        levels: Length of each of its arrays for one row.
        bits: Of one value; 0 for strings, whose offsets have to be read.
        spec: The tensor that it is; None where it is only passed through.
    """

    name: str
    type: pa.DataType
    first_node: int
    first_buffer: int
    levels: tuple[int, ...]
    bits: int
    spec: TensorSpec | None

    @property
    def values_buffer(self) -> int:
        """Index of the buffer with the innermost values: after one validity buffer a level.

        For strings it has their offsets, and the next one their bytes.
        """
        return self.first_buffer + len(self.levels)


class PassthroughColumn(NamedTuple):
    """The passed-through columns of a plain response.

    Attributes:
        nodes: Of the header.
        buffers: Of the header, from where the results end.
        ranges: Of each buffer: start and end in the request's body, and padding.
        length_bytes: Of all of them.
    """

    nodes: list[int]
    buffers: list[int]
    ranges: list[tuple[int, int, bytes]]
    length_bytes: int


class Reply(NamedTuple):
    """The plain response to a batch, but for the results.

    Attributes:
        head: All of the message but its body, for a batch without `app_metadata`.
        results_bytes: Of the body that the worker leaves, which comes first.
        ranges: Of what is passed through.
    """

    header: bytes
    head: bytes
    results_bytes: int
    ranges: list[tuple[int, int, bytes]]
    body_bytes: int


class Checked(NamedTuple):
    """A header that was found true of a body of some length; it is so of any other of that length.

    Only where no check looks into the body, as for strings.
    """

    rows: int
    body_bytes: int
    tensors: list[tuple[int, int]]
    reply: Reply | PassthroughColumn | None


class Order:
    """The order of a response's columns, where passed-through ones come before results otherwise.

    Args:
        columns: Fields of a response, those that are passed through first.
        passed_count: How many those are.
        wanted: Of the contract.
    """

    def __init__(self, columns: list[pa.Field], passed_count: int, wanted: ColumnOrder) -> None:
        names = [field.name for field in columns]
        places = list(range(len(names)))
        if wanted == "outputs_first":
            places = places[passed_count:] + places[:passed_count]
        elif wanted != "passthrough_first":
            places = [names.index(name) for name in wanted if name in names]
        self._places = places
        self.is_usual = places == sorted(places)
        self._extents = [extent(field.type) for field in columns]

    def of(self, values: list[Any]) -> list[Any]:
        """One value for each column, in this order."""
        return [values[place] for place in self._places]

    def numbers(self, nodes: list[int], buffers: list[int]) -> tuple[list[int], list[int]]:
        """A header's numbers, two for each array and buffer of each column, in this order."""
        if self.is_usual:
            return nodes, buffers
        cut_nodes, cut_buffers = iter(nodes), iter(buffers)
        parts = [
            (list(islice(cut_nodes, 2 * size.nodes)), list(islice(cut_buffers, 2 * size.buffers)))
            for size in self._extents
            if size is not None
        ]
        ordered = self.of(parts)
        return (
            [number for part, _ in ordered for number in part],
            [number for _, part in ordered for number in part],
        )


class Plan:
    """What a schema means for a contract; the same for every stream with that schema.

    Args:
        header: The schema's message header, as it came.
        contract: Of the model version.
        limits: Of the server.

    Raises:
        MalformedInput: The header is no schema that can be read, or lists have a negative size.
        LimitExceeded: Too many columns, or too deep.
        ContractError: A column is missing, extra, of another type, or there twice.
    """

    def __init__(self, header: bytes, contract: Contract, limits: LimitsConfig) -> None:
        require_header(header)
        self.contract = contract
        self.schema = _read_schema(header)
        self.schema_message = ipc.encapsulate(header)
        _require_limits(self.schema, limits)
        self.buckets, self.variants = buckets_of(contract), variants(contract)
        self.makers = [InputBuilder(entry, contract, self.schema) for entry in entries_of(contract)]
        used = _match(self.schema, contract, self.makers)
        self.passed = _passed_columns(self.schema, contract, used)
        is_old = ipc.read_message(header).version != ipc.METADATA_V5
        # Passed-through columns of any type: where one is unusual, all are kept as arrays.
        # So are they where results are lists, structs or ranks, which are put together anew.
        self.groups = _group_columns(self.schema, contract)
        self.is_assembled = any(column.is_assembled for column in contract.columns)
        self.is_response_plain = not self.is_assembled and all(extent(f.type) for f in self.passed)
        is_kept = not self.is_response_plain and bool(self.passed or self.groups)
        is_made = bool(contract.sources) or any(maker.is_nested for maker in self.makers)
        is_unusual = any(_is_unusual(field, used) for field in self.schema)
        self.is_converted = is_old or is_kept or is_made or is_unusual
        # Where batches are converted, a plain one has what is passed through, and the inputs are
        # made beside it.
        self.plain_schema = self.schema
        if self.is_converted:
            self.plain_schema = pa.schema(self.passed if self.is_response_plain else [])
        specs = {} if self.is_converted else {spec.column: spec for spec in contract.inputs}
        laid_out = {column.name: column for column in _lay_out(self.plain_schema, specs)}
        self.inputs = [laid_out[name] for name in specs]
        self.forwarded = (
            [laid_out[field.name] for field in self.passed] if self.is_response_plain else []
        )
        self.nodes_count = sum(len(column.levels) for column in laid_out.values())
        self.buffers_count = sum(
            len(column.levels) + (1 if column.bits else 2) for column in laid_out.values()
        )
        columns = [*self.passed, *output_schema(contract)]
        self.order = Order(columns, len(self.passed), contract.column_order)
        self.response_schema = pa.schema(self.order.of(columns))
        self.response_header = ipc.header_of(self.response_schema.serialize())
        self.template = ipc.BatchTemplate(self.response_schema) if self.is_response_plain else None
        self.strings = [each for each in (*self.inputs, *self.forwarded) if not each.bits]
        # Whether a header that is true of one body is true of every body of its length.
        self.is_decided_by_header = not self.strings
        self.has_string_inputs = any(not column.bits for column in self.inputs)
        # Whether the response's header can be made before the results are there.
        self.has_string_results = any(spec.is_string for spec in contract.outputs)
        # A short message may have many rows of lists, and each becomes as long as any may be.
        self.makes_lists = any(maker.sent.is_ragged for maker in self.makers)
        self.row_bytes = sum(spec.buffer_bytes(1) for spec in contract.inputs)
        self.checked: dict[bytes, Checked] = {}


def require_header(header: bytes | memoryview) -> None:
    """Refuse a header that is longer than any that describes a batch within the limits.

    Raises:
        LimitExceeded: Says how long it may be.
    """
    if len(header) > HEADER_ROOM_BYTES:
        raise LimitExceeded(
            f"a message's header may have {HEADER_ROOM_BYTES} bytes, got {len(header)}"
        )


def _read_schema(header: bytes) -> pa.Schema:
    message = ipc.read_message(header)
    if message.kind != ipc.SCHEMA:
        raise MalformedInput("the stream has to begin with a schema")
    if ipc.is_big_endian(header, message):
        raise MalformedInput("big-endian streams are not supported; send little-endian buffers")
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(ipc.encapsulate(header)))
        twice = {name for name in schema.names if len(schema.get_all_field_indices(name)) > 1}
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        text = str(error).split("\n", 1)[0]
        raise MalformedInput(f"the schema cannot be read: {text}") from None
    if twice:
        raise ContractError(f"columns {_quoted(twice)} are there twice")
    return schema.remove_metadata()


def _require_limits(schema: pa.Schema, limits: LimitsConfig) -> None:
    if len(schema) > limits.columns:
        raise LimitExceeded(f"a batch may have {limits.columns} columns, got {len(schema)}")
    for field in schema:
        if depth(field.type) > limits.nesting:
            raise LimitExceeded(
                f"column `{field.name}` is nested deeper than {limits.nesting} levels",
                column=field.name,
            )
        if has_negative_size(field.type):
            raise MalformedInput(
                f"column `{field.name}` has lists of a negative size", column=field.name
            )


def _match(schema: pa.Schema, contract: Contract, makers: list[InputBuilder]) -> set[str]:
    """The columns that inputs are made of, or what does not fit, column by column."""
    problems = [problem for maker in makers for problem in maker.problems]
    used = {schema.names[path.indices[0]] for maker in makers for path in maker.paths}
    passed = contract.passthrough
    if passed != "all":
        named = {name.split(".")[0] for maker in makers for name in maker.names}
        allowed = {*used, *named, *(passed if isinstance(passed, tuple) else ())}
        allowed |= {rank.within for rank in contract.ranks}
        extra = [name for name in schema.names if name not in allowed]
        if extra:
            problems.append(
                f"columns {_quoted(extra)} are neither inputs of the model nor passed through"
            )
    if problems:
        raise ContractError("; ".join(problems))
    return used


def _group_columns(schema: pa.Schema, contract: Contract) -> list[pa.Field]:
    """Columns of the request within which rows are ranked, each once."""
    names = {rank.within: None for rank in contract.ranks if rank.within}
    problems = []
    for name in names:
        index = schema.get_field_index(name)
        if index < 0:
            problems.append(f"column `{name}` is missing: rows are ranked within it")
        elif not can_group(schema.field(index).type):
            problems.append(
                f"column `{name}`: rows are ranked within it, and {schema.field(index).type} does "
                "not say which belong together"
            )
    if problems:
        raise ContractError("; ".join(problems))
    return [schema.field(name) for name in names]


def _passed_columns(schema: pa.Schema, contract: Contract, used: set[str]) -> list[pa.Field]:
    if contract.passthrough == "all":
        passed = [field for field in schema if field.name not in used]
    else:
        named = contract.passthrough if isinstance(contract.passthrough, tuple) else ()
        passed = [field for field in schema if field.name in named]
    produced = {column.column for column in contract.columns or contract.outputs}
    both = [field.name for field in passed if field.name in produced]
    if both:
        raise ContractError(f"columns {_quoted(both)} would be passed through and are also results")
    return passed


def _is_unusual(field: pa.Field, used: set[str]) -> bool:
    """Whether a column has to be rewritten: its header does not say all, or offsets are wide."""
    is_other = field.name in used and plain_of(field.type) != field.type
    return is_other or extent(field.type) is None


def _lay_out(schema: pa.Schema, chosen: dict[str, TensorSpec]) -> list[Column]:
    columns, node, buffer = [], 0, 0
    for field in schema:
        size = extent(field.type)
        assert size is not None, "a plain schema has only columns with an extent"
        bits = 0 if is_string(leaf_of(field.type)) else leaf_of(field.type).bit_width
        columns.append(
            Column(
                field.name,
                field.type,
                node,
                buffer,
                levels(field.type),
                bits,
                chosen.get(field.name),
            )
        )
        node, buffer = node + size.nodes, buffer + size.buffers
    return columns


def _quoted(names: list[str] | set[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))
