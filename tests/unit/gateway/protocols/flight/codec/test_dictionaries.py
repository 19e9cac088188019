"""Dictionaries of a Flight stream: decoding, replacement, deltas and their limits."""

from __future__ import annotations

import itertools
import weakref

import numpy as np
import pyarrow as pa
import pytest
from support.codecs import decode, work_bytes
from support.flight_streams import (
    CODECS,
    LIMITS,
    OTHER,
    Stream,
    batch_of,
    contract_of,
    decode_error,
    fixed_list,
    messages,
    numbers,
    patched,
    spec,
    tensor_of,
    x_of,
)

from iskander.arrow import ipc
from iskander.contract.column_types import ColumnType
from iskander.errors import LimitExceeded, MalformedInput
from iskander.gateway.protocols.flight.codec import LongMessage, StreamCodec
from iskander.gateway.protocols.flight.columns import dictionaries as flight_dictionaries
from iskander.gateway.protocols.flight.columns.dictionaries import REPEATED_BYTES, REPEATED_PER_BYTE
from iskander.gateway.protocols.flight.data import data_head, read_flight_data


@pytest.mark.parametrize("compression", CODECS)
def test_dictionary_encoded_input_is_decoded(compression: str | None) -> None:
    """Three batches, one of them sliced, with a dictionary that changes."""
    first = pa.DictionaryArray.from_arrays(pa.array([1, 0, 1], pa.int8()), pa.array([7, 8]))
    second = pa.DictionaryArray.from_arrays(pa.array([2, 0], pa.int8()), pa.array([1, 2, 3]))
    batches = [batch_of(x=first), batch_of(x=first).slice(1, 1), batch_of(x=second)]
    schema, *rest = messages(*batches, compression=compression)
    stream = Stream(contract_of(), schema[0])

    tensors = [tensor_of(a, 0, ColumnType("int64")).tolist() for a in stream.decode(rest)]

    assert tensors == [[8, 7, 8], [7], [3, 1]]


def test_dictionary_deltas_are_appended() -> None:
    first = pa.DictionaryArray.from_arrays(pa.array([1, 0], pa.int8()), pa.array([7, 8]))
    grown = pa.DictionaryArray.from_arrays(pa.array([2, 0], pa.int8()), pa.array([7, 8, 9]))
    schema, *rest = messages(batch_of(x=first), batch_of(x=grown), emit_dictionary_deltas=True)
    stream = Stream(contract_of(), schema[0])

    tensors = [tensor_of(a, 0, ColumnType("int64")).tolist() for a in stream.decode(rest)]

    assert tensors == [[8, 7], [9, 7]]


def test_dictionary_encoded_list_is_decoded() -> None:
    values = fixed_list(numbers(6, pa.float32()), 3)
    column = pa.DictionaryArray.from_arrays(pa.array([1, 1, 0], pa.int8()), values)
    schema, *rest = messages(batch_of(x=column))
    stream = Stream(contract_of(spec("x", "fixed_size_list<float32>[3]")), schema[0])

    (parsed,) = stream.decode(rest)

    actual = tensor_of(parsed, 0, ColumnType("float32", (3,)))
    assert actual.tolist() == [3, 4, 5, 3, 4, 5, 0, 1, 2]


def test_dictionaries_are_sent_only_after_a_change() -> None:
    """The second of three batches has the dictionary of the first."""
    first, second = (
        pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int8()), pa.array(values))
        for values in (["a", "b"], ["c", "d"])
    )
    batches = [batch_of(x=x_of(2), d=column) for column in (first, first, second)]
    schema, *rest = messages(*batches)
    stream = Stream(contract_of(), schema[0])

    frames = stream.respond(rest)

    kinds = [ipc.read_message(read_flight_data(frame).header).kind for frame in frames]
    batch, dictionary = ipc.RECORD_BATCH, ipc.DICTIONARY_BATCH
    assert kinds == [dictionary, batch, batch, dictionary, batch]
    responses = stream.read(frames)
    assert [response.column("d").to_pylist() for response in responses] == [
        ["a", "b"],
        ["a", "b"],
        ["c", "d"],
    ]


LARGE_TEXTS = [f"{index:032d}" for index in range(200_000)]
"""More bytes than are decoded on the event loop."""


def large_dictionary(kind: pa.DataType | None = None) -> pa.DictionaryArray:
    values = pa.array(LARGE_TEXTS, kind)
    return pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int32()), values)


