"""Streams of record batches, with pyarrow and its full validation as the reference.

Layout of an input: number of a contract (1 byte), then messages: length of the header (2 bytes) and
of the body (4), header, body. The first one is the schema.

Most batches are parsed without pyarrow and its flatbuffer verifier. If only the verifier rejects a
header, the parsed numbers must still fit the body, and the response must be valid.

Contracts with conversion have a reference of their own: the values that pyarrow reads, converted in
Python one at a time. What the event loop reads must cost at most a constant for each byte, and what
a thread reads at most the memory that the codec announces before.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from random import Random
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from fuzz import engine, mutation
from iskander.arrow import ipc
from iskander.config.schema import LimitsConfig
from iskander.contract.column_types import parse_column_type
from iskander.contract.compile import compile_contract
from iskander.contract.dtypes import BY_ARROW
from iskander.contract.graph import Graph, GraphTensor
from iskander.contract.inputs import columns_of, entries_of
from iskander.contract.manifest import InputColumn, Manifest
from iskander.contract.processing.buckets import contracts_of_buckets
from iskander.contract.tensors import ALIGNMENT, Contract, TensorSpec, body_layout
from iskander.errors import ContractError, IskanderError, LimitExceeded, MalformedInput
from iskander.gateway.protocols.flight.codec import LongMessage, ParsedBatch, StreamCodec
from iskander.gateway.protocols.flight.columns.convert import BatchPortion
from iskander.gateway.protocols.flight.data import data_head, read_flight_data
from iskander.gateway.protocols.flight.plan import Plan

ITERATIONS = 1000
LIMITS = LimitsConfig(rows=60_000, bytes=4 << 20, columns=16, nesting=4, string_bytes=1 << 19)
COMPARED_ROWS = 2000
"""Batches of more rows are only measured: the reference reads one value at a time."""
STRICTER = (
    "buffers overlap",
    "the header declares a body",  # Longer than the received body.
    "no record batch",
    "wanted a record batch",
    "big-endian",
    "a compressed buffer is not inside the body",
    "its schema requires",  # More arrays or buffers than needed.
    "a buffer has 0 bytes",  # pyarrow ignores the offset of an empty buffer.
    "requires 0;",  # pyarrow ignores this buffer.
    "a negative",
    "rows make",  # A list's child has more values than the rows need.
    "experimental_compression",
    "with scale",  # pyarrow has no limit of a decimal's scale.
)
"""Parts of error texts for streams that pyarrow accepts."""
UNVERIFIED = (
    "Invalid flatbuffers message", "Expected to read", "Tried reading schema",
    "Unexpected null field",
)  # fmt: skip
"""Parts of pyarrow's errors about header parts that the gateway does not parse."""
UNALIGNED = "-byte aligned offset"
"""pyarrow's error for unaligned buffers, which the gateway copies first."""
CLAIMED = "null_count value"
"""pyarrow's error for null counts of passthrough columns, which the gateway does not check."""
LOOP_BYTES = 512 << 10
LOOP_FACTOR = 32
"""Limit of Arrow's memory for a message that the event loop reads: for any, and for each byte."""
THREAD_BYTES = 256 << 10
THREAD_FACTOR = 4
"""The same for a message that a thread reads, in addition to the memory that it is charged."""
PLAN_BYTES = 1 << 20
PLAN_FACTOR = 64
"""The same for a schema."""
POOL_BYTES = 64 << 10
"""Peak of a pool that is used again: a pool's peak is that of all inputs."""
UNIT_MS = {"s": 1000, "ms": 1, "us": Fraction(1, 1000), "ns": Fraction(1, 1_000_000)}


def _spec(name: str, text: str) -> TensorSpec:
    column = parse_column_type(text)
    return TensorSpec(name, name, column, column.shape)


