"""Streams of record batches, with pyarrow and its full validation as the reference.

Layout of an input: number of a contract (1 byte), then messages: length of the header (2 bytes) and
of the body (4), header, body. The first one is the schema.

Most batches are parsed without pyarrow and its flatbuffer verifier. If only the verifier rejects a
header, the parsed numbers must still fit the body, and the response must be valid.
"""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from fuzz import mutation
from iskander.arrow import ipc
from iskander.config.schema import LimitsConfig
from iskander.contract.column_types import parse_column_type
from iskander.contract.tensors import ALIGNMENT, Contract, TensorSpec, body_layout
from iskander.errors import ContractError, IskanderError, LimitExceeded, MalformedInput
from iskander.protocols.flight.codec import ParsedBatch, StreamCodec
from iskander.protocols.flight.data import data_head, read_flight_data
from iskander.protocols.flight.plan import Plan

ITERATIONS = 1000
LIMITS = LimitsConfig(rows=10_000, bytes=1 << 20, columns=16, nesting=4, string_bytes=1 << 18)
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


def _spec(name: str, text: str) -> TensorSpec:
    column = parse_column_type(text)
    return TensorSpec(name, name, column, column.shape)


OUTPUTS = (_spec("score", "float32"),)
CONTRACTS = (
    Contract((_spec("x", "int64"),), OUTPUTS, "all"),
    Contract((_spec("x", "int64"), _spec("word", "utf8")), OUTPUTS, "all"),
    Contract((_spec("pair", "fixed_size_list<float32>[2]"),), OUTPUTS, "none"),
    Contract((_spec("flag", "bool"),), OUTPUTS, ("kept",)),
)


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
    return streams


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
    first = bytes((random.randrange(256),)) if not random.randrange(30) else raw[:1]

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
    contract = CONTRACTS[raw[0] % len(CONTRACTS)]
    schema, *rest = messages
    try:
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
            codec.is_quick(message)
            codec.work_bytes(message)
            read = codec.read(message)
        except LimitExceeded:
            return
        except IskanderError as error:
            expected = reference(schema, rest[: number + 1])
            assert expected.error or is_stricter_rule(error), f"pyarrow accepts it\n{error}"
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
        check_inputs(plan, each, batch)


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
