"""Rows split into buckets by length, and results merged back into the order of the rows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.codecs import decode
from support.lanes import CONTRACT, lane_of, request_of
from support.random_examples import up_to

from iskander.config.schema import LimitsConfig
from iskander.contract.column_types import parse_column_type
from iskander.contract.compile import compile_contract
from iskander.contract.dtypes import BY_ARROW
from iskander.contract.graph import Graph, GraphTensor
from iskander.contract.manifest import Manifest
from iskander.contract.processing.buckets import buckets_of, contracts_of_buckets
from iskander.contract.processing.rows import RowCopier, Rows
from iskander.contract.processing.strings import split_strings
from iskander.contract.tensors import Contract, TensorSpec, body_layout
from iskander.errors import ContractError, ExecutionFailed, LimitExceeded, ManifestError, Superseded
from iskander.gateway.protocols.flight.codec import ParsedBatch, StreamCodec
from iskander.gateway.protocols.flight.columns.split import SplitBatch, merge_results
from iskander.gateway.protocols.flight.exchange import Exchange
from iskander.gateway.protocols.flight.plan import Plan
from iskander.gateway.protocols.tensors import Tensor, read_inputs
from iskander.gateway.scheduling.request import Request

BUCKETS = (2, 4, 9)
LIMITS = LimitsConfig()


def contract_of(*entries: dict[str, Any], **tensors: tuple[Any, ...]) -> Contract:
    output = {"tensor": "y", "column": "y", "type": "float32"}
    raw = {"format": 1, "inputs": entries, "outputs": [output]}
    graph = Graph(
        tuple(
            GraphTensor(name, BY_ARROW[element].onnx, ("rows", *trailing))
            for name, (element, *trailing) in tensors.items()
        ),
        (GraphTensor("y", "tensor(float)", ("rows",)),),
    )
    return compile_contract(msgspec.convert(raw, Manifest), graph)


def bucketed(**more: Any) -> Contract:
    entry = {"tensor": "x", "column": "x", "buckets": BUCKETS, "mask": "m", "lengths": "n"}
    return contract_of(
        entry | {"truncate": "head", "padding": -1} | more,
        {"tensor": "i", "column": "i", "cast": True},
        x=("int64", "long"), m=("bool", "long"), n=("int32",), i=("int64",),
    )  # fmt: skip


def read(
    contract: Contract,
    limits: LimitsConfig = LIMITS,
    *,
    is_whole: bool = False,
    **columns: pa.Array,
) -> ParsedBatch:
    batch = pa.record_batch(list(columns.values()), names=list(columns))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    schema, message = pa.ipc.MessageReader.open_stream(sink.getvalue())
    codec = StreamCodec(Plan(bytes(schema.metadata), contract, limits), limits)
    codec.set_whole(is_whole=is_whole)
    body = memoryview(bytes(message.body) if message.body else b"")
    parsed = decode(codec, memoryview(bytes(message.metadata)), body, b"")
    assert parsed is not None
    return parsed


def test_each_bucket_has_its_own_contract() -> None:
    contract = bucketed()
    assert buckets_of(contract) == BUCKETS
    shapes = [[spec.shape for spec in each.inputs] for each in contracts_of_buckets(contract)]
    assert shapes == [[(n,), (n,), (), ()] for n in BUCKETS]
    assert contracts_of_buckets(contract)[-1] == contract
    plain = contract_of({"tensor": "x", "column": "x"}, x=("int64",))
    assert contracts_of_buckets(plain) == (plain,) and not buckets_of(plain)


@given(lengths=st.lists(st.integers(0, 12), min_size=1, max_size=20))
@settings(max_examples=up_to(150), deadline=None)
def test_each_row_is_in_the_smallest_fitting_bucket(lengths: list[int]) -> None:
    contract = bucketed()
    rows = [[100 * row + at for at in range(length)] for row, length in enumerate(lengths)]

    parsed = read(
        contract,
        x=pa.array(rows, pa.list_(pa.int64())),
        i=pa.array(range(len(rows)), pa.int8()),
    )

    assert sorted(np.concatenate([part.places for part in parsed.portions])) == list(
        range(len(rows))
    )
    for part in parsed.portions:
        long = BUCKETS[part.bucket]
        x, m, n, i = part.tensors
        padded = np.frombuffer(x, np.int64).reshape(part.rows, long)
        mask = np.unpackbits(np.frombuffer(m, np.uint8), count=padded.size, bitorder="little")
        assert np.frombuffer(i, np.int64).tolist() == part.places.tolist()
        for place, row, kept, length in zip(
            part.places, padded, mask.reshape(padded.shape), np.frombuffer(n, np.int32), strict=True
        ):
            expected = rows[place][: BUCKETS[-1]]
            assert length == len(expected) and kept.sum() == len(expected)
            assert row.tolist() == expected + [-1] * (long - len(expected))
            smaller = [size for size in BUCKETS if size >= len(expected)]
            assert long == smaller[0]


def test_one_long_row_does_not_pad_the_other_rows() -> None:
    """The memory limit applies to the bucket of each row, not to the largest bucket."""
    contract = bucketed(buckets=(1, 100_000))
    lists = pa.array([[1]] * 999 + [[1] * 5000], pa.list_(pa.int64()))
    parsed = read(contract, x=lists, i=pa.array(range(1000)))
    assert [part.rows for part in parsed.portions] == [999, 1]
    with pytest.raises(LimitExceeded, match="bytes"):
        long = pa.array([[1] * 2] * 1000, pa.list_(pa.int64()))
        read(contract, x=long, i=pa.array(range(1000)))


def test_all_lists_of_a_row_share_one_bucket() -> None:
    entries = [{"tensor": name, "column": name, "buckets": [1, 3]} for name in ("a", "b")]
    contract = contract_of(*entries, a=("int64", "n"), b=("int64", "n"))
    parsed = read(contract, a=pa.array([[1], [2]]), b=pa.array([[1, 2], [2]]))
    assert [(p.bucket, p.places.tolist()) for p in parsed.portions] == [(0, [1]), (1, [0])]
    entries[1]["buckets"] = [1, 4]
    with pytest.raises(ManifestError, match="`a` and `b` have different buckets"):
        contract_of(*entries, a=("int64", "n"), b=("int64", "n"))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"buckets": [4, 2]}, "not ascending"),
        ({"max_length": 5}, "its last bucket is 9"),
        ({"type": "int64"}, "is for lists"),
    ],
)
def test_invalid_buckets_are_rejected(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        bucketed(**keys)


def spec(name: str, text: str) -> TensorSpec:
    kind = parse_column_type(text)
    string_bytes = 99 if text.endswith("utf8") or "utf8>" in text else 0
    return TensorSpec(name, name, kind, kind.shape, string_bytes=string_bytes)


OUTPUTS = (
    spec("a", "utf8"),
    spec("b", "fixed_size_list<bool>[3]"),
    spec("c", "fixed_size_list<int16>[2]"),
    spec("d", "fixed_size_list<utf8>[2]"),
)
RESULTS = Contract((spec("x", "int64"),), OUTPUTS)


def body_of(places: np.ndarray) -> memoryview:
    """Return a result body whose values encode the row numbers, in a worker's layout."""
    rows = len(places)
    copier = RowCopier(OUTPUTS)
    parts = []
    for place in places:
        offsets, _ = body_layout(OUTPUTS, 1)
        texts = [[f"a{place}" * (place % 3)], [f"d{place}", "é" * (place % 2)]]
        raw = bytearray(4096)
        joined = [[each.encode() for each in text] for text in texts]
        for index, strings in zip((0, 3), joined, strict=True):
            ends = np.cumsum([0, *map(len, strings)]).astype(np.int32)
            raw[offsets[index] : offsets[index] + ends.nbytes] = ends.tobytes()
        raw[offsets[1]] = place % 8
        raw[offsets[2] : offsets[2] + 4] = np.array([place, -place], np.int16).tobytes()
        ranges, end = copier.string_ranges(memoryview(raw), 1)
        for (start, stop), strings in zip(ranges, joined, strict=True):
            raw[start:stop] = b"".join(strings)
        parts.append((1, Rows(memoryview(raw)[:end], 1, 0)))
    steps = copier.join(parts)
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            assert rows
            body: memoryview = stop.value
            return body