def _converting(made: tuple[Any, ...]) -> Contract:
    """A contract of entries as in a manifest, and the element and shape of each tensor."""
    passthrough, entries, tensors = made
    output = {"tensor": "score", "column": "score", "type": "float32"}
    raw = {"format": 1, "inputs": entries, "outputs": [output], "passthrough": passthrough}
    inputs = (
        GraphTensor(name, BY_ARROW[element].onnx, ("rows", *shape))
        for name, (element, *shape) in tensors.items()
    )
    outputs = (GraphTensor("score", "tensor(float)", ("rows",)),)
    return compile_contract(msgspec.convert(raw, Manifest), Graph(tuple(inputs), outputs))


def _entry(name: str, kind: str, **more: Any) -> dict[str, Any]:
    return {"tensor": name, "column": name, "type": kind} | more


OUTPUTS = (_spec("score", "float32"),)
FILLED = {"nulls": "fill", "fill": "?"}
_PAIR = "fixed_size_list<number>[2]"
CONVERTING: tuple[tuple[Any, ...], ...] = (
    (
        "all",
        [
            _entry("d", "decimal", **{"as": "number", "nulls": "nan"}),
            _entry("u", "decimal128(9, 3)", **{"as": "unscaled", "nulls": "fill", "fill": -1}),
        ],
        {"d": ("float64",), "u": ("int64",)},
    ),
    (
        "none",
        [_entry("t", "timestamp", unit="ms"), _entry("e", "duration", unit="ms")],
        {"t": ("int64",), "e": ("int64",)},
    ),
    (
        "all",
        [_entry("w", "utf8", **FILLED), _entry("p", "fixed_size_list<binary>[2]")],
        {"w": ("utf8",), "p": ("binary", 2)},
    ),
    (
        "none",
        [_entry("x", "list<number>", max_length=3, mask="m", lengths="n", padding=-1, cast=True)],
        {"x": ("float32", 3), "m": ("bool", 3), "n": ("int32",)},
    ),
    (
        "all",
        [
            _entry(
                "w",
                "list<utf8>",
                max_length=2,
                truncate="tail",
                padding="-",
                nulls="fill",
                fill="!",
            )
        ],
        {"w": ("utf8", 2)},
    ),
    (
        "all",
        [_entry("x", "list<int64>", buckets=[1, 2, 4], truncate="head", lengths="n")],
        {"x": ("int64", "long"), "n": ("int64",)},
    ),
    (
        "none",
        [_entry("x", _PAIR, cast=True, nulls="mask", mask="m")],
        {"x": ("float64", 2), "m": ("bool", 2)},
    ),
    (
        "none",
        [{"tensor": "x", "columns": ["s.a", "s.b", "c"], "type": "number", "cast": True}],
        {"x": ("float64", 3)},
    ),
    ("all", [_entry("x", "fixed_shape_tensor<float32>[2, 2]")], {"x": ("float32", 2, 2)}),
    ("all", [_entry("x", "number", cast=True, nulls="fill", fill=7)], {"x": ("int32",)}),
)
"""`passthrough`, entries and tensors of contracts with conversion."""
FIRST = 200
"""Number of the first contract with conversion in an input."""
CONTRACTS = (
    Contract((_spec("x", "int64"),), OUTPUTS, "all"),
    Contract((_spec("x", "int64"), _spec("word", "utf8")), OUTPUTS, "all"),
    Contract((_spec("pair", "fixed_size_list<float32>[2]"),), OUTPUTS, "none"),
    Contract((_spec("flag", "bool"),), OUTPUTS, ("kept",)),
)
CONVERTING_CONTRACTS = tuple(map(_converting, CONVERTING))


MESSAGE_HEADER = 2
"""Field of a message with its batch or schema. Source: Arrow, Message.fbs."""


class ReferenceResult(NamedTuple):
    """The batches that pyarrow reads, and its error."""

    batches: list[pa.RecordBatch]
    error: str


