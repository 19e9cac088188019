"""Streams of record batches: pyarrow reads the same messages, and validates them fully.

Layout of an input: number of a contract (1 byte), then messages: length of the header (2 bytes) and
of the body (4), header, body. The first one is the schema.

The usual batch is read without pyarrow, so a header need not be a flatbuffer that its verifier
passes: then the numbers in it are held against the body all the same, and the answer is checked.
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
    "the header declares a body",  # Longer than what came.
    "no record batch",
    "wanted a record batch",
    "big-endian",
    "a compressed buffer is not inside the body",
    "its schema requires",  # More arrays or buffers than it needs.
    "a buffer has 0 bytes",  # Of which pyarrow does not mind where it begins.
    "requires 0;",  # Which it does not read.
    "a negative",
    "rows make",  # Children of a list with more values than its rows.
)
"""Of errors of streams that pyarrow reads."""
UNVERIFIED = (
    "Invalid flatbuffers message", "Expected to read", "Tried reading schema",
    "Unexpected null field",
)  # fmt: skip
"""Of pyarrow's errors: what it finds wrong with a header that is not read as a whole here."""
UNALIGNED = "-byte aligned offset"
"""The same, of buffers at odd places, which are copied here before anything is made of them."""
CLAIMED = "null_count value"
"""The same, of columns that are passed through: their nulls are counted by their client alone."""


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


class Judged(NamedTuple):
    """What pyarrow reads: batches, and why no more."""

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
    made = [written(0, {"x": x}), written(0, {"x": x, **kept}), written(1, {"x": x, "word": words})]
    made += [written(0, {"x": x, name: column}) for name, column in other.items()]
    for values in (pa.array(["ccc", "a"]), pa.array([b"\xff\xfe", b"a"])):
        made += [replaced(number, values) for number in (0, 1)]
    made += [written(2, {"pair": pair}), written(3, {"flag": x.cast(pa.bool_()), "kept": x})]
    made += [written(0, {"x": x, **kept}, compression=each) for each in ("lz4", "zstd")]
    made += [written(0, {"x": x, **other}), written(1, {"x": x, "word": words.dictionary_encode()})]
    return made


def written(number: int, columns: dict[str, pa.Array], **options: Any) -> bytes:
    """Two batches in a stream of pyarrow's."""
    batch = pa.record_batch(list(columns.values()), names=list(columns))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_batch(batch)
        writer.write_batch(batch.slice(1))
    return bytes((number,)) + join(messages_of(sink.getvalue()))


def replaced(number: int, values: pa.Array) -> bytes:
    """Two batches, the second one with another dictionary, which may be no UTF-8."""
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
            judged = reference(schema, [])
            assert judged.error or is_stricter(error), f"pyarrow reads the schema\n{error}"
        return
    codec = StreamCodec(plan, LIMITS)
    answers = [ipc.encapsulate(plan.response_header)]
    arrived: list[ParsedBatch] = []
    if "dictionary<" not in str(plan.schema):
        # Kept, and never read, where pyarrow looks into them.
        rest = [each for each in rest if not is_dictionary(each[0])]
    for number, (header, body) in enumerate(rest):
        message = data_head(header, b"said", len(body)) + body
        try:
            codec.is_quick(message)
            codec.work_bytes(message)
            one = codec.read(message)
        except LimitExceeded:
            return
        except IskanderError as error:
            judged = reference(schema, rest[: number + 1])
            assert judged.error or is_stricter(error), f"pyarrow reads it\n{error}"
            break
        if one is not None:
            arrived.append(one)
            answers += answer(codec, one)
    else:
        judged = reference(schema, used(rest))
        is_unverified = any(
            word in judged.error for word in (*UNVERIFIED, UNALIGNED, CLAIMED)
        ) or any(len(cut(*each)) < len(each[1]) for each in rest)
        assert not judged.error or is_unverified, f"pyarrow refuses it\n{judged.error}"
        assert len(arrived) == len(judged.batches) or judged.error
    check_answers(answers, [one.rows for one in arrived])
    for one, batch in zip(arrived, judged.batches, strict=False):
        check_inputs(plan, one, batch)


