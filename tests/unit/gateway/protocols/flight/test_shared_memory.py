"""Batches with bodies in shared memory that the client can change at any time."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest
from support.codecs import is_quick, read_message, work_bytes

from iskander.config.schema import HEADER_BYTES_MAX, LimitsConfig
from iskander.contract.column_types import parse_column_type
from iskander.contract.tensors import Contract, TensorSpec
from iskander.errors import IskanderError, LimitExceeded, MalformedInput, RegionNotFound
from iskander.foundation.varint import encode_varint
from iskander.gateway.protocols.flight.codec import ParsedBatch
from iskander.gateway.protocols.flight.data import data_head
from iskander.gateway.protocols.flight.plan import Plan
from iskander.gateway.protocols.flight.shared_memory import SharedCodec
from iskander.interprocess.control.shared_regions import BodyLocation, encode
from iskander.interprocess.memory.chunked_copy import WHOLE_BYTES
from iskander.interprocess.memory.client_segment import ClientSegment, SegmentRange

LIMITS = LimitsConfig()
ROWS = 100


def spec(name: str, type_text: str) -> TensorSpec:
    column_type = parse_column_type(type_text)
    return TensorSpec(name, name, column_type, column_type.shape)


@pytest.fixture(autouse=True)
def collect_garbage() -> Iterator[None]:
    """The codec and its `SharedStream` reference each other."""
    yield
    gc.collect()


class SharedStream:
    """A stream's codec and its shared-memory region."""

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
        self.region = ClientSegment(
            "iskander-test", 256 + sum(len(body) + 64 for _, body in self.messages)
        )
        self.is_open = True
        self.codec = SharedCodec(Plan(schema[0], contract, LIMITS), LIMITS, self.find)

    def find(self) -> ClientSegment:
        if not self.is_open:
            raise RegionNotFound("closed")
        return self.region

    def fill(self, value: int) -> None:
        """Overwrite the region, as a client can at any time."""
        os.pwrite(self.region.fd, bytes([value]) * len(self.region), 0)

    def locate(self, number: int = -1, offset: int = 72) -> bytes:
        """Write a batch into the region and return the message with its location."""
        header, body = self.messages[number]
        os.pwrite(self.region.fd, body, offset)
        return location_message(BodyLocation(header, (offset, len(body)), b"mine"))

    def read(self, raw: bytes) -> ParsedBatch:
        parsed = read_message(self.codec, raw)
        assert parsed is not None
        return parsed


def location_message(location: object) -> bytes:
    """FlightData with only `app_metadata`."""
    encoded = encode(location)
    return b"\x1a" + encode_varint(len(encoded)) + encoded


def values(parsed: ParsedBatch, number: int = 0) -> bytes:
    if parsed.portions:
        return bytes(parsed.portions[0].tensors[number])
    start, stop = parsed.tensors[number]
    part = parsed.body[start:stop]
    return bytes(part.read() if isinstance(part, SegmentRange) else part)


def numbers(rows: int = ROWS) -> pa.RecordBatch:
    return pa.record_batch([pa.array(range(rows))], names=["x"])


def test_fixed_width_tensors_are_read_in_place() -> None:
    stream = SharedStream(numbers())
    for _ in range(2):  # The second pass uses the cached header.
        raw = stream.locate()
        assert is_quick(stream.codec, raw)
        parsed = stream.read(raw)
        assert parsed.rows == ROWS
        assert parsed.app_metadata == b"mine"
        assert values(parsed) == np.arange(ROWS).tobytes()
        assert isinstance(parsed.body, SegmentRange)
        stream.fill(0)
        assert values(parsed) == bytes(8 * ROWS)


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
    ids=[
        "string input",
        "string passthrough",
        "compressed",
        "V4 metadata",
        "list passthrough",
        "nullable passthrough",
    ],
)
def test_validated_and_passed_through_data_is_copied_first(
    batch: pa.RecordBatch, inputs: tuple[TensorSpec, ...], options: dict[str, object]
) -> None:
    stream = SharedStream(batch, *inputs, **options)
    parsed = stream.read(stream.locate())
    assert isinstance(parsed.body, memoryview)
    before = values(parsed)
    kept = [column.to_pylist() for column in parsed.passthrough]
    stream.fill(255)
    assert values(parsed) == before
    assert [column.to_pylist() for column in parsed.passthrough] == kept


def test_waiting_response_does_not_keep_the_region() -> None:
    stream = SharedStream(numbers())
    waiting = stream.read(stream.locate()).without_inputs()
    assert waiting.rows == ROWS
    path = f"/proc/self/fd/{stream.region.fd}"
    stream.region = ClientSegment("iskander-test", 8)
    assert not os.path.lexists(path)


def test_dictionaries_are_copied() -> None:
    batch = pa.record_batch(
        [pa.array([1, 2]), pa.array(["a", "b"]).dictionary_encode()], names=["x", "d"]
    )
    stream = SharedStream(batch)
    assert read_message(stream.codec, stream.locate(0)) is None
    stream.fill(255)
    (column,) = stream.read(stream.locate(1)).passthrough
    assert column.to_pylist() == ["a", "b"]