@pytest.mark.parametrize("kind", [pa.utf8(), pa.large_utf8(), pa.string_view()])
@pytest.mark.parametrize("is_input", [True, False])
def test_dictionary_is_decoded_and_sent_once(
    is_input: bool, kind: pa.DataType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that uses the dictionary has only 200 bytes."""
    validations = []
    original = flight_dictionaries._Validated
    monkeypatch.setattr(
        flight_dictionaries,
        "_Validated",
        lambda array, limits: validations.append(1) or original(array, limits),
    )
    column = large_dictionary(kind=kind)
    contract = contract_of(spec("d", "utf8")) if is_input else contract_of()
    columns = {"d": column} if is_input else {"x": x_of(2), "d": column}
    schema, dictionary, batch = messages(batch_of(**columns))
    stream = Stream(contract, schema[0])
    assert not stream.decode([dictionary])
    assert validations == [1]

    before = pa.total_allocated_bytes()
    parsed = stream.decode([batch] * 20)
    assert validations == [1] and pa.total_allocated_bytes() - before < 1 << 20

    if not is_input:
        frames = stream.respond([batch] * 20)
        assert sum(map(len, frames[2:])) < 20_000
        assert stream.read(frames)[19].column("d").to_pylist() == LARGE_TEXTS[:2]
    assert len(parsed) == 20


def test_invalid_batch_does_not_affect_the_next_one() -> None:
    """The dictionaries are kept, and the reader is at the beginning of a message."""
    column = pa.array(["a", "b", "a"]).dictionary_encode()
    schema, dictionary, batch = messages(batch_of(x=x_of(3), d=column))
    out_of_range = messages(batch_of(x=x_of(3), d=pa.array(["a", "b", "c"]).dictionary_encode()))[2]
    stream = Stream(contract_of(), schema[0])
    stream.decode([dictionary])
    frames: list[bytes] = []
    cut = (batch[0], batch[1][:-8])
    for invalid in (out_of_range, cut, out_of_range):
        decode_error(stream, [invalid], MalformedInput)
        frames += stream.respond([batch])

    responses = stream.read(frames)
    assert [response.column("d").to_pylist() for response in responses] == [["a", "b", "a"]] * 3


def test_long_decoding_is_not_done_on_the_loop() -> None:
    """A small message that expands; an error changes nothing."""
    zeros = pa.array(np.zeros(1 << 20, np.int64))
    schema, bomb = messages(batch_of(x=zeros), compression="zstd")
    stream = Stream(contract_of(), schema[0])
    assert len(bomb[1]) < 1 << 16
    with pytest.raises(LongMessage):
        decode(stream.codec, *bomb, is_on_loop=True)
    assert len(stream.decode([bomb])) == 1


@pytest.mark.parametrize("kind", ["struct", "list", "map", "dictionary of structs"])
def test_dictionary_inside_a_type_is_validated_once(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of 200 bytes validated all of its values; they cost as much as their own bytes."""
    validated = []
    original = flight_dictionaries.require_valid
    monkeypatch.setattr(
        flight_dictionaries,
        "require_valid",
        lambda array, limits: validated.append(len(array)) or original(array, limits),
    )
    words = large_dictionary()
    inner = pa.StructArray.from_arrays([words], ["d"])
    columns = {
        "struct": inner,
        "list": pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), words),
        "map": pa.MapArray.from_arrays(pa.array([0, 1, 2], pa.int32()), words, words),
        "dictionary of structs": pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int8()), inner),
    }
    column = columns[kind]
    schema, *dictionaries, batch = messages(batch_of(x=x_of(2), d=column))
    stream = Stream(contract_of(), schema[0], string_bytes=1 << 30)
    assert not stream.decode(dictionaries)
    counts = len(validated)
    assert counts
    for _ in range(20):
        header, body = map(memoryview, batch)
        parsed = decode(stream.codec, header, body, b"", is_on_loop=True)
        assert parsed is not None
    assert len(validated) == counts
    (response,) = stream.read(stream.respond([batch]))
    assert response.column("d").to_pylist() == column.to_pylist()