def reference(schema: tuple[bytes, bytes], messages: list[tuple[bytes, bytes]]) -> Judged:
    """Read a stream as a whole."""
    pieces = [ipc.encapsulate(schema[0])]
    pieces += [ipc.encapsulate(header, cut(header, body)) for header, body in messages]
    batches: list[pa.RecordBatch] = []
    try:
        for header, body in messages:
            pa.ipc.read_message(pa.py_buffer(ipc.encapsulate(header, cut(header, body))))
        reader = pa.ipc.open_stream(pa.py_buffer(b"".join((*pieces, ipc.CONTINUATION, bytes(4)))))
        str(reader.schema.names)  # Which need not be UTF-8.
        for batch in reader:
            batch.validate(full=True)
            batches.append(batch)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        return Judged(batches, str(error) or type(error).__name__)
    return Judged(batches, "")


def cut(header: bytes, body: bytes) -> bytes:
    """The part of a body that a header announces; pyarrow reads the next message behind it."""
    try:
        announced = ipc.read_message(header).body_bytes
    except MalformedInput:
        return body
    return body[: max(announced, 0)]


def used(messages: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Without dictionaries that no batch uses: a broken one is refused with its first batch."""
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


def is_stricter(error: IskanderError) -> bool:
    return isinstance(error, ContractError) or any(word in str(error) for word in STRICTER)


def answer(codec: StreamCodec, arrived: ParsedBatch) -> list[bytes]:
    """The messages of a response."""
    results = memoryview(bytes(body_layout(OUTPUTS, arrived.rows)[1]))
    frames = codec.frames(codec.prepare(arrived, results))
    read = [read_flight_data(b"".join(frame)) for frame in frames]
    return [ipc.encapsulate(data.header, data.body) for data in read]


def check_answers(messages: list[bytes], rows: list[int]) -> None:
    """A client reads the responses, and they are valid."""
    reader = pa.ipc.open_stream(pa.py_buffer(b"".join((*messages, ipc.CONTINUATION, bytes(4)))))
    got = []
    try:
        for batch in reader:
            batch.validate(full=True)
            got.append(batch.num_rows)
    except pa.ArrowException as error:
        if CLAIMED in str(error):
            return
        raise AssertionError(f"an answer cannot be read\n{error}") from None
    assert got == rows


def check_inputs(plan: Plan, arrived: ParsedBatch, batch: pa.RecordBatch) -> None:
    """The tensors are the elements that pyarrow reads."""
    assert arrived.rows == batch.num_rows
    specs = plan.contract.inputs
    texts = 0
    for place, spec in enumerate(specs):
        column = batch.column(spec.column)
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        wanted = [value for row in column.to_pylist() for value in flat(row)]
        data = buffer_of(arrived, place)
        if spec.is_string:
            joined = buffer_of(arrived, len(specs) + texts)
            texts += 1
            got: list[Any] = strings(data, joined, len(wanted))
        elif spec.type.dtype_name == "bool":
            bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
            got = bits[: len(wanted)].astype(bool).tolist()
        else:
            got = np.frombuffer(data, spec.type.dtype.numpy)[: len(wanted)].tolist()
        wanted = [each.encode() if isinstance(each, str) else each for each in wanted]
        assert repr(got) == repr(wanted), f"other elements\n{got} where {wanted} was read"


def buffer_of(arrived: ParsedBatch, index: int) -> memoryview:
    if arrived.portions:
        return arrived.portions[0].tensors[index]
    start, stop = arrived.tensors[index]
    body = arrived.body
    assert isinstance(body, memoryview)
    return body[start:stop]


def strings(offsets: memoryview, joined: memoryview, count: int) -> list[bytes]:
    """The values of strings, whose bytes begin where the first offset says, or there."""
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
        # Padded here, since pyarrow's framing would pad it for the reference alone.
        messages.append((header + bytes(-(len(header) + 8) % ALIGNMENT), raw[middle:end]))
        at = end
    return messages