def test_batch_with_an_inline_body_is_read() -> None:
    stream = SharedStream(numbers())
    header, body = stream.messages[-1]
    raw = data_head(header, b"mine", len(body)) + body
    assert is_quick(stream.codec, raw)
    assert values(stream.read(raw)) == np.arange(ROWS).tobytes()


def test_large_body_in_a_region_is_not_quick() -> None:
    rows = WHOLE_BYTES // 8 + 1
    stream = SharedStream(numbers(rows))
    raw = stream.locate()
    assert len(raw) < 1000
    assert not is_quick(stream.codec, raw)
    stream.read(raw)
    assert is_quick(stream.codec, raw)  # Its header is cached.


def test_memory_to_read_a_body_in_the_region_is_counted() -> None:
    """That of the same message with its body, and a private copy of the body."""
    columns, options = {"x": pa.array(np.zeros(1 << 17, np.int64))}, {"compression": "zstd"}
    stream = SharedStream(pa.record_batch(columns), **options)
    for number in range(len(stream.messages) - 1):
        assert read_message(stream.codec, stream.locate(number)) is None
    header, body = stream.messages[-1]
    counted = work_bytes(stream.codec, data_head(header, b"", len(body)) + body)
    assert counted >= 2 << 20
    assert work_bytes(stream.codec, stream.locate()) == counted + len(body)


def invalid_location(body: tuple[int, int]) -> tuple[SharedStream, bytes]:
    stream = SharedStream(numbers())
    stream.locate()
    return stream, location_message(BodyLocation(stream.messages[-1][0], body))


@pytest.mark.parametrize(
    "body", [(-1, 800), (0, -1), (1 << 40, 800), (0, 1 << 40), (0, 1 << 62), (1 << 62, 1 << 62)]
)
def test_body_outside_the_region_is_rejected(body: tuple[int, int]) -> None:
    stream, raw = invalid_location(body)
    with pytest.raises(MalformedInput, match="of a region of"):
        read_message(stream.codec, raw)


def test_body_range_that_is_too_short_is_rejected() -> None:
    stream, raw = invalid_location((0, 8 * ROWS - 1))
    with pytest.raises(MalformedInput):
        read_message(stream.codec, raw)


@pytest.mark.parametrize(
    "location",
    [
        {},
        {"header": b"x"},
        {"header": b"x", "body": [1]},
        {"header": b"x", "body": ["a", "b"]},
        {"header": b"x", "body": [0, 1 << 63]},
        {"header": b"x", "body": [0, 1], "path": "/etc/passwd"},
    ],
)
def test_invalid_body_locations_are_rejected(location: dict[str, object]) -> None:
    stream = SharedStream(numbers())
    raw = location_message(location)
    with pytest.raises(IskanderError) as caught:
        read_message(stream.codec, raw)
    assert isinstance(caught.value, MalformedInput)


def test_dictionary_outside_the_region_is_known_as_one() -> None:
    """The batches after it depend on it, so that its error ends a stream."""
    columns = [pa.array([1, 2]), pa.array(["a", "b"]).dictionary_encode()]
    stream = SharedStream(pa.record_batch(columns, names=["x", "d"]))
    (header, _), *_ = stream.messages
    message = stream.codec.locate(location_message(BodyLocation(bytes(header), (0, 1 << 40))))
    with pytest.raises(MalformedInput, match="of a region of"):
        stream.codec.decode(message)
    assert message.is_dictionary


def test_header_and_location_limits_apply() -> None:
    stream = SharedStream(numbers())
    for header_bytes, message in ((HEADER_BYTES_MAX + 1, "header"), (3 << 20, "body location")):
        with pytest.raises(LimitExceeded, match=message):
            read_message(stream.codec, location_message(BodyLocation(bytes(header_bytes), (0, 1))))


def test_large_dictionary_is_rejected_before_it_is_read() -> None:
    words = pa.array([str(index) for index in range(100)]).dictionary_encode()
    batch = pa.record_batch([pa.array(range(100)), words], names=["x", "d"])
    stream = SharedStream(batch)
    header, body = stream.messages[0]
    stream.region = ClientSegment("iskander-test", LIMITS.bytes + len(body) + 8)
    for _ in range(3):
        with pytest.raises(LimitExceeded):
            read_message(
                stream.codec, location_message(BodyLocation(header, (0, LIMITS.bytes + 1)))
            )
    assert not stream.codec._converter.reader._parts


def test_closed_region_is_rejected() -> None:
    stream = SharedStream(numbers())
    raw = stream.locate()
    stream.is_open = False
    with pytest.raises(RegionNotFound):
        read_message(stream.codec, raw)


def test_empty_message_is_rejected() -> None:
    with pytest.raises(MalformedInput, match="no record batch"):
        read_message(SharedStream(numbers()).codec, b"")