@given(numbers=st.lists(st.integers(0, 3), min_size=1, max_size=30))
@settings(max_examples=up_to(60), deadline=None)
def test_merged_results_are_in_row_order(numbers: list[int]) -> None:
    """Merged results of the portions equal the results of the unsplit batch."""
    groups = np.array(numbers)
    places = [np.flatnonzero(groups == number) for number in np.unique(groups)]
    merged = merge_results(RESULTS, places, [body_of(each) for each in places])
    expected = body_of(np.arange(len(numbers)))
    offsets = body_layout(OUTPUTS, len(numbers))[0]
    for index, each in enumerate(OUTPUTS):
        at, long = offsets[index], each.buffer_bytes(len(numbers))
        if not each.is_string:
            assert bytes(merged[at : at + long]) == bytes(expected[at : at + long])
    copier = RowCopier(OUTPUTS)
    for index, which in ((0, 0), (3, 1)):
        texts = []
        for body in (merged, expected):
            (start, stop) = copier.string_ranges(body, len(numbers))[0][which]
            count = len(numbers) * OUTPUTS[index].elements
            ends = body[offsets[index] :][: 4 * (count + 1)]
            texts.append(split_strings(ends, body[start:stop], count))
        assert texts[0] == texts[1]


def test_tensors_must_have_the_length_of_a_bucket() -> None:
    """Clients of tensor protocols pad their rows themselves."""
    contract = bucketed()

    def offered(long: int) -> list[Tensor]:
        return [
            Tensor("x", "INT64", (3, long), memoryview(bytes(24 * long))),
            Tensor("m", "BOOL", (3, long), memoryview(bytes(3 * long))),
            Tensor("n", "INT32", (3,), memoryview(bytes(12))),
            Tensor("i", "INT64", (3,), memoryview(bytes(24))),
        ]

    for number, long in enumerate(BUCKETS):
        assert read_inputs(contract, offered(long), LIMITS).bucket == number
    with pytest.raises(ContractError, match=r"wanted INT64 \[3, 9\], got INT64 \[3, 5\]"):
        read_inputs(contract, offered(5), LIMITS)