@pytest.mark.parametrize("kind", ["struct", "list", "map", "union", "view of lists", "large list"])
def test_index_outside_a_dictionary_inside_a_type_is_rejected(kind: str) -> None:
    """Also after batches with valid indices, and before others."""

    def column_of(index: int, *values: str) -> pa.Array:
        words = pa.DictionaryArray.from_arrays(
            pa.array([0, index], pa.int8()), pa.array(values), safe=False
        )
        offsets = pa.array([0, 1, 2], pa.int32())
        if kind == "struct":
            return pa.StructArray.from_arrays([words], ["d"])
        if kind == "map":
            return pa.MapArray.from_arrays(offsets, pa.array(["a", "b"]), words)
        if kind == "union":
            return pa.UnionArray.from_sparse(pa.array([0, 0], pa.int8()), [words])
        if kind == "view of lists":
            return pa.ListViewArray.from_arrays(
                pa.array([0, 1], pa.int32()), pa.array([1, 1], pa.int32()), words
            )
        if kind == "large list":
            return pa.LargeListArray.from_arrays(offsets.cast(pa.int64()), words)
        return pa.ListArray.from_arrays(offsets, words)

    schema, dictionary, valid = messages(batch_of(x=x_of(2), d=column_of(1, "a", "b")))
    _, _, invalid = messages(batch_of(x=x_of(2), d=column_of(2, "a", "b", "c")))
    stream = Stream(contract_of(), schema[0])

    assert len(stream.decode([dictionary, valid, valid])) == 2
    decode_error(stream, [invalid], MalformedInput)
    assert len(stream.decode([valid])) == 1


def delta_messages(bytes_first: int, count: int) -> list[tuple[bytes, bytes]]:
    """A schema, a large dictionary, a batch, and deltas of one value."""
    first = pa.DictionaryArray.from_arrays(pa.array([0], pa.int32()), x_of(bytes_first // 8))
    small = pa.DictionaryArray.from_arrays(pa.array([0], pa.int32()), x_of(1))
    grown = pa.DictionaryArray.from_arrays(pa.array([0], pa.int32()), x_of(2))
    schema, dictionary, batch = messages(batch_of(x=first))
    *_, delta, _ = messages(batch_of(x=small), batch_of(x=grown), emit_dictionary_deltas=True)
    return [schema, dictionary, batch, *[delta, batch] * count]


def test_deltas_of_a_large_dictionary_are_limited_by_received_bytes() -> None:
    """Each copies and validates the whole dictionary: 170 bytes would cost 56 MiB."""
    decoded = 0
    size = 1 << 22
    schema, *rest = delta_messages(size, 250)
    stream = Stream(contract_of(), schema[0])

    with pytest.raises(LimitExceeded, match="send larger deltas, or whole dictionaries"):
        for message in rest:
            decoded += not stream.decode([message])

    received = sum(map(len, itertools.chain(*rest)))
    assert 4 <= decoded <= (REPEATED_BYTES + REPEATED_PER_BYTE * received) // size + 2


def test_small_dictionary_may_have_many_deltas() -> None:
    schema, *rest = delta_messages(800, 250)

    assert len(Stream(contract_of(), schema[0]).decode(rest)) == 251


def test_delta_of_a_large_dictionary_is_not_decoded_on_the_loop() -> None:
    schema, dictionary, batch, delta, *_ = delta_messages(1 << 20, 1)
    stream = Stream(contract_of(), schema[0])
    stream.decode([dictionary, batch])

    with pytest.raises(LongMessage):
        decode(stream.codec, *delta, is_on_loop=True)
    assert work_bytes(stream.codec, data_head(delta[0], b"", len(delta[1])) + delta[1]) > 1 << 21


def test_dictionaries_decoded_again_after_errors_are_limited() -> None:
    """An invalid batch leaves the reader at an undefined position."""
    schema, dictionary, (header, body), *_ = delta_messages(1 << 22, 1)
    stream = Stream(contract_of(), schema[0])
    stream.decode([dictionary, (header, body)])
    read = ipc.read_batch(header, ipc.read_message(header))
    forged = patched(header, (read.buffers[2], read.buffers[3]), (0, 1 << 20))

    with pytest.raises(LimitExceeded, match=r"decode .* of dictionaries again"):
        for _ in range(100):
            decode_error(stream, [(forged, body)], MalformedInput)
            stream.decode([(header, body)])


def test_memory_of_decoded_dictionaries_is_counted() -> None:
    """In addition to the messages: decompressed dictionaries and joined deltas."""
    schema, dictionary, _ = messages(batch_of(x=x_of(2), d=large_dictionary()))
    stream = Stream(contract_of(), schema[0])
    stream.decode([dictionary])
    assert stream.codec.dictionary_bytes == 0

    columns = {"x": x_of(2), "d": large_dictionary()}
    schema, dictionary, _ = messages(batch_of(**columns), compression="zstd")
    stream = Stream(contract_of(), schema[0])
    stream.decode([dictionary])
    assert stream.codec.dictionary_bytes > 32 * len(LARGE_TEXTS)


def test_streams_of_one_plan_do_not_share_dictionaries() -> None:
    """Plans are cached by schema, so several streams use one plan."""
    column = pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int8()), pa.array(["a", "b"]))
    (header, _), *rest = messages(batch_of(x=x_of(2), d=column))
    first = Stream(contract_of(), header)
    second = Stream(contract_of(), header)
    second.codec = StreamCodec(first.plan, LIMITS)

    first.respond(rest)
    (response,) = second.read(second.respond(rest))

    assert response.column("d").to_pylist() == ["a", "b"]


