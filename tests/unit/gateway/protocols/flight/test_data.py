"""FlightData messages, compared with a protobuf runtime, and malformed bytes."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.random_examples import up_to

from iskander.errors import MalformedInput
from iskander.gateway.protocols.flight.data import data_head, read_flight_data, schema_frame


def flight_data_message() -> Any:
    """Returns a protobuf message class with the fields of FlightData."""
    file = descriptor_pb2.FileDescriptorProto(name="reference.proto", syntax="proto3")
    message = file.message_type.add(name="FlightData")
    fields = {"descriptor": 1, "data_header": 2, "app_metadata": 3, "data_body": 1000}
    for name, number in fields.items():
        field = message.field.add(name=name, number=number)
        field.type, field.label = field.TYPE_BYTES, field.LABEL_OPTIONAL
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("FlightData"))


FlightData = flight_data_message()
# Lengths around the bounds of the one-byte and two-byte varints.
BYTES = st.binary(max_size=300) | st.sampled_from([0, 1, 127, 128, 16383, 16384]).map(bytes)


@settings(deadline=None)
@given(descriptor=st.none() | BYTES, header=BYTES, app_metadata=BYTES, body=BYTES)
def test_protobuf_messages_are_read(
    descriptor: bytes | None, header: bytes, app_metadata: bytes, body: bytes
) -> None:
    message = FlightData(data_header=header, app_metadata=app_metadata, data_body=body)
    if descriptor:
        message.descriptor = descriptor

    data = read_flight_data(message.SerializeToString())

    assert data[:4] == (descriptor or None, header, app_metadata, body)


@settings(deadline=None)
@given(header=BYTES, app_metadata=BYTES, parts=st.lists(BYTES, max_size=4))
def test_written_messages_are_read_by_protobuf(
    header: bytes, app_metadata: bytes, parts: list[bytes]
) -> None:
    """The body has parts: results and passed-through columns are in separate buffers."""
    views = [memoryview(part) for part in parts]

    raw = b"".join((data_head(header, app_metadata, sum(map(len, parts))), *views))

    message = FlightData.FromString(raw)
    assert message.data_header == header
    assert message.app_metadata == app_metadata
    assert message.data_body == b"".join(parts)
    assert read_flight_data(raw)[:4] == (None, header, app_metadata, b"".join(parts))


@given(BYTES)
def test_schema_message_is_read_by_protobuf(header: bytes) -> None:
    message = FlightData.FromString(schema_frame(header))

    assert (message.data_header, message.data_body) == (header, b"")


def test_header_and_body_are_views() -> None:
    raw = data_head(b"head", b"", 4) + b"body"

    data = read_flight_data(raw)

    assert data.header.obj is data.body.obj is raw


UNKNOWN = {
    "varint": bytes([4 << 3 | 0, 0x80, 0x01]),
    "fixed64": bytes([4 << 3 | 1]) + bytes(8),
    "bytes": bytes([4 << 3 | 2, 2, 7, 7]),
    "fixed32": bytes([4 << 3 | 5]) + bytes(4),
    "a large number": b"\xfa\xff\xff\xff\x0f\x01x",
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_fields_are_ignored(name: str) -> None:
    """Before, between and after the known fields; a newer client can send them."""
    unknown = UNKNOWN[name]
    raw = unknown + schema_frame(b"head") + unknown + b"\xc2\x3e\x04body" + unknown
    assert FlightData.FromString(raw).data_body == b"body"

    data = read_flight_data(raw)

    assert (bytes(data.header), bytes(data.body)) == (b"head", b"body")


def test_last_occurrence_of_a_field_is_used() -> None:
    raw = schema_frame(b"first") + schema_frame(b"second")

    assert read_flight_data(raw).header == FlightData.FromString(raw).data_header == b"second"


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"\x12\x05head", id="a length beyond the end"),
        pytest.param(b"\x12", id="a tag without a value"),
        pytest.param(b"\x12\x80", id="a truncated length"),
        pytest.param(b"\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", id="a length of 2^64"),
        pytest.param(b"\x80" * 11 + b"\x01", id="an unterminated tag"),
        pytest.param(b"\x02\x00", id="field 0"),
        pytest.param(b"\x92\x80\x80\x80\x80\x00\x04head", id="a tag of six bytes"),
        pytest.param(b"\x92\x80\x80\x80\x10\x04head", id="a tag beyond 32 bits"),
        pytest.param(b"\x13", id="a group"),
        pytest.param(b"\x14", id="the end of a group"),
        pytest.param(b"\x16", id="wire type 6"),
        pytest.param(b"\x17", id="wire type 7"),
        pytest.param(b"\x21" + bytes(7), id="a truncated fixed64"),
        pytest.param(b"\x25" + bytes(3), id="a truncated fixed32"),
    ],
)
def test_invalid_messages_are_rejected(raw: bytes) -> None:
    with pytest.raises(MalformedInput, match="not a FlightData message"):
        read_flight_data(raw)


MESSAGE = data_head(b"h" * 200, b"meta", 300) + b"b" * 300


def test_truncated_message_is_rejected_or_ends_at_a_field() -> None:
    whole = read_flight_data(MESSAGE)

    for length in range(len(MESSAGE)):
        with contextlib.suppress(MalformedInput):
            cut = read_flight_data(MESSAGE[:length])
            assert bytes(cut.header) in (b"", bytes(whole.header))
            assert bytes(cut.body) in (b"", bytes(whole.body))


@settings(deadline=None, max_examples=up_to(500))
@example(b"")
@given(st.binary(max_size=200))
def test_random_bytes_raise_only_malformed_input(raw: bytes) -> None:
    with contextlib.suppress(MalformedInput):
        data = read_flight_data(raw)
        assert len(data.header) + len(data.body) + len(data.app_metadata) <= len(raw)


@settings(deadline=None, max_examples=up_to(300))
@given(st.lists(st.tuples(st.integers(0, len(MESSAGE) - 1), st.integers(0, 255)), max_size=4))
def test_mutated_messages_are_malformed_or_read(changes: list[tuple[int, int]]) -> None:
    raw = bytearray(MESSAGE)
    for index, value in changes:
        raw[index] = value

    with contextlib.suppress(MalformedInput):
        read_flight_data(bytes(raw))
