"""Batches whose bodies are in memory that their client can change at any time."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest

from iskander.config.schema import HEADER_BYTES_MAX, LimitsConfig
from iskander.contract.column_types import parse_column_type
from iskander.contract.tensors import Contract, TensorSpec
from iskander.control.shared_regions import BodyLocation, encode
from iskander.errors import IskanderError, LimitExceeded, MalformedInput, RegionNotFound
from iskander.memory.chunked_copy import WHOLE_BYTES
from iskander.memory.client_segment import ClientSegment, SegmentRange
from iskander.protocols.flight.codec import ParsedBatch
from iskander.protocols.flight.data import data_head
from iskander.protocols.flight.plan import Plan
from iskander.protocols.flight.shared_memory import SharedCodec
from iskander.varint import encode_varint

LIMITS = LimitsConfig()
ROWS = 100


def spec(name: str, type_text: str) -> TensorSpec:
    column_type = parse_column_type(type_text)
    return TensorSpec(name, name, column_type, column_type.shape)


@pytest.fixture(autouse=True)
def nothing_is_kept() -> Iterator[None]:
    """The codec knows how to find the memory of whoever has the codec."""
    yield
    gc.collect()


class Shared:
    """A stream's codec over a region of our own."""

    def __init__(self, batch: pa.RecordBatch, *inputs: TensorSpec, **options: object) -> None:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(
            sink, batch.schema, options=pa.ipc.IpcWriteOptions(**options)
        ) as writer:
            writer.write_batch(batch)
        schema, *self.messages = [
            (bytes(each.metadata), bytes(each.body) if each.body else b"")
            for each in pa.ipc.MessageReader.open_stream(sink.getvalue())
        ]
        contract = Contract(inputs or (spec("x", "int64"),), (spec("y", "float32"),), "all", None)
        self.loan = ClientSegment(
            "iskander-test", 256 + sum(len(body) + 64 for _, body in self.messages)
        )
        self.is_lent = True
        self.codec = SharedCodec(Plan(schema[0], contract, LIMITS), LIMITS, self.find)

    def find(self) -> ClientSegment:
        if not self.is_lent:
            raise RegionNotFound("gone")
        return self.loan

    def fill(self, value: int) -> None:
        """As a client may at any time."""
        os.pwrite(self.loan.fd, bytes([value]) * len(self.loan), 0)

    def located(self, number: int = -1, at: int = 72) -> bytes:
        """The message that says where a batch is, after it was put there."""
        header, body = self.messages[number]
        os.pwrite(self.loan.fd, body, at)
        return carrier(BodyLocation(header, (at, len(body)), b"mine"))

    def read(self, raw: bytes) -> ParsedBatch:
        arrived = self.codec.read(raw)
        assert arrived is not None
        return arrived


def carrier(located: object) -> bytes:
    """FlightData with nothing but `app_metadata`."""
    said = encode(located)
    return b"\x1a" + encode_varint(len(said)) + said


def values(arrived: ParsedBatch, number: int = 0) -> bytes:
    if arrived.portions:
        return bytes(arrived.portions[0].tensors[number])
    start, stop = arrived.tensors[number]
    part = arrived.body[start:stop]
    return bytes(part.read() if isinstance(part, SegmentRange) else part)


def numbers(rows: int = ROWS) -> pa.RecordBatch:
    return pa.record_batch([pa.array(range(rows))], names=["x"])


def test_tensors_of_fixed_width_are_read_where_they_are() -> None:
    shared = Shared(numbers())
    for _ in range(2):  # Of a header that is new, and of one that is known.
        raw = shared.located()
        assert shared.codec.is_quick(raw)
        arrived = shared.read(raw)
        assert arrived.rows == ROWS
        assert arrived.app_metadata == b"mine"
        assert values(arrived) == np.arange(ROWS).tobytes()
        assert isinstance(arrived.body, SegmentRange)
        shared.fill(0)
        assert values(arrived) == bytes(8 * ROWS)


@pytest.mark.parametrize(
    ("batch", "inputs", "options"),
    [
        (
            pa.record_batch([pa.array(["a", "bc"])], names=["s"]),
            (spec("s", "utf8"),),
            {},
        ),
        (
            pa.record_batch([pa.array([1, 2]), pa.array(["a", "bc"])], names=["x", "s"]),
            (),
            {},
        ),
        (numbers(), (), {"compression": "zstd"}),
        (numbers(), (), {"metadata_version": pa.ipc.MetadataVersion.V4}),
        (
            pa.record_batch([pa.array([1, 2]), pa.array([[1], [2, 3]])], names=["x", "l"]),
            (),
            {},
        ),
        (
            pa.record_batch([pa.array([1, 2]), pa.array([3, None])], names=["x", "n"]),
            (),
            {},
        ),
    ],
    ids=["strings in", "strings passed", "compressed", "older metadata", "lists passed", "passed"],
)
def test_what_is_looked_into_or_comes_back_is_copied_first(
    batch: pa.RecordBatch, inputs: tuple[TensorSpec, ...], options: dict[str, object]
) -> None:
    shared = Shared(batch, *inputs, **options)
    arrived = shared.read(shared.located())
    assert isinstance(arrived.body, memoryview)
    before = values(arrived)
    kept = [column.to_pylist() for column in arrived.passthrough]
    shared.fill(255)
    assert values(arrived) == before
    assert [column.to_pylist() for column in arrived.passthrough] == kept


