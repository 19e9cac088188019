"""Mutated and random Flight messages: only expected errors."""

from __future__ import annotations

import contextlib

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st
from support.flight_streams import (
    FIXED_WIDTH,
    FORGED_SCHEMA,
    OTHER,
    STRINGS,
    Stream,
    batch_of,
    contract_of,
    messages,
    output_of,
    x_of,
)
from support.random_examples import up_to

from iskander.errors import ContractError, LimitExceeded, MalformedInput
from iskander.gateway.protocols.flight.data import read_flight_data

EXPECTED_ERRORS = (MalformedInput, LimitExceeded, ContractError)

CASES = [
    messages(batch_of(**columns), **options)
    for columns in (
        {"x": x_of()},
        {"x": x_of(), "s": STRINGS["string"], "n": FIXED_WIDTH["list of nulls and numbers"]},
        {"x": x_of(), "l": OTHER["list"], "t": OTHER["struct"]},
        {"x": x_of().dictionary_encode(), "d": OTHER["dictionary in a struct"]},
        {"x": x_of(), "v": OTHER["string view"], "u": OTHER["dense union"]},
    )
    for options in ({}, {"compression": "lz4"}, {"metadata_version": pa.ipc.MetadataVersion.V4})
]


@st.composite
def mutated(draw: st.DrawFn, raw: bytes) -> bytes:
    """Draws real bytes with a few words overwritten by any value, perhaps cut."""
    changed = bytearray(raw)
    for _ in range(draw(st.integers(1, 4)) if raw else 0):
        width = draw(st.sampled_from([1, 2, 4, 8]))
        index = draw(st.integers(0, max(len(changed) - width, 0)))
        value = draw(
            st.sampled_from([0, 1, (1 << 8 * width) - 1, 1 << (8 * width - 1)])
            | st.integers(0, (1 << 8 * width) - 1)
            | st.integers(0, 255)
        )
        changed[index : index + width] = value.to_bytes(width, "little")
    is_cut = draw(st.integers(0, 9)) == 0
    return bytes(changed[: draw(st.integers(0, len(changed)))] if is_cut else changed)


@st.composite
def malformed_streams(draw: st.DrawFn) -> list[tuple[bytes, bytes]]:
    """Draws a real stream with one changed header, body or both."""
    stream = list(draw(st.sampled_from(CASES)))
    index = draw(st.integers(0, len(stream) - 1) | st.just(len(stream) - 1))
    header, body = stream[index]
    what = draw(st.sampled_from(["header", "body", "both"]))
    if what != "body":
        header = draw(mutated(header))
    if what != "header":
        body = draw(mutated(body))
    stream[index] = header, body
    return stream


@settings(deadline=None, max_examples=up_to(500))
@given(malformed_streams())
def test_malformed_stream_is_rejected_or_answered(
    stream_messages: list[tuple[bytes, bytes]],
) -> None:
    """Only the expected errors occur, and accepted batches have complete tensors and responses."""
    (header, _), *rest = stream_messages
    with contextlib.suppress(*EXPECTED_ERRORS):
        stream = Stream(contract_of(), header, bytes=1 << 20, rows=1 << 16, string_bytes=1 << 18)
        for parsed in stream.decode(rest):
            for start, stop in parsed.tensors:
                assert 0 <= start <= stop <= len(parsed.body)
                assert stop - start == 8 * parsed.rows
            prepared = stream.codec.prepare(parsed, memoryview(output_of(parsed.rows)))
            for frame in map(b"".join, stream.codec.frames(prepared)):
                assert len(read_flight_data(frame).header)


@settings(deadline=None, max_examples=up_to(300))
@given(st.binary(max_size=200), st.binary(max_size=200))
def test_random_messages_raise_only_expected_errors(header: bytes, body: bytes) -> None:
    stream = Stream(contract_of(), FORGED_SCHEMA)

    with contextlib.suppress(*EXPECTED_ERRORS):
        stream.decode([(header, body)])
    with contextlib.suppress(*EXPECTED_ERRORS):
        Stream(contract_of(), header)
