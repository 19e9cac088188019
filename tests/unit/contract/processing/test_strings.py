"""Strings in bodies: joining and splitting, compared with Python lists."""

from __future__ import annotations

import itertools
import struct
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.input_arena import EntryArena, NullCaller, admit, in_loop
from support.lanes import lane_of
from support.random_examples import up_to

from iskander.arrow.types import input_schema
from iskander.arrow.utf8 import require_strings
from iskander.config.schema import LimitsConfig
from iskander.contract.column_types import ColumnType
from iskander.contract.processing import rows as rows_module
from iskander.contract.processing import strings as strings_module
from iskander.contract.processing.rows import RowCopier, Rows
from iskander.contract.processing.strings import body_to_strings, strings_to_body
from iskander.contract.tensors import ALIGNMENT, Contract, TensorSpec
from iskander.errors import ContractError, ExecutionFailed, LimitExceeded, MalformedInput
from iskander.foundation.clock import now_ns
from iskander.gateway.scheduling.lanes.layout import LayoutCache
from iskander.gateway.scheduling.request import Request
from iskander.gateway.supervision.worker import SlotPlan, Worker

KINDS = ["utf8", "binary", "bool", "int64", "int8", "bfloat16"]
SPEC = st.builds(
    lambda dtype, shape: TensorSpec("x", "x", ColumnType(dtype, tuple(shape)), tuple(shape)),
    st.sampled_from(KINDS),
    st.lists(st.integers(1, 3), max_size=2),
)
SPECS = st.lists(SPEC, min_size=1, max_size=4).map(tuple)

Column = list[Any]
"""One list per row, of bytes or of numbers."""


@st.composite
def columns(draw: st.DrawFn, specs: tuple[TensorSpec, ...], rows: int) -> list[Column]:
    drawn = []
    for spec in specs:
        if spec.is_string:
            value: Any = st.binary(max_size=5)
        else:
            value = st.integers(0, 1 if spec.type.dtype_name == "bool" else 127)
        row = st.lists(value, min_size=spec.elements, max_size=spec.elements)
        drawn.append(draw(st.lists(row, min_size=rows, max_size=rows)))
    return drawn


def body_of(specs: tuple[TensorSpec, ...], values: list[Column], skipped: bytes = b"") -> bytes:
    """Return a body in the documented layout, with `skipped` bytes before each column's strings."""
    body, text_parts = bytearray(), []
    for spec, column in zip(specs, values, strict=True):
        flat = list(itertools.chain(*column))
        if spec.is_string:
            ends = itertools.accumulate(map(len, flat), initial=len(skipped))
            body += struct.pack(f"<{len(flat) + 1}i", *ends)
            text_parts.append(skipped + b"".join(flat))
        elif spec.type.dtype_name == "bool":
            body += np.packbits(flat, bitorder="little").tobytes()
        else:
            body += np.array(flat, spec.type.dtype.numpy).tobytes()
        body += bytes(-len(body) % ALIGNMENT)
    for strings in text_parts:
        body += strings + bytes(-len(strings) % ALIGNMENT)
    return bytes(body)


@settings(deadline=None, max_examples=up_to(300))
@given(st.data(), SPECS, st.lists(st.integers(1, 9), min_size=1, max_size=4), st.binary(max_size=3))
def test_rows_of_several_bodies_are_joined(
    data: st.DataObject, specs: tuple[TensorSpec, ...], sizes: list[int], skipped: bytes
) -> None:
    """Any range of rows of each body is joined."""
    copier = RowCopier(specs)
    parts, expected = [], [[] for _ in specs]  # type: ignore[var-annotated]
    for rows in sizes:
        values = data.draw(columns(specs, rows))
        first = data.draw(st.integers(0, rows - 1))
        count = data.draw(st.integers(1, rows - first))
        # Bytes behind a body are not part of it.
        body = memoryview(body_of(specs, values, skipped) + b"\xff" * 64)
        parts.append((count, Rows(body, rows, first)))
        for column, more in zip(expected, values, strict=True):
            column.extend(more[first : first + count])

    joined = joined_by(copier, parts)

    assert bytes(joined) == body_of(specs, expected)
    assert joined.nbytes == copier.string_ranges(joined, sum(count for count, _ in parts))[1]


@in_loop
async def test_request_with_strings_is_written_as_an_arrow_message() -> None:
    """pyarrow reads the arena's bytes, and the lease includes the strings."""
    contract = Contract(
        inputs=(text_spec("a"), TensorSpec("n", "n", ColumnType("int64"), ()), text_spec("b", 2)),
        outputs=(TensorSpec("y", "y", ColumnType("float32"), ()),),
    )
    lane = lane_of(contract=contract)
    lane.workers[1] = Worker(SlotPlan(0, 0, (0,), None))
    input_arena = EntryArena(1 << 16, LimitsConfig(arena_wait_ms=0))
    pairs = pa.FixedSizeListArray.from_arrays(pa.array(["", "q", "é", "r", "s", "tt"]), 2)
    batch = pa.record_batch(
        [pa.array(["one", "", "🦎"]), pa.array([1, 2, 3]), pairs], schema=input_schema(contract)
    )
    (_, a, a_bytes), (_, n), (_, _, b, b_bytes) = (column.buffers() for column in batch.columns)
    lengths = ((a, 16), (n, 24), (b, 28), (a_bytes, 7), (b_bytes, 8))
    tensors = [memoryview(buffer).cast("B")[:length] for buffer, length in lengths]
    request = Request(lane, NullCaller(), 3, tensors, arrived_ns=now_ns())

    await admit(input_arena, request)

    assert request.lease is not None
    lease = request.lease
    assert lease.length_bytes >= request.input_bytes == len(request.layout.header) + 5 * 64
    raw = input_arena.segment.view[lease.offset : lease.offset + request.input_bytes]
    assert pa.ipc.read_record_batch(pa.py_buffer(raw), batch.schema).equals(batch)
    raw.release()
    input_arena.close()