def test_row_with_which_a_portion_fails_is_that_of_the_whole_batch() -> None:
    lane = lane_of()
    portions = [SimpleNamespace(places=np.array(places)) for places in ([0, 3, 4], [1, 2, 5])]
    split_batch = SplitBatch(CONTRACT, portions, lambda failed: None)  # type: ignore[arg-type]
    split_batch.requests = [request_of(lane) for _ in portions]
    failed = ExecutionFailed("stof").located(2, "x")
    split_batch.fail(split_batch.requests[1], failed)
    error = split_batch.error
    assert isinstance(error, ExecutionFailed)
    assert (error.row, error.message) == (5, "row 5, column `x`: stof")


def test_portion_admitted_after_its_batch_failed_releases_its_memory() -> None:
    """The batch fails while a portion waits for memory, before that portion can be withdrawn."""
    lane = lane_of()
    split_batch = SplitBatch(CONTRACT, (), lambda failed: None)
    first, second, third = split_batch.requests = [request_of(lane) for _ in range(3)]
    events: list[tuple[str, Request]] = []

    class FakeEntry:
        def enter(self, request: Request) -> bool:
            events.append(("entered", request))
            return request is first

        async def enter_later(self, request: Request, entered: Callable[[Request], None]) -> None:
            split_batch.fail(first, Superseded("a newer one came"))
            entered(request)
            events.append(("queued", request))

    stream: Any = SimpleNamespace(_entry=FakeEntry(), _append=lambda pending: None)
    asyncio.run(Exchange._admit_portions(stream, split_batch))

    assert events == [("entered", first), ("entered", second)]
    assert third.lease is None


@given(lengths=st.lists(st.integers(0, 12), min_size=1, max_size=20))
@settings(max_examples=up_to(30), deadline=None)
def test_rows_that_depend_on_each_other_share_the_largest_bucket_of_any(lengths: list[int]) -> None:
    lists = pa.array([[1] * length for length in lengths], pa.list_(pa.int64()))
    rows = pa.array(range(len(lengths)))
    (part,) = read(bucketed(), is_whole=True, x=lists, i=rows).portions
    assert BUCKETS[part.bucket] == min(
        each for each in (*BUCKETS, 12) if each >= min(max(lengths), 9)
    )
    assert np.frombuffer(part.tensors[3], np.int64).tolist() == list(range(len(lengths)))