def seeds() -> list[bytes]:
    x = pa.array([1, 2, 3], pa.int64())
    words = pa.array(["a", "", "ccc"])
    pair = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(6, dtype=np.float32)), 2)
    kept = {
        "nulls": pa.array([1, None, 3], pa.int32()),
        "words": pa.array(["", None, "é"]),
        "large": pa.array([b"a", None, b"\xff"], pa.large_binary()),
        "flags": pa.array([True, None, False]),
        "pairs": pa.array([[1, None], None, [3, 4]], pa.list_(pa.int16(), 2)),
    }
    other = {
        "list": pa.array([[1], [], None]),
        "struct": pa.array([{"a": 1, "b": "x"}, None, {"a": None, "b": None}]),
        "dictionary": pa.array(["a", "b", "a"]).dictionary_encode(),
        "view": pa.array(["a", None, "c" * 40], pa.string_view()),
        "map": pa.array([[("a", 1)], [], None], pa.map_(pa.string(), pa.int8())),
        "run_ends": pa.RunEndEncodedArray.from_arrays(pa.array([2, 3], pa.int32()), ["a", None]),
    }
    streams = [
        stream_of(0, {"x": x}),
        stream_of(0, {"x": x, **kept}),
        stream_of(1, {"x": x, "word": words}),
    ]
    streams += [stream_of(0, {"x": x, name: column}) for name, column in other.items()]
    for values in (pa.array(["ccc", "a"]), pa.array([b"\xff\xfe", b"a"])):
        streams += [stream_with_dictionaries(number, values) for number in (0, 1)]
    streams += [stream_of(2, {"pair": pair}), stream_of(3, {"flag": x.cast(pa.bool_()), "kept": x})]
    streams += [stream_of(0, {"x": x, **kept}, compression=each) for each in ("lz4", "zstd")]
    streams += [
        stream_of(0, {"x": x, **other}),
        stream_of(1, {"x": x, "word": words.dictionary_encode()}),
    ]
    return streams + converting_seeds()


def converting_seeds() -> list[bytes]:
    """Streams for the contracts with conversion, in several layouts."""
    decimals = [Decimal("1.25"), None, Decimal("-3.5")]
    exact = pa.decimal128(9, 3)
    times = pa.array([1000, 2000, 3000], pa.timestamp("us")), pa.array([1, 2, 3], pa.duration("s"))
    words, pairs = pa.array(["a", None, "é"]), [[b"a", b""], [b"b", b"c"], [b"", "é".encode()]]
    numbers = pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int16(), 2))
    parts = {"a": pa.array([1, 2, 3], pa.int8()), "b": pa.array([0.5, 2, 3])}
    struct = pa.StructArray.from_arrays(list(parts.values()), list(parts))
    tensor_type = pa.fixed_shape_tensor(pa.float32(), [2, 2])
    cells = pa.FixedSizeListArray.from_arrays(pa.array(range(12), pa.float32()), 4)
    tensor = pa.ExtensionArray.from_storage(tensor_type, cells)
    lists = [[1, 2, 3], [], [5]]
    texts = [["a", "b", "c"], [], ["d"]]
    columns: list[tuple[int, dict[str, pa.Array]]] = [
        (0, {"d": pa.array(decimals, pa.decimal128(9, 2)), "u": pa.array(decimals, exact)})
        for kind in (pa.decimal32(7, 2), pa.decimal64(12, 3), pa.decimal256(60, 30))
    ]
    columns += [(1, {"t": times[0], "e": times[1]})]
    columns += [
        (2, {"w": each, "p": pa.array(pairs, pa.list_(pa.binary(), 2))})
        for each in (words, words.dictionary_encode(), words.cast(pa.string_view()), runs(words))
    ]
    for kind in (pa.list_(pa.int8()), pa.large_list(pa.float32()), pa.list_view(pa.int64())):
        columns += [(3, {"x": pa.array(lists, kind)}), (5, {"x": pa.array(lists, kind)})]
    columns += [(5, {"x": pa.array(lists, pa.list_view(pa.int64()))})]
    for kind in (pa.list_(pa.string()), pa.list_view(pa.string()), pa.large_list(pa.large_utf8())):
        columns += [(4, {"w": pa.array(texts, kind)})]
    of_words = pa.ListArray.from_arrays([0, 2, 2, 3], words.fill_null("b").dictionary_encode())
    columns += [(4, {"w": of_words})]
    indices = pa.array([0, 0, 2], pa.int8())
    columns += [
        (6, {"x": numbers}),
        (6, {"x": runs(numbers)}),
        (6, {"x": pa.DictionaryArray.from_arrays(indices, numbers.fill_null([0, 0]))}),
        (7, {"s": struct, "c": pa.array([1, 2, 3])}),
        (7, {"s.a": parts["a"], "s": struct, "c": pa.array([True, False, True])}),
        (8, {"x": tensor}),
        (8, {"x": tensor, "t": tensor, "run": runs(pa.array([1, None, 3]))}),
        (9, {"x": pa.array([1, None, 3])}),
        (9, {"x": pa.DictionaryArray.from_arrays(indices, pa.array([1.0, 2.0, 3.0]))}),
        (9, {"x": runs(pa.array([1, None, 3], pa.uint8()))}),
    ]
    columns += expanding_columns()
    return [stream_of(FIRST + number, each) for number, each in columns] + [
        stream_of(FIRST + 6, {"x": numbers}, compression="zstd"),
        stream_of(FIRST + 2, columns[5][1], compression="lz4"),
    ]


