"""A stream's batches: checked and cut into tensors on the way in, put together on the way out.

    schema + contract  ->  Plan      which nodes and buffers of a header are which tensor
    header, body       ->  Arrived   the bytes of every tensor and passed-through column
    Arrived, results   ->  frames    the response, with the passed-through columns as they came

The usual batch is never parsed as a whole: its header's numbers are held against what the plan
expects, and its bytes are copied once. What needs more (compression, dictionaries, lists that are
passed through, older metadata) is read by pyarrow, rewritten as a usual batch, and goes on from
there.

A header's numbers are claims. Each is checked against the rows and the body before it is used, so
the copy that the model reads is complete whatever the claims were.

Runs on: gateway loop.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import pyarrow as pa

from iskander.config import LimitsConfig
from iskander.contract.tensors import ALIGNMENT, Contract, TensorSpec, body_layout
from iskander.errors import ContractError, LimitExceeded, MalformedInput
from iskander.gateway import ipc
from iskander.gateway.arrow_types import (
    as_tensor,
    columns_without_nulls,
    depth,
    extent,
    is_string,
    leaf_of,
    levels,
    output_schema,
    to_arrow,
)
from iskander.gateway.frontends.flight_data import data_frame

HEADERS_MAX = 64
"""Rendered headers kept by number of rows; clients send few different numbers."""

_I64 = struct.Struct("<q")


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
        """Index of the buffer with the innermost values: after one validity buffer a level."""
        return self.first_buffer + len(self.levels)


class Arrived(NamedTuple):
    """A checked batch.

    Attributes:
        tensors: Start and end in `body` of each of the contract's inputs.
        nodes: Of the passed-through columns, as the response repeats them.
        buffers: Start and end in `body` of each of their buffers.
        kept: The passed-through columns themselves, where the plan has them as arrays.
    """

    rows: int
    body: memoryview
    tensors: list[tuple[int, int]]
    nodes: list[int]
    buffers: list[tuple[int, int]]
    kept: list[pa.Array]
    app_metadata: bytes


class Plan:
    """What a schema means for a contract; the same for every stream with that schema.

    Args:
        header: The schema's message header, as it came.
        contract: Of the model version.
        limits: Of the server.

    Raises:
        MalformedInput: The header is no schema that can be read.
        LimitExceeded: Too many columns, or too deep.
        ContractError: A column is missing, extra, of another type, or there twice.
    """

    def __init__(self, header: bytes, contract: Contract, limits: LimitsConfig) -> None:
        self.contract = contract
        self.schema = _read_schema(header)
        self.schema_message = ipc.encapsulate(header)
        _require_limits(self.schema, limits)
        chosen = _match(self.schema, contract)
        self.passed = _passed_columns(self.schema, contract)
        is_old = ipc.read_message(header).version != ipc.METADATA_V5
        # Passed-through columns of any type: where one is unusual, all are kept as arrays.
        self.is_response_plain = all(extent(field.type) for field in self.passed)
        self.is_converted = is_old or any(extent(field.type) is None for field in self.schema)
        plain = self.schema
        if self.is_converted:
            passed = self.passed if self.is_response_plain else []
            plain = _plain_schema(self.schema, chosen, passed)
        self.plain_schema = plain
        columns = {column.name: column for column in _lay_out(plain, chosen)}
        self.inputs = [columns[spec.column] for spec in contract.inputs]
        self.forwarded = (
            [columns[field.name] for field in self.passed] if self.is_response_plain else []
        )
        self.nodes_count = sum(len(column.levels) for column in columns.values())
        self.buffers_count = sum(
            len(column.levels) + (1 if column.bits else 2) for column in columns.values()
        )
        self.response_schema = pa.schema([*self.passed, *output_schema(contract)])
        self.response_header = ipc.header_of(self.response_schema.serialize())
        self._template = ipc.BatchTemplate(self.response_schema) if self.is_response_plain else None
        self._headers: dict[int, bytes] = {}

    def plain_frame(self, arrived: Arrived, output: memoryview) -> bytes:
        """The response to a plain batch.

        Layout:
            The results' body as the worker left it, then the passed-through buffers, each on a
            64-byte boundary.
        """
        rows = arrived.rows
        offsets, end = body_layout(self.contract.outputs, rows)
        parts: list[bytes | memoryview] = [output[:end]]
        if not self.forwarded:
            header = self._headers.get(rows)
            if header is None:
                header = self._render(rows, [], [], offsets, end)
                if len(self._headers) >= HEADERS_MAX:
                    self._headers.clear()
                self._headers[rows] = header
            return data_frame(header, arrived.app_metadata, parts, end)
        buffers: list[int] = []
        for start, stop in arrived.buffers:
            buffers += (end, stop - start)
            padding = -(stop - start) % ALIGNMENT
            parts += (arrived.body[start:stop], bytes(padding))
            end += stop - start + padding
        header = self._render(rows, arrived.nodes, buffers, offsets, end)
        return data_frame(header, arrived.app_metadata, parts, end)

    def _render(
        self, rows: int, nodes: list[int], buffers: list[int], offsets: list[int], end: int
    ) -> bytes:
        own_nodes, own_buffers = columns_without_nulls(self.contract.outputs, rows, offsets)
        assert self._template is not None
        return bytes(self._template.render(rows, nodes + own_nodes, buffers + own_buffers, end))


class StreamCodec:
    """One stream's way in and out: its plan, and the dictionaries that it has sent."""

    def __init__(self, plan: Plan, limits: LimitsConfig, rows_max: int) -> None:
        self.plan = plan
        self._limits = limits
        self._rows_max = min(limits.rows, rows_max)
        self._dictionaries: dict[int, list[bytes]] = {}
        self._dictionaries_bytes = 0
        self._sent: dict[int, bytes] = {}

    def decode(self, header: memoryview, body: memoryview, app_metadata: bytes) -> Arrived | None:
        """Check one message of the stream; None for a dictionary, which is kept.

        Raises:
            MalformedInput: The message is not what it claims.
            LimitExceeded: Rows or bytes.
            ContractError: Nulls in an input, or not the rows that the model takes.
        """
        message = ipc.read_message(header)
        if not 0 <= message.body_bytes <= len(body):
            raise MalformedInput(
                f"the header announces a body of {message.body_bytes} bytes and {len(body)} came"
            )
        if message.kind == ipc.DICTIONARY_BATCH:
            self._keep_dictionary(header, message, body)
            return None
        if message.kind != ipc.RECORD_BATCH:
            what = "a second schema" if message.kind == ipc.SCHEMA else f"kind {message.kind}"
            raise MalformedInput(f"wanted a record batch, got {what}")
        batch = ipc.read_batch(header, message)
        self._require_limits(batch.rows, len(body))
        kept: list[pa.Array] = []
        if self.plan.is_converted or batch.is_compressed or message.version != ipc.METADATA_V5:
            batch, body, kept = self._convert(header, batch, body)
        return self._check(batch, body, kept, app_metadata)

    def take(self, arrived: Arrived, output: memoryview) -> bytes | tuple[Arrived, bytes]:
        """Copy the results out of their lease, so that it can be given back.

        Returns:
            What `frames` wants: the finished frame, for a plain response.
        """
        if self.plan.is_response_plain:
            return self.plan.plain_frame(arrived, output)
        return arrived, bytes(output)

    def frames(self, taken: bytes | tuple[Arrived, bytes]) -> list[bytes]:
        """The messages of one response; to be called in the stream's order.

        Dictionaries go before the batch that needs them, and only where they changed.
        """
        if isinstance(taken, bytes):
            return [taken]
        arrived, output = taken
        results = _results(self.plan.contract, arrived.rows, output)
        batch = pa.RecordBatch.from_arrays(
            [*arrived.kept, *results], schema=self.plan.response_schema
        )
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        frames = []
        reader = pa.ipc.MessageReader.open_stream(sink.getvalue())
        reader.read_next_message()  # The schema, which the stream began with.
        for message in reader:
            header, body = bytes(message.metadata), memoryview(message.body).cast("B")
            read = ipc.read_message(header)
            if read.kind == ipc.DICTIONARY_BATCH:
                dictionary = ipc.read_dictionary(header, read)[0]
                frame = data_frame(header, b"", [body], len(body))
                if self._sent.get(dictionary) != frame:
                    self._sent[dictionary] = frame
                    frames.append(frame)
            else:
                frames.append(data_frame(header, arrived.app_metadata, [body], len(body)))
        return frames

    def _check(
        self, batch: ipc.Batch, body: memoryview, kept: list[pa.Array], app_metadata: bytes
    ) -> Arrived:
        plan, rows, nodes, buffers = self.plan, batch.rows, batch.nodes, batch.buffers
        if len(nodes) != 2 * plan.nodes_count or len(buffers) != 2 * plan.buffers_count:
            raise MalformedInput(
                f"the record batch has {len(nodes) // 2} arrays in {len(buffers) // 2} buffers and "
                f"its schema asks for {plan.nodes_count} in {plan.buffers_count}"
            )
        fixed = plan.contract.rows_fixed
        if fixed is not None and rows not in (0, fixed):
            raise ContractError(f"this model takes exactly {fixed} rows a batch, got {rows}")
        length = len(body)
        tensors = []
        for column in plan.inputs:
            _require_lengths(column, rows, nodes)
            for index in range(column.first_node, column.first_node + len(column.levels)):
                if nodes[2 * index + 1]:
                    raise ContractError(
                        f"column `{column.name}` has {nodes[2 * index + 1]} nulls, and the model's "
                        "input cannot hold a null",
                        column=column.name,
                    )
            assert column.spec is not None
            wanted = column.spec.buffer_bytes(rows)
            start, got = buffers[2 * column.values_buffer : 2 * column.values_buffer + 2]
            if start < 0 or got < wanted or start + wanted > length:
                raise MalformedInput(
                    f"column `{column.name}` needs {wanted} bytes for {rows} rows; its buffer says "
                    f"{got} at {start} of a body of {length}",
                    column=column.name,
                )
            tensors.append((start, start + wanted))
        passed_nodes: list[int] = []
        passed_buffers: list[tuple[int, int]] = []
        for column in plan.forwarded:
            _require_lengths(column, rows, nodes)
            last = column.first_node + len(column.levels)
            passed_nodes += nodes[2 * column.first_node : 2 * last]
            passed_buffers += _forwarded(column, rows, batch, body)
        if plan.forwarded:
            self._require_strings(plan.forwarded, batch)
        return Arrived(rows, body, tensors, passed_nodes, passed_buffers, kept, app_metadata)

    def _require_limits(self, rows: int, body_bytes: int) -> None:
        if not 0 <= rows <= self._rows_max:
            raise LimitExceeded(
                f"a batch may have {self._rows_max} rows, got {rows}", wanted=self._rows_max
            )
        if body_bytes > self._limits.bytes:
            raise LimitExceeded(
                f"a batch may have {self._limits.bytes} bytes, got {body_bytes}",
                wanted=self._limits.bytes,
            )

    def _require_strings(self, columns: list[Column], batch: ipc.Batch) -> None:
        total = sum(
            batch.buffers[2 * (column.first_buffer + 2) + 1]
            for column in columns
            if not column.bits
        )
        if total > self._limits.string_bytes:
            raise LimitExceeded(
                f"a batch's strings may have {self._limits.string_bytes} bytes, got {total}"
            )

    def _keep_dictionary(self, header: memoryview, message: ipc.Message, body: memoryview) -> None:
        dictionary, is_delta, batch = ipc.read_dictionary(header, message)
        if batch.is_compressed:
            self._require_expanded(batch, body)
        if not is_delta:
            dropped = self._dictionaries.pop(dictionary, [])
            self._dictionaries_bytes -= sum(map(len, dropped))
        kept = ipc.encapsulate(bytes(header), body[: message.body_bytes])
        self._dictionaries_bytes += len(kept)
        if self._dictionaries_bytes > self._limits.bytes:
            raise LimitExceeded(
                f"a stream's dictionaries may have {self._limits.bytes} bytes in all"
            )
        self._dictionaries.setdefault(dictionary, []).append(kept)

    def _require_expanded(self, batch: ipc.Batch, body: memoryview) -> None:
        """Refuse a bomb by what its buffers say they will expand to, before any is expanded."""
        total = 0
        for index in range(0, len(batch.buffers), 2):
            start, length = batch.buffers[index], batch.buffers[index + 1]
            if length == 0:
                continue
            if start < 0 or length < 8 or start + length > len(body):
                raise MalformedInput("a compressed buffer is not inside the body")
            total += max(_I64.unpack_from(body, start)[0], length - 8)
        self._require_limits(batch.rows, total)

    def _convert(
        self, header: memoryview, batch: ipc.Batch, body: memoryview
    ) -> tuple[ipc.Batch, memoryview, list[pa.Array]]:
        plan = self.plan
        if batch.is_compressed:
            self._require_expanded(batch, body)
        dictionaries = [part for kept in self._dictionaries.values() for part in kept]
        whole = b"".join((plan.schema_message, *dictionaries, ipc.encapsulate(header, body)))
        try:
            read = pa.ipc.open_stream(pa.py_buffer(whole)).read_next_batch()
            read.validate(full=True)
            self._require_decoded(read)
            columns = []
            for field in plan.plain_schema:
                column = read.column(field.name)
                is_encoded = pa.types.is_dictionary(column.type)
                columns.append(column.dictionary_decode() if is_encoded else column)
            plain = pa.RecordBatch.from_arrays(columns, schema=plan.plain_schema).serialize()
        except (pa.ArrowException, OSError, StopIteration) as error:
            text = str(error).split("\n", 1)[0]
            raise MalformedInput(f"the record batch cannot be read: {text}") from None
        kept = []
        if not plan.is_response_plain:
            kept = [read.column(field.name) for field in plan.passed]
        plain_header = ipc.header_of(plain)
        message = ipc.read_message(plain_header)
        plain_body = memoryview(plain).cast("B")[len(plain) - message.body_bytes :]
        return ipc.read_batch(plain_header, message), plain_body, kept

    def _require_decoded(self, batch: pa.RecordBatch) -> None:
        decoded = sum(spec.buffer_bytes(batch.num_rows) for spec in self.plan.contract.inputs)
        self._require_limits(batch.num_rows, decoded)
        strings = sum(
            column.nbytes for column in batch.columns if is_string(_values_of(column.type))
        )
        if strings > self._limits.string_bytes:
            raise LimitExceeded(
                f"a batch's strings may have {self._limits.string_bytes} bytes, got {strings}"
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


def _match(schema: pa.Schema, contract: Contract) -> dict[str, TensorSpec]:
    """The spec of each input column, or what does not fit, column by column."""
    problems = []
    chosen = {}
    for spec in contract.inputs:
        index = schema.get_field_index(spec.column)
        if index < 0:
            problems.append(f"column `{spec.column}` is missing: wanted {spec.type}")
            continue
        got = as_tensor(_values_of(schema.field(index).type))
        wanted = spec.type
        if got is None or (got.dtype_name, got.shape) != (wanted.dtype_name, wanted.shape):
            problems.append(
                f"column `{spec.column}`: wanted {wanted}, got {schema.field(index).type}"
            )
        chosen[spec.column] = spec
    passed = contract.passthrough
    if passed != "all":
        allowed = {*chosen, *(passed if isinstance(passed, tuple) else ())}
        extra = [name for name in schema.names if name not in allowed]
        if extra:
            problems.append(
                f"columns {_quoted(extra)} are neither inputs of the model nor passed through"
            )
    if problems:
        raise ContractError("; ".join(problems))
    return chosen


def _passed_columns(schema: pa.Schema, contract: Contract) -> list[pa.Field]:
    inputs = {spec.column for spec in contract.inputs}
    if contract.passthrough == "all":
        passed = [field for field in schema if field.name not in inputs]
    else:
        passed = [field for field in schema if field.name in contract.passthrough]
    produced = {spec.column for spec in contract.outputs}
    both = [field.name for field in passed if field.name in produced]
    if both:
        raise ContractError(f"columns {_quoted(both)} would be passed through and are also results")
    return passed


def _plain_schema(
    schema: pa.Schema, chosen: dict[str, TensorSpec], passed: list[pa.Field]
) -> pa.Schema:
    names = {*chosen, *(field.name for field in passed)}
    return pa.schema(
        [
            field.with_type(_values_of(field.type)) if field.name in chosen else field
            for field in schema
            if field.name in names
        ]
    )


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


def _require_lengths(column: Column, rows: int, nodes: tuple[int, ...]) -> None:
    for index, level in enumerate(column.levels, column.first_node):
        length, null_count = nodes[2 * index], nodes[2 * index + 1]
        if length != rows * level or not 0 <= null_count <= length:
            raise MalformedInput(
                f"column `{column.name}` says {length} values with {null_count} nulls where the "
                f"batch's {rows} rows make {rows * level}",
                column=column.name,
            )


def _forwarded(
    column: Column, rows: int, batch: ipc.Batch, body: memoryview
) -> list[tuple[int, int]]:
    """The ranges of a passed-through column's buffers, each found long enough."""
    ranges = []
    count = len(column.levels) + (1 if column.bits else 2)
    for place in range(count):
        at = 2 * (column.first_buffer + place)
        start, length = batch.buffers[at], batch.buffers[at + 1]
        wanted = 0
        if place < len(column.levels):
            node = 2 * (column.first_node + place)
            wanted = (batch.nodes[node] + 7) // 8 if batch.nodes[node + 1] else 0
        elif column.bits:
            wanted = (rows * column.levels[-1] * column.bits + 7) // 8
        if start < 0 or length < wanted or length < 0 or start + length > len(body):
            raise MalformedInput(
                f"column `{column.name}` has a buffer of {length} bytes at {start} of a body of "
                f"{len(body)}, and needs {wanted}",
                column=column.name,
            )
        ranges.append((start, start + length))
    if not column.bits and rows:
        buffers = [pa.py_buffer(body[start:stop]) for start, stop in ranges]
        null_count = batch.nodes[2 * column.first_node + 1]
        buffers[0] = buffers[0] if null_count else None
        try:
            storage = leaf_of(column.type)
            pa.Array.from_buffers(storage, rows, buffers, null_count).validate(full=True)
        except pa.ArrowInvalid as error:
            text = str(error).split("\n", 1)[0]
            raise MalformedInput(f"column `{column.name}`: {text}", column=column.name) from None
    return ranges


def _results(contract: Contract, rows: int, output: bytes) -> list[pa.Array]:
    """The results as arrays, over a body as `body_layout` says."""
    offsets, _ = body_layout(contract.outputs, rows)
    body, arrays = pa.py_buffer(output), []
    for spec, offset in zip(contract.outputs, offsets, strict=True):
        arrow = to_arrow(spec.type)
        values = body.slice(offset, spec.buffer_bytes(rows))
        array = pa.Array.from_buffers(leaf_of(arrow), rows * spec.elements, [None, values])
        arrays.append(_nest(array, arrow))
    return arrays


def _nest(values: pa.Array, arrow: pa.DataType) -> pa.Array:
    if isinstance(arrow, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(arrow, _nest(values, arrow.storage_type))
    if not pa.types.is_fixed_size_list(arrow):
        return values
    return pa.FixedSizeListArray.from_arrays(_nest(values, arrow.value_type), type=arrow)


def _values_of(arrow: pa.DataType) -> pa.DataType:
    return arrow.value_type if pa.types.is_dictionary(arrow) else arrow


def _quoted(names: list[str] | set[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))