def test_a_response_that_waits_keeps_no_lent_memory() -> None:
    shared = Shared(numbers())
    waiting = shared.read(shared.located()).without_inputs()
    assert waiting.rows == ROWS
    where = f"/proc/self/fd/{shared.loan.fd}"
    shared.loan = ClientSegment("iskander-test", 8)
    assert not os.path.lexists(where)


def test_dictionaries_are_copied_too() -> None:
    batch = pa.record_batch(
        [pa.array([1, 2]), pa.array(["a", "b"]).dictionary_encode()], names=["x", "d"]
    )
    shared = Shared(batch)
    assert shared.codec.read(shared.located(0)) is None
    shared.fill(255)
    (column,) = shared.read(shared.located(1)).passthrough
    assert column.to_pylist() == ["a", "b"]


def test_a_batch_may_still_come_with_its_body() -> None:
    shared = Shared(numbers())
    header, body = shared.messages[-1]
    raw = data_head(header, b"mine", len(body)) + body
    assert shared.codec.is_quick(raw)
    assert values(shared.read(raw)) == np.arange(ROWS).tobytes()


def test_a_large_body_is_large_wherever_it_is() -> None:
    rows = WHOLE_BYTES // 8 + 1
    shared = Shared(numbers(rows))
    raw = shared.located()
    assert len(raw) < 1000
    assert not shared.codec.is_quick(raw)
    shared.read(raw)
    assert shared.codec.is_quick(raw)  # Known, and so not looked into.


def hostile(body: tuple[int, int]) -> tuple[Shared, bytes]:
    shared = Shared(numbers())
    shared.located()
    return shared, carrier(BodyLocation(shared.messages[-1][0], body))


@pytest.mark.parametrize(
    "body", [(-1, 800), (0, -1), (1 << 40, 800), (0, 1 << 40), (0, 1 << 62), (1 << 62, 1 << 62)]
)
def test_places_that_are_not_in_the_region(body: tuple[int, int]) -> None:
    shared, raw = hostile(body)
    with pytest.raises(MalformedInput, match="of a region of"):
        shared.codec.read(raw)


def test_a_place_that_is_too_short() -> None:
    shared, raw = hostile((0, 8 * ROWS - 1))
    with pytest.raises(MalformedInput):
        shared.codec.read(raw)


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"header": b"x"},
        {"header": b"x", "body": [1]},
        {"header": b"x", "body": ["a", "b"]},
        {"header": b"x", "body": [0, 1 << 63]},
        {"header": b"x", "body": [0, 1], "path": "/etc/passwd"},
    ],
)
def test_places_that_are_none(said: dict[str, object]) -> None:
    shared = Shared(numbers())
    raw = carrier(said)
    for look in (shared.codec.is_quick, shared.codec.read):
        with pytest.raises(IskanderError) as caught:
            look(raw)
            shared.codec.read(raw)
        assert isinstance(caught.value, MalformedInput)


def test_limits_hold_there_too() -> None:
    shared = Shared(numbers())
    for header_bytes, said in ((HEADER_BYTES_MAX + 1, "header"), (3 << 20, "body location")):
        with pytest.raises(LimitExceeded, match=said):
            shared.codec.read(carrier(BodyLocation(bytes(header_bytes), (0, 1))))


def test_dictionaries_are_bounded_before_they_are_read() -> None:
    words = pa.array([str(index) for index in range(100)]).dictionary_encode()
    batch = pa.record_batch([pa.array(range(100)), words], names=["x", "d"])
    shared = Shared(batch)
    header, body = shared.messages[0]
    shared.loan = ClientSegment("iskander-test", LIMITS.bytes + len(body) + 8)
    for _ in range(3):
        with pytest.raises(LimitExceeded):
            shared.codec.read(carrier(BodyLocation(header, (0, LIMITS.bytes + 1))))
    assert not shared.codec._converter.reader._parts


def test_a_region_that_is_gone() -> None:
    shared = Shared(numbers())
    raw = shared.located()
    shared.is_lent = False
    with pytest.raises(RegionNotFound):
        shared.codec.read(raw)


def test_a_message_with_nothing() -> None:
    with pytest.raises(MalformedInput, match="no record batch"):
        Shared(numbers()).codec.read(b"")
