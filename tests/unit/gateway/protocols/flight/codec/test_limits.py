"""Limits of a batch in the Flight codec: rows, bytes, headers, texts and declared lengths."""

from __future__ import annotations

import struct

import numpy as np
import pyarrow as pa
import pytest
from support.codecs import read_message
from support.flight_streams import (
    CODECS,
    FORGED_SCHEMA,
    OTHER,
    ROWS,
    Stream,
    batch_of,
    contract_of,
    decode_error,
    fixed_list,
    messages,
    numbers,
    patched,
    schema_error,
    spec,
    x_of,
)

from iskander.arrow import ipc
from iskander.config.schema import HEADER_BYTES_MAX
from iskander.errors import LimitExceeded, MalformedInput
from iskander.gateway.protocols.flight.data import data_head


def test_app_metadata_is_limited() -> None:
    """It is kept until the response."""
    schema, (header, body) = messages(batch_of(x=x_of()))
    stream = Stream(contract_of(), schema[0], app_metadata_bytes=100)
    for size in (0, 100):
        parsed = read_message(stream.codec, data_head(header, b"m" * size, len(body)) + body)
        assert parsed is not None and len(parsed.app_metadata) == size

    for header_bytes, body_bytes in ((header, body), (FORGED_SCHEMA, b"")):
        message = data_head(header_bytes, b"m" * 101, len(body_bytes)) + body_bytes
        with pytest.raises(LimitExceeded, match=r"101 bytes, limit 100 \(`limits\.app_"):
            read_message(stream.codec, message)


@pytest.mark.parametrize("compression", CODECS)
def test_rows_are_limited(compression: str | None) -> None:
    schema, fits, exceeds = messages(
        batch_of(x=x_of(ROWS)), batch_of(x=x_of(ROWS + 1)), compression=compression
    )
    stream = Stream(contract_of(), schema[0], rows=ROWS)

    stream.decode([fits])
    error = decode_error(stream, [exceeds], LimitExceeded)

    assert f"{ROWS + 1} rows, limit {ROWS}" in error.message
    assert error.fields == {"wanted": ROWS}


def test_bytes_are_limited() -> None:
    schema, message = messages(batch_of(x=x_of(100)))
    body_bytes = len(message[1])

    Stream(contract_of(), schema[0], bytes=body_bytes).decode([message])
    stream = Stream(contract_of(), schema[0], bytes=body_bytes - 1)

    error = decode_error(stream, [message], LimitExceeded)
    assert f"{body_bytes} bytes, limit {body_bytes - 1}" in error.message


def test_headers_are_limited() -> None:
    """Headers of schemas and batches are cached, and padding can give them any length.

    The limit is the space that the configuration reserves for the header of a message.
    """
    (schema, _), (header, body) = messages(batch_of(x=x_of()))
    fits, exceeds = bytes(HEADER_BYTES_MAX - 1024), bytes(HEADER_BYTES_MAX)

    Stream(contract_of(), schema + fits).decode([(header + fits, body)])
    schema_error(LimitExceeded, contract_of(), schema + exceeds)
    stream = Stream(contract_of(), schema)

    decode_error(stream, [(header + exceeds, body)], LimitExceeded)


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_bomb_is_rejected_by_its_declared_size(compression: str) -> None:
    """A small message declares one megabyte; it is counted before decompression."""
    column = pa.array(np.zeros(1 << 17, np.int64))
    schema, message = messages(batch_of(x=column), compression=compression)
    assert len(message[1]) < 1 << 14

    Stream(contract_of(), schema[0], bytes=1 << 20).decode([message])
    stream = Stream(contract_of(), schema[0], bytes=(1 << 20) - 1)

    assert str(1 << 20) in decode_error(stream, [message], LimitExceeded).message


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_bomb_in_a_dictionary_is_rejected(compression: str) -> None:
    values = pa.array(np.zeros(1 << 17, np.int64))
    column = pa.DictionaryArray.from_arrays(pa.array([0], pa.int8()), values)
    schema, *rest = messages(batch_of(x=column), compression=compression)

    stream = Stream(contract_of(), schema[0], bytes=(1 << 20) - 1)

    decode_error(stream, rest, LimitExceeded)


def declared_in_metadata(header: bytes) -> bytes:
    """Returns the header of a zstd batch or dictionary as of Arrow 0.17.

    Version V4, with the codec in the custom metadata. pyarrow writes no such dictionaries.
    """
    message = ipc.read_message(header)
    changed = bytearray(header)
    batch = message.table
    if message.kind == ipc.DICTIONARY_BATCH:
        batch = ipc._target_at(header, batch, ipc._DICTIONARY_DATA)
    compression = 4 + 2 * ipc._BATCH_COMPRESSION
    struct.pack_into(
        "<H", changed, batch - struct.unpack_from("<i", header, batch)[0] + compression, 0
    )
    key, value = (
        struct.pack("<I", len(text)) + text + bytes(4 - len(text) % 4)
        for text in (b"ARROW:experimental_compression", b"zstd")
    )
    texts = key + value
    texts += bytes(-(76 + len(texts)) % 8)
    metadata = struct.pack("<II4HiII", 1, 12, 8, 12, 4, 8, 8, 8, 4 + len(key)) + texts
    table = 48 + len(metadata) + message.table - 28
    root = struct.pack("<I7H6x", 24, 14, 24, 20, 22, 4, 8, 16)
    fields = (20, table, message.body_bytes, 8, ipc.METADATA_V5 - 1, message.kind)
    return root + struct.pack("<iIqIhBx", *fields) + metadata + bytes(changed)