def expanding_columns() -> list[tuple[int, dict[str, pa.Array]]]:
    """Columns of few bytes and many values."""
    rows = 40_000
    pair, end = pa.array([[1.0, 2.0]], pa.list_(pa.float64(), 2)), pa.array([rows], pa.int32())
    word = pa.array(["ab"])
    none = pa.array(np.zeros(rows // 10, np.int8))
    lists = pa.ListViewArray.from_arrays(
        pa.array(np.zeros(500, np.int32)),
        pa.array(np.full(500, 400, np.int32)),
        pa.array(np.arange(400)),
    )
    return [
        (6, {"x": pa.RunEndEncodedArray.from_arrays(end, pair)}),
        (6, {"x": pa.DictionaryArray.from_arrays(none, pair)}),
        (
            2,
            {
                "w": pa.RunEndEncodedArray.from_arrays(end, word),
                "p": pa.RunEndEncodedArray.from_arrays(
                    end, pa.array([[b"a", b"b"]], pa.list_(pa.binary(), 2))
                ),
            },
        ),
        (5, {"x": lists}),
        (9, {"x": pa.RunEndEncodedArray.from_arrays(end, pa.array([1]))}),
    ]


def runs(values: pa.Array) -> pa.Array:
    """A run-end encoded column with one run for each value."""
    ends = pa.array(range(1, len(values) + 1), pa.int32())
    return pa.RunEndEncodedArray.from_arrays(ends, values)


def stream_of(number: int, columns: dict[str, pa.Array], **options: Any) -> bytes:
    """A stream with two batches, written by pyarrow."""
    batch = pa.record_batch(list(columns.values()), names=list(columns))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_batch(batch)
        writer.write_batch(batch.slice(1))
    return bytes((number,)) + join(messages_of(sink.getvalue()))


def stream_with_dictionaries(number: int, values: pa.Array) -> bytes:
    """A stream of two batches with different dictionaries; the second may be invalid UTF-8."""
    values = pa.Array.from_buffers(pa.string(), len(values), values.buffers())
    batches = [
        pa.record_batch(
            [pa.array([1, 2]), pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int8()), each)],
            names=["x", "word"],
        )
        for each in (pa.array(["a", "b"]), values)
    ]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return bytes((number,)) + join(messages_of(sink.getvalue()))


def messages_of(stream: pa.Buffer) -> list[tuple[bytes, bytes]]:
    return [
        (bytes(each.metadata), bytes(each.body) if each.body else b"")
        for each in pa.ipc.MessageReader.open_stream(stream)
    ]


