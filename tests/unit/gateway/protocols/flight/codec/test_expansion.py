"""Batches that become larger when the Flight codec decodes them: their memory is known before."""

from __future__ import annotations

import tracemalloc

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from support.arrow_memory import peak_of
from support.codecs import decode, work_bytes
from support.flight_streams import (
    Stream,
    batch_of,
    contract_of,
    decode_error,
    fixed_list,
    messages,
    spec,
    x_of,
)

from iskander.contract.manifest import InputColumn
from iskander.errors import LimitExceeded
from iskander.gateway.protocols.flight.codec import LongMessage
from iskander.gateway.protocols.flight.data import data_head


def runs_of(rows: int, values: pa.Array) -> pa.Array:
    """One run of `rows` equal values."""
    return pa.RunEndEncodedArray.from_arrays(pa.array([rows], pa.int32()), values)


def repeated(rows: int, values: pa.Array) -> pa.Array:
    """Rows with the only entry of a dictionary."""
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int8)), values)


def view_of(rows: int, text: bytes, kind: pa.DataType | None = None) -> pa.Array:
    """Views of the same bytes."""
    views = np.zeros((rows, 4), np.int32)
    views[:, 0] = len(text)
    views[:, 1] = int.from_bytes(text[:4], "little")
    buffers = [None, pa.py_buffer(views.tobytes()), pa.py_buffer(text)]
    return pa.Array.from_buffers(kind or pa.string_view(), rows, buffers)


ROW = fixed_list(pa.array(np.zeros(64, np.float32)), 64)

WORD = pa.array(["w" * 1000])

EXPANDING = {
    "runs": ("fixed_size_list<float32>[64]", lambda rows: runs_of(rows, ROW)),
    "dictionary": ("fixed_size_list<float32>[64]", lambda rows: repeated(rows, ROW)),
    "runs of numbers": ("int64", lambda rows: runs_of(64 * rows, x_of(1))),
    "runs of text": ("utf8", lambda rows: runs_of(rows, WORD)),
    "dictionary of text": ("utf8", lambda rows: repeated(rows, WORD)),
    "views": ("utf8", lambda rows: view_of(rows, b"w" * 1000)),
}


@pytest.mark.parametrize("name", EXPANDING)
def test_small_batch_that_becomes_large_is_decoded_on_a_thread(name: str) -> None:
    """Its decoded size counts, and not that of its message; a small one is decoded at once."""
    type_text, column_of = EXPANDING[name]
    contract = contract_of(spec("x", type_text))
    for rows, is_long in ((100, False), (5000, True)):
        schema, *dictionaries, (header, body) = messages(batch_of(x=column_of(rows)))
        stream = Stream(contract, schema[0])
        assert not stream.decode(dictionaries)
        parts = memoryview(header), memoryview(body), b""
        if is_long:
            with pytest.raises(LongMessage):
                decode(stream.codec, *parts, is_on_loop=True)
            assert stream.decode([(header, body)])
        else:
            assert decode(stream.codec, *parts, is_on_loop=True) is not None


@pytest.mark.parametrize("name", EXPANDING)
def test_temporary_memory_of_a_batch_is_known_before_it_is_decoded(name: str) -> None:
    """Of Arrow and of NumPy: at most the charged bytes, and not many times less than them."""
    type_text, column_of = EXPANDING[name]
    schema, *rest = messages(batch_of(x=column_of(15_000)))
    *dictionaries, (header, body) = rest
    stream = Stream(contract_of(spec("x", type_text)), schema[0])
    stream.decode(dictionaries)
    charged = work_bytes(stream.codec, data_head(header, b"", len(body)) + body)

    def decode() -> int:
        tracemalloc.start()
        try:
            assert len(stream.decode([(header, body)])) == 1
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    python_peak, arrow_peak = peak_of(decode)

    assert python_peak + arrow_peak <= charged + (1 << 16)


CASTS = {
    "decimal": ("float64", "decimal", pa.array([1.5]).cast(pa.decimal128(38, 9))),
    "wide decimal": ("float32", "decimal", pa.array([1.5]).cast(pa.decimal256(76, 9))),
    "integer": ("float64", "int8", pa.array([1], pa.int8())),
    "nulls": ("float32", "int8", pa.array([None], pa.int8())),
}


@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize("kind", ["runs", "dictionary"])
def test_temporary_memory_of_a_cast_is_known_before_it(name: str, kind: str) -> None:
    tensor, type_text, values = CASTS[name]
    entry = InputColumn(
        tensor="x",
        column="x",
        type=type_text,
        conversion="number" if type_text == "decimal" else None,
        cast=type_text != "decimal",
        nulls="fill",
        fill=0.0,
    )
    contract = msgspec.structs.replace(contract_of(spec("x", tensor)), sources=(entry,))
    column = (runs_of if kind == "runs" else repeated)(200_000, values)
    schema, *dictionaries, (header, body) = messages(batch_of(x=column))
    stream = Stream(contract, schema[0])
    stream.decode(dictionaries)
    charged = work_bytes(stream.codec, data_head(header, b"", len(body)) + body)

    def decode() -> int:
        tracemalloc.start()
        try:
            assert len(stream.decode([(header, body)])) == 1
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    python_peak, arrow_peak = peak_of(decode)

    assert python_peak + arrow_peak <= charged + (1 << 16)


@pytest.mark.parametrize("place", ["column", "list", "struct", "input", "dictionary"])
@pytest.mark.parametrize("kind", [pa.string_view(), pa.binary_view()])
def test_views_of_the_same_bytes_are_limited(place: str, kind: pa.DataType) -> None:
    """Validation reads the bytes of each view: 65,536 views of 1 MiB are 64 GiB."""
    views = view_of(65_536, b"v" * (1 << 20), kind)
    rows = len(views)
    columns: dict[str, pa.Array] = {"x": x_of(rows)}
    contract = contract_of()
    if place == "list":
        columns["v"] = fixed_list(views, 1)
    elif place == "struct":
        columns["v"] = pa.StructArray.from_arrays([views], ["v"])
    elif place == "dictionary":
        columns["v"] = pa.DictionaryArray.from_arrays(x_of(rows).cast(pa.int32()), views)
    else:
        columns["v"] = views
    if place == "input":
        contract = contract_of(spec("x", "int64"), spec("v", "utf8"))
        if kind == pa.binary_view():
            contract = contract_of(spec("x", "int64"), spec("v", "binary"))
    schema, *rest = messages(batch_of(**columns))
    stream = Stream(contract, schema[0])

    error = decode_error(stream, rest, LimitExceeded)

    words = "string views of a dictionary" if place == "dictionary" else "string bytes, limit"
    assert words in error.message