@pytest.mark.parametrize("is_dictionary", [False, True])
def test_compression_declared_in_custom_metadata_is_rejected(is_dictionary: bool) -> None:
    """Its buffers would be decompressed without a check of their declared sizes."""
    column = pa.array(np.zeros(1 << 17, np.int64))
    if is_dictionary:
        column = pa.DictionaryArray.from_arrays(pa.array([0], pa.int8()), column)
    schema, (header, body), *rest = messages(batch_of(x=column), compression="zstd")
    stream = Stream(contract_of(), schema[0])

    error = decode_error(stream, [(declared_in_metadata(header), body), *rest], MalformedInput)

    assert "ARROW:experimental_compression" in error.message


def test_dictionary_input_is_limited_after_decoding() -> None:
    """Short indices of one long value exceed the limit only when decoded."""
    values = fixed_list(numbers(1000, pa.int64()), 1000)
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 100, pa.int8()), values)
    schema, *rest = messages(batch_of(x=column))
    contract = contract_of(spec("x", "fixed_size_list<int64>[1000]"))

    Stream(contract, schema[0], bytes=800_000).decode(rest)
    stream = Stream(contract, schema[0], bytes=799_999)

    assert "has 800000 bytes" in decode_error(stream, rest, LimitExceeded).message


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
@pytest.mark.parametrize("length", [2**62, 2**63 - 1, 1 << 27])
def test_compressed_buffer_with_a_huge_declared_length_is_rejected(
    length: int, compression: str
) -> None:
    schema, (header, body) = messages(batch_of(x=x_of(1000)), compression=compression)
    forged = struct.pack("<q", length) + body[8:]
    stream = Stream(contract_of(), schema[0])

    decode_error(stream, [(header, forged)], LimitExceeded)


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
@pytest.mark.parametrize("length", [0, 1, 7999, 8001, 65536, -2, -(2**63)])
def test_compressed_buffer_with_a_wrong_declared_length_is_rejected(
    length: int, compression: str
) -> None:
    """The buffer has 8000 bytes. Below the limit, decompression detects the difference."""
    schema, (header, body) = messages(batch_of(x=x_of(1000)), compression=compression)
    assert struct.unpack_from("<q", body)[0] == 8000
    stream = Stream(contract_of(), schema[0])

    decode_error(stream, [(header, struct.pack("<q", length) + body[8:])], MalformedInput)


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
@pytest.mark.parametrize("declared", [8, 8000, 1 << 20])
def test_bomb_expands_only_to_its_declared_size(declared: int, compression: str) -> None:
    """64 MiB in a small message, with a smaller declared size."""
    zeros = pa.array(np.zeros(8 << 20, np.int64))
    (schema, _), (header, body) = messages(batch_of(x=zeros), compression=compression)
    assert struct.unpack_from("<q", body)[0] == 64 << 20 and len(body) < 1 << 20
    stream = Stream(contract_of(), schema, rows=1 << 24)
    default = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(default)
    pa.set_memory_pool(pool)
    try:
        decode_error(stream, [(header, struct.pack("<q", declared) + body[8:])], MalformedInput)
    finally:
        pa.set_memory_pool(default)
    assert declared <= pool.max_memory() <= declared + (1 << 16)


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_invalid_compressed_bytes_are_rejected(compression: str) -> None:
    schema, (header, body) = messages(batch_of(x=x_of(1000)), compression=compression)
    stream = Stream(contract_of(), schema[0])

    decode_error(stream, [(header, body[:8] + bytes(len(body) - 8))], MalformedInput)


@pytest.mark.parametrize("start", [-8, 1 << 20, 2**63 - 1])
@pytest.mark.parametrize("length", [4, 600, 2**62])
def test_compressed_buffer_outside_the_body_is_rejected(start: int, length: int) -> None:
    schema, (header, body) = messages(batch_of(x=x_of(1000)), compression="zstd")
    read = ipc.read_batch(header, ipc.read_message(header))
    forged = patched(header, (read.buffers[2], read.buffers[3]), (start, length))
    stream = Stream(contract_of(), schema[0])

    error = decode_error(stream, [(forged, body)], MalformedInput)

    assert "a compressed buffer is not inside the body" in error.message


STRING_BATCH = batch_of(x=x_of(), s=pa.array(["abcd", "", "ef", None, "g"]))


@pytest.mark.parametrize("compression", CODECS)
def test_string_bytes_are_limited(compression: str | None) -> None:
    """The text has seven bytes, compressed or not."""
    schema, message = messages(STRING_BATCH, compression=compression)

    Stream(contract_of(), schema[0], string_bytes=7).decode([message])
    stream = Stream(contract_of(), schema[0], string_bytes=6)

    assert "string bytes, limit 6" in decode_error(stream, [message], LimitExceeded).message


def test_string_bytes_are_limited_in_converted_batches() -> None:
    """The list column makes pyarrow convert the batch."""
    columns = {"x": x_of(), "s": STRING_BATCH.column("s"), "l": OTHER["list"]}
    schema, message = messages(batch_of(**columns))

    Stream(contract_of(), schema[0], string_bytes=7).decode([message])
    stream = Stream(contract_of(), schema[0], string_bytes=6)

    decode_error(stream, [message], LimitExceeded)


def test_string_bytes_of_all_columns_are_added() -> None:
    columns = {"x": x_of(), "a": STRING_BATCH.column("s"), "b": STRING_BATCH.column("s")}
    schema, message = messages(batch_of(**columns))

    Stream(contract_of(), schema[0], string_bytes=14).decode([message])
    stream = Stream(contract_of(), schema[0], string_bytes=13)

    decode_error(stream, [message], LimitExceeded)