def test_rows_whose_results_exceed_32_bit_offsets_are_rejected() -> None:
    """The limit is checked for the request, before it runs; both sides of the limit."""
    spec = TensorSpec("y", "y", ColumnType("utf8"), (2,), False, 1 << 20)
    inputs = (TensorSpec("x", "x", ColumnType("int8"), ()),)
    layouts = LayoutCache(Contract(inputs, (spec,)))

    assert layouts.for_rows(1023).output_bytes == 8192 + (1023 << 21)
    with pytest.raises(LimitExceeded, match="1024 rows may make 2048 strings of 1048576 bytes"):
        layouts.for_rows(1024)


def test_join_yields_once_per_part() -> None:
    """The caller can yield to the event loop between the parts of large bodies."""
    specs = (text_spec(),)
    body = memoryview(body_of(specs, [[[b"a"], [b"bc"]]]))

    steps = RowCopier(specs).join([(2, Rows(body, 2, 0))] * 5)

    assert sum(1 for _ in steps) == 5


@pytest.mark.parametrize("offsets", [(0, 1, 200), (0, 1, -1), (5, 1, 2), (-1, 1, 2), (0, 1, 65)])
def test_offsets_outside_the_body_are_rejected(offsets: tuple[int, ...]) -> None:
    """The body has 64 bytes for strings, of which two are used."""
    body = struct.pack("<3i", *offsets) + bytes(52) + b"ab" + bytes(62)

    with pytest.raises(AssertionError):
        joined_by(RowCopier((text_spec(),)), [(2, Rows(memoryview(body), 2, 0))])


def test_strings_beyond_the_column_limit_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides of the limit, for a batch and for a tensor."""
    specs = (text_spec(),)
    part = (1, Rows(memoryview(body_of(specs, [[[b"four"]]])), 1, 0))
    monkeypatch.setattr(rows_module, "COLUMN_BYTES_MAX", 8)
    monkeypatch.setattr(strings_module, "COLUMN_BYTES_MAX", 8)

    joined_by(RowCopier(specs), [part] * 2)
    strings_to_body([b"four"] * 2)
    with pytest.raises(ExecutionFailed, match="has 12 bytes, limit 8"):
        joined_by(RowCopier(specs), [part] * 3)
    with pytest.raises(LimitExceeded, match="have 12 bytes, limit 8"):
        strings_to_body([b"four"] * 3)


@given(st.lists(st.binary(max_size=9), max_size=20))
def test_strings_to_body_and_back(strings: list[bytes]) -> None:
    body = strings_to_body(strings)

    offsets = np.frombuffer(body, np.int32, len(strings) + 1)
    assert offsets.tolist() == [0, *itertools.accumulate(map(len, strings))]
    assert body[offsets.nbytes :] == b"".join(strings)
    assert body_to_strings(memoryview(body), len(strings)) == strings


def test_no_strings_need_no_offsets() -> None:
    assert body_to_strings(b"", 0) == []


@pytest.mark.parametrize(
    ("offsets", "joined", "error"),
    [
        ((0, 2, 4), "é🦎".encode()[:4], ContractError),
        ((0, 1, 2), "é".encode(), ContractError),
        ((0, 1, 2), b"\xff\xff", ContractError),
        ((0, 2, 1), b"ab", MalformedInput),
        ((-1, 1, 2), b"ab", MalformedInput),
        ((0, 1, 3), b"ab", MalformedInput),
    ],
)
def test_invalid_strings_are_rejected(
    offsets: tuple[int, ...], joined: bytes, error: type[Exception]
) -> None:
    """Invalid UTF-8, a string that begins inside a character, or invalid offsets."""
    with pytest.raises(error, match=r"^input `x`: "):
        require_strings("input `x`", 2, struct.pack("<3i", *offsets), joined)


def test_valid_strings_are_accepted() -> None:
    """Bytes before the first string are ignored."""
    require_strings("input `x`", 2, struct.pack("<3i", 1, 3, 7), b"\xff" + "é🦎".encode())
    require_strings("input `x`", 0, b"", b"")


def text_spec(name: str = "x", *shape: int) -> TensorSpec:
    return TensorSpec(name, name, ColumnType("utf8", shape), shape)


def joined_by(copier: RowCopier, parts: list[tuple[int, Rows]]) -> memoryview:
    steps = copier.join(parts)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            body: memoryview = end.value
            return body