def test_batch_without_its_dictionary_is_rejected() -> None:
    schema, _, batch = messages(batch_of(x=x_of(), d=OTHER["dictionary"]))
    stream = Stream(contract_of(), schema[0])

    decode_error(stream, [batch], MalformedInput)


def test_index_outside_its_dictionary_is_rejected() -> None:
    """The dictionary is from another batch and has one value less."""
    short = pa.DictionaryArray.from_arrays(pa.array([0], pa.int8()), pa.array(["a"]))
    long = pa.DictionaryArray.from_arrays(pa.array([1], pa.int8()), pa.array(["a", "b"]))
    schema, dictionary, _ = messages(batch_of(x=x_of(1), d=short))
    _, _, batch = messages(batch_of(x=x_of(1), d=long))
    stream = Stream(contract_of(), schema[0])

    decode_error(stream, [dictionary, batch], MalformedInput)


def test_total_dictionary_bytes_of_a_stream_are_limited() -> None:
    """Deltas add up; a replaced dictionary is not counted."""
    grown = [list(range(100 * n)) for n in range(1, 30)]
    batches = [
        batch_of(x=pa.DictionaryArray.from_arrays(pa.array([0], pa.int8()), pa.array(values)))
        for values in grown
    ]
    schema, *deltas = messages(*batches, emit_dictionary_deltas=True)
    replaced = [message for batch in batches[:4] * 20 for message in messages(batch)[1:]]

    Stream(contract_of(), schema[0], bytes=8000).decode(replaced)
    stream = Stream(contract_of(), schema[0], bytes=8000)

    message = decode_error(stream, deltas, LimitExceeded).message
    assert "dictionaries of the stream too large" in message and "bytes, limit 8000" in message


def test_dictionaries_of_unknown_ids_are_rejected() -> None:
    """A schema has as many dictionaries as columns and nested values of this type."""
    column = pa.array(["a", "b", "a"]).dictionary_encode()
    _, first, second, _ = messages(batch_of(x=x_of(3), d=column, e=column))
    for columns, accepted in (({}, []), ({"d": column}, [first, first])):
        stream = Stream(contract_of(), messages(batch_of(x=x_of(3), **columns))[0][0])
        assert not stream.decode(accepted)
        error = decode_error(stream, [second], MalformedInput)
        assert f"has {len(columns)} dictionaries" in error.message


def test_dictionaries_in_a_struct_are_replaced() -> None:
    """Each of the two is a dictionary of the schema."""

    def batch_with(*values: str) -> pa.RecordBatch:
        column = pa.array(values).dictionary_encode()
        return batch_of(x=x_of(2), d=pa.StructArray.from_arrays([column, column], ["a", "b"]))

    schema, *rest = messages(batch_with("a", "b"), batch_with("c", "d"))
    assert len(rest) == 6
    stream = Stream(contract_of(), schema[0])

    kept = [parsed.passthrough[0].field(1).to_pylist() for parsed in stream.decode(rest)]

    assert kept == [["a", "b"], ["c", "d"]]


def test_replaced_dictionary_is_released_before_the_first_batch() -> None:
    """The other dictionary of the schema has not arrived, so nothing is decoded yet."""
    column = pa.array(["a", "b", "a"]).dictionary_encode()
    schema, first, *_ = messages(batch_of(x=x_of(3), d=column, e=column))
    stream = Stream(contract_of(), schema[0])
    body = np.frombuffer(first[1], np.uint8).copy()
    reference = weakref.ref(body)
    decode(stream.codec, memoryview(first[0]), memoryview(body), b"")
    del body
    assert reference() is not None
    stream.decode([first])
    assert reference() is None