def mutate(raw: bytes, other: bytes, random: Random) -> bytes:
    first = raw[:1]
    if not random.randrange(30):
        first = bytes((random.choice((random.randrange(256), FIRST + random.randrange(10))),))

    def change(each: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
        header, body = each
        kind = random.randrange(8)
        if kind < 4:
            return mutation.patch(header, random, ("<i", "<q", "<q", "<H")), body
        if kind == 4:
            return mutation.flip(header, other, random), body
        if kind == 5:
            return header, mutation.patch(body, random, ("<i", "<i", "<q"))
        return header, mutation.flip(body, other, random)

    return first + join(mutation.shuffle(split(raw[1:]), split(other[1:]), random, change))


def run(raw: bytes) -> None:
    messages = split(raw[1:])
    if not messages:
        return
    contract = contract_of(raw[0])
    schema, *rest = messages
    memory = _Memory()
    try:
        with engine.product(), memory.bounded(PLAN_BYTES + PLAN_FACTOR * len(schema[0])):
            plan = Plan(schema[0], contract, LIMITS)
    except IskanderError as error:
        if isinstance(error, MalformedInput):
            expected = reference(schema, [])
            assert expected.error or is_stricter_rule(error), f"pyarrow accepts the schema\n{error}"
        return
    codec = StreamCodec(plan, LIMITS)
    response = [ipc.encapsulate(plan.response_header)]
    parsed: list[ParsedBatch] = []
    for number, (header, body) in enumerate(rest):
        message = data_head(header, b"said", len(body)) + body
        try:
            read = read_message(codec, message, memory)
        except LimitExceeded:
            return
        except IskanderError as error:
            expected = reference(schema, rest[: number + 1])
            is_expected = expected.error or is_stricter_rule(error) or has_stray_field(header)
            assert is_expected, f"pyarrow accepts it\n{error}"
            break
        if read is not None:
            parsed.append(read)
            response += response_messages(codec, read)
    else:
        expected = reference(schema, without_unused_dictionaries(rest))
        is_unverified = any(
            word in expected.error for word in (*UNVERIFIED, UNALIGNED, CLAIMED)
        ) or any(len(announced_body(*each)) < len(each[1]) for each in rest)
        assert not expected.error or is_unverified, f"pyarrow rejects it\n{expected.error}"
        assert len(parsed) == len(expected.batches) or expected.error
    check_response(response, [each.rows for each in parsed])
    for each, batch in zip(parsed, expected.batches, strict=False):
        if batch.num_rows > COMPARED_ROWS:
            continue
        check_inputs(plan, each, batch)


def contract_of(number: int) -> Contract:
    """The contract of an input, by its first byte."""
    if 0 <= number - FIRST < len(CONVERTING_CONTRACTS):
        return CONVERTING_CONTRACTS[number - FIRST]
    return CONTRACTS[number % len(CONTRACTS)]


def read_message(codec: StreamCodec, raw: bytes, memory: _Memory) -> ParsedBatch | None:
    """Read a message as a stream does: on the event loop, or on a thread with charged memory."""
    with engine.product():
        with memory.bounded(LOOP_BYTES + LOOP_FACTOR * len(raw)):
            parsed = codec.repeated(raw)
            if parsed is not None:
                return parsed
            message = codec.locate(raw)
            if codec.is_quick(message):
                try:
                    return codec.decode(message, is_on_loop=True)
                except LongMessage:
                    pass
            charged = codec.work_bytes(message)
        engine.charge(charged)
        with memory.bounded(THREAD_BYTES + THREAD_FACTOR * len(raw) + charged):
            return codec.decode(message)


class _Memory:
    """Limits the peak of Arrow's memory in parts of an execution."""

    pools: ClassVar[list[pa.MemoryPool]] = []
    """Arrays crash the process if they outlive their pool."""

    @contextmanager
    def bounded(self, size: int) -> Iterator[None]:
        """Fail if Arrow allocates more bytes in this block."""
        default = pa.default_memory_pool()
        if not self.pools or self.pools[-1].max_memory() > POOL_BYTES:
            self.pools.append(pa.proxy_memory_pool(default))
        pool = self.pools[-1]
        pa.set_memory_pool(pool)
        before = pool.bytes_allocated()
        try:
            yield
        finally:
            pa.set_memory_pool(default)
        peak = pool.max_memory() - before
        assert peak <= max(size, POOL_BYTES), "Arrow allocates more than a multiple of the size"


def reference(schema: tuple[bytes, bytes], messages: list[tuple[bytes, bytes]]) -> ReferenceResult:
    """Read a complete stream with pyarrow."""
    pieces = [ipc.encapsulate(schema[0])]
    pieces += [ipc.encapsulate(header, announced_body(header, body)) for header, body in messages]
    batches: list[pa.RecordBatch] = []
    try:
        for header, body in messages:
            pa.ipc.read_message(pa.py_buffer(ipc.encapsulate(header, announced_body(header, body))))
        reader = pa.ipc.open_stream(pa.py_buffer(b"".join((*pieces, ipc.CONTINUATION, bytes(4)))))
        str(reader.schema.names)  # Raises for names that are not UTF-8.
        for batch in reader:
            batch.validate(full=True)
            batches.append(batch)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        return ReferenceResult(batches, str(error) or type(error).__name__)
    return ReferenceResult(batches, "")


def announced_body(header: bytes, body: bytes) -> bytes:
    """The part of a body that its header announces; pyarrow reads the next message after it."""
    try:
        announced = ipc.read_message(header).body_bytes
    except MalformedInput:
        return body
    return body[: max(announced, 0)]


def without_unused_dictionaries(messages: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Messages without unused dictionaries: a broken one is rejected with its first batch."""
    kept: list[tuple[bytes, bytes]] = []
    pending: dict[int, list[tuple[bytes, bytes]]] = {}
    for header, body in messages:
        if is_dictionary(header):
            number, is_delta, _ = ipc.read_dictionary(header, ipc.read_message(header))
            pending[number] = [*(pending.get(number, []) if is_delta else []), (header, body)]
        else:
            kept += [each for parts in pending.values() for each in parts]
            kept.append((header, body))
            pending.clear()
    return kept


def is_dictionary(header: bytes) -> bool:
    try:
        return ipc.read_message(header).kind == ipc.DICTIONARY_BATCH
    except MalformedInput:
        return False


def has_stray_field(header: bytes) -> bool:
    """Whether a field of a message, or of its batch, lies beyond its table.

    No writer makes such a header. pyarrow verifies only that the field is inside the header.
    Source: FlatBuffers, tables and vtables.
    """
    try:
        (table,) = struct.unpack_from("<I", header, 0)
        for _ in range(2):  # The message, and its header.
            (back,) = struct.unpack_from("<i", header, table)
            start = table - back
            size, end = struct.unpack_from("<HH", header, start)
            fields = struct.unpack_from(f"<{(size - 4) // 2}H", header, start + 4)
            if any(field >= end for field in fields):
                return True
            at = table + fields[MESSAGE_HEADER]
            (offset,) = struct.unpack_from("<I", header, at)
            table = at + offset
    except (struct.error, IndexError):
        return True
    return False


def is_stricter_rule(error: IskanderError) -> bool:
    return isinstance(error, ContractError) or any(word in str(error) for word in STRICTER)


def response_messages(codec: StreamCodec, parsed: ParsedBatch) -> list[bytes]:
    """The response messages of one batch."""
    results = memoryview(bytes(body_layout(OUTPUTS, parsed.rows)[1]))
    frames = codec.frames(codec.prepare(parsed, results))
    read = [read_flight_data(b"".join(frame)) for frame in frames]
    return [ipc.encapsulate(data.header, data.body) for data in read]


def check_response(messages: list[bytes], rows: list[int]) -> None:
    """Checks that pyarrow reads valid responses."""
    reader = pa.ipc.open_stream(pa.py_buffer(b"".join((*messages, ipc.CONTINUATION, bytes(4)))))
    actual = []
    try:
        for batch in reader:
            batch.validate(full=True)
            actual.append(batch.num_rows)
    except pa.ArrowException as error:
        if CLAIMED in str(error):
            return
        raise AssertionError(f"pyarrow rejects the response\n{error}") from None
    assert actual == rows


def check_inputs(plan: Plan, parsed: ParsedBatch, batch: pa.RecordBatch) -> None:
    """Checks the tensors against the elements that pyarrow reads."""
    assert parsed.rows == batch.num_rows
    if plan.contract.sources:
        check_converted(plan.contract, parsed, batch)
        return
    specs = plan.contract.inputs
    texts = 0
    for index, spec in enumerate(specs):
        column = batch.column(spec.column)
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        expected_elements = [value for row in column.to_pylist() for value in flat(row)]
        data = buffer_of(parsed, index)
        if spec.is_string:
            joined = buffer_of(parsed, len(specs) + texts)
            texts += 1
            actual: list[Any] = strings(data, joined, len(expected_elements))
        elif spec.type.dtype_name == "bool":
            bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
            actual = bits[: len(expected_elements)].astype(bool).tolist()
        else:
            actual = np.frombuffer(data, spec.type.dtype.numpy)[: len(expected_elements)].tolist()
        expected_elements = [
            each.encode() if isinstance(each, str) else each for each in expected_elements
        ]
        assert repr(actual) == repr(expected_elements), (
            f"different elements\n{actual}, expected {expected_elements}"
        )


def check_converted(contract: Contract, parsed: ParsedBatch, batch: pa.RecordBatch) -> None:
    """Checks the converted tensors against values that are converted in Python."""
    each_row: dict[str, list[Any]] = {}
    for entry in entries_of(contract):
        spec = next(spec for spec in contract.inputs if spec.tensor == entry.tensor)
        each_row[entry.tensor] = rows_of(entry, spec, batch)
    assert sum(portion.rows for portion in parsed.portions) == batch.num_rows
    for portion in parsed.portions if batch.num_rows else ():
        check_portion(contract, portion, each_row)


def check_portion(
    contract: Contract, portion: BatchPortion, each_row: dict[str, list[Any]]
) -> None:
    """Checks the tensors of a portion; `each_row` has the elements of all rows of each entry."""
    specs = contracts_of_buckets(contract)[portion.bucket].inputs
    places = portion.places.tolist() if len(portion.places) else range(portion.rows)
    texts = iter(portion.tensors[len(specs) :])
    actual: dict[str, list[Any]] = {}
    for spec, data in zip(specs, portion.tensors, strict=False):
        count = portion.rows * spec.elements
        if spec.is_string:
            actual[spec.tensor] = strings(data, next(texts), count)
        elif spec.type.dtype_name == "bool":
            bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
            actual[spec.tensor] = bits[:count].astype(bool).tolist()
        else:
            found = np.frombuffer(data, spec.type.dtype.numpy)
            assert len(found) == count
            actual[spec.tensor] = found.tolist()
    for entry in entries_of(contract):
        spec = next(spec for spec in specs if spec.tensor == entry.tensor)
        length = spec.shape[0] if entry.max_length else 0
        expected: dict[str, list[Any]] = {name: [] for name in actual}
        for place in places:
            values, mask = each_row[entry.tensor][place]
            if entry.lengths:
                expected[entry.lengths].append(len(values))
            if length:
                padding = 0 if entry.padding is None else entry.padding
                padding = str(entry.padding or "").encode() if spec.is_string else padding
                mask = mask + [False] * (length - len(values))
                values = values + [padding] * (length - len(values))
            expected[entry.tensor] += values
            if entry.mask:
                expected[entry.mask] += mask
        for name in filter(None, (entry.tensor, entry.mask, entry.lengths)):
            is_same = len(actual[name]) == len(expected[name]) and all(
                map(is_equal, actual[name], expected[name])
            )
            assert is_same, f"different elements of {name}\n{actual[name]}, {expected[name]}"


def is_equal(actual: Any, expected: Any) -> bool:
    if isinstance(actual, float):
        expected = float(expected)
        return (
            actual == expected
            or (math.isnan(actual) and math.isnan(expected))
            or (math.isclose(actual, expected, rel_tol=1e-15))
        )
    return bool(actual == expected)


def rows_of(entry: InputColumn, spec: TensorSpec, batch: pa.RecordBatch) -> list[Any]:
    """The elements of each row of an entry, flat, and which of them are present."""
    columns = [
        [elements_of(value, entry, spec) for value in values_of(batch, name)]
        for name in columns_of(entry)
    ]
    return [
        ([each for values, _ in row for each in values], [each for _, mask in row for each in mask])
        for row in zip(*columns, strict=True)
    ]


def values_of(batch: pa.RecordBatch, name: str) -> list[Any]:
    """A column's values, by its dotted name; times in milliseconds."""
    if name in batch.schema.names:
        array = batch.column(name)
    else:
        head, _, field = name.partition(".")
        struct = batch.column(head)
        values = values_of(pa.record_batch([struct.field(field)], ["x"]), "x")
        present = struct.is_valid().to_pylist()
        return [
            value if is_there else None for value, is_there in zip(values, present, strict=True)
        ]
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_timestamp(array.type) or pa.types.is_duration(array.type):
        unit = UNIT_MS[array.type.unit]
        array = array.view(pa.int64())
        return [None if value is None else value * unit for value in array.to_pylist()]
    found: list[Any] = array.to_pylist()
    return found


def elements_of(value: Any, entry: InputColumn, spec: TensorSpec) -> tuple[list[Any], list[bool]]:
    """One value as elements of a tensor."""
    if entry.max_length:
        value = [] if value is None else value
        head = entry.truncate != "tail"
        value = value[: entry.max_length] if head else value[-entry.max_length :]
    elif value is None:
        value = [None] * spec.elements if spec.shape and not entry.columns else None
    flat_values = flat(value)
    return [element_of(each, entry, spec) for each in flat_values], [
        each is not None for each in flat_values
    ]


def element_of(value: Any, entry: InputColumn, spec: TensorSpec) -> Any:
    """One element of a tensor; NumPy rounds a float."""
    if spec.is_string:
        value = str(entry.fill or "") if value is None else value
        return value if isinstance(value, bytes) else str(value).encode()
    if value is None:
        value = float("nan") if entry.nulls == "nan" else (entry.fill or 0)
    if isinstance(value, Decimal) and entry.conversion == "unscaled":
        value = int(value.scaleb(-int(value.as_tuple().exponent)))
    if isinstance(value, Fraction | Decimal) and spec.type.dtype_name.startswith("int"):
        assert value == int(value), "an integer was rounded"
        value = int(value)
    if spec.type.dtype_name.startswith("float"):
        return float(np.dtype(spec.type.dtype.numpy).type(float(value)))
    assert value == int(value), "an integer was rounded"
    return int(value)


def buffer_of(parsed: ParsedBatch, index: int) -> memoryview:
    if parsed.portions:
        return parsed.portions[0].tensors[index]
    start, stop = parsed.tensors[index]
    body = parsed.body
    assert isinstance(body, memoryview)
    return body[start:stop]


def strings(offsets: memoryview, joined: memoryview, count: int) -> list[bytes]:
    """The values of strings; their bytes may begin at the first offset, or at zero."""
    if not count:
        return []
    ends = np.frombuffer(offsets, np.int32)[: count + 1].tolist()
    first = ends[0] if len(joined) < ends[-1] else 0
    return [bytes(joined[begin - first : end - first]) for begin, end in pairwise(ends)]


def flat(value: Any) -> list[Any]:
    return [each for inner in value for each in flat(inner)] if isinstance(value, list) else [value]


def join(messages: list[tuple[bytes, bytes]]) -> bytes:
    return b"".join(
        len(header).to_bytes(2) + len(body).to_bytes(4) + header + body for header, body in messages
    )


def split(raw: bytes) -> list[tuple[bytes, bytes]]:
    messages, at = [], 0
    while at + 6 <= len(raw):
        begin = at + 6
        middle = begin + int.from_bytes(raw[at : at + 2])
        end = middle + int.from_bytes(raw[at + 2 : at + 6])
        header = raw[begin:middle]
        # Padded here, because pyarrow's framing pads it only for the reference.
        messages.append((header + bytes(-(len(header) + 8) % ALIGNMENT), raw[middle:end]))
        at = end
    return messages
