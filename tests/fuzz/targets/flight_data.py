"""FlightData messages, with the protobuf runtime as the reference.

Deliberately stricter than the runtime: groups, which proto3 does not have, are rejected.
"""

from __future__ import annotations

from random import Random

from google.protobuf.message import DecodeError

from fuzz import mutation
from iskander._generated import flight_pb2
from iskander.errors import MalformedInput
from iskander.gateway.protocols.flight.data import data_head, read_flight_data

ITERATIONS = 4000
NUMBERS = (1, 2, 3, 1000)


def seeds() -> list[bytes]:
    messages = [
        flight_pb2.FlightData(),
        flight_pb2.FlightData(data_header=b"header", data_body=b"body" * 20),
        flight_pb2.FlightData(
            flight_descriptor={"type": 1, "path": ["model", "2"]},
            data_header=b"h" * 130,
            app_metadata=b'{"iskander": {"deadline_ms": 5}}',
            data_body=bytes(64),
        ),
        flight_pb2.FlightData(flight_descriptor={"type": 2, "cmd": b"model"}, data_body=b"x"),
    ]
    return [
        *(each.SerializeToString() for each in messages),
        data_head(b"head", b"meta", 3) + b"abc",
    ]


def mutate(raw: bytes, other: bytes, random: Random) -> bytes:
    return mutation.protobuf(raw, other, random, NUMBERS)


def run(raw: bytes) -> None:
    try:
        expected = flight_pb2.FlightData.FromString(raw)
    except DecodeError:
        expected = None
    try:
        actual = read_flight_data(raw)
    except MalformedInput:
        assert expected is None or has_group(raw), "rejected, but protobuf accepts it"
        return
    descriptors = descriptors_of(raw)
    if expected is None:
        assert any(not is_descriptor(each) for each in descriptors), "protobuf rejects it"
        return
    assert bytes(actual.header) == expected.data_header
    assert bytes(actual.body) == expected.data_body
    assert actual.app_metadata == expected.app_metadata
    if actual.head_bytes:
        assert raw[actual.head_bytes :] == expected.data_body
    if len(descriptors) == 1:
        assert actual.descriptor is not None and bytes(actual.descriptor) == descriptors[0]
    assert (actual.descriptor is None) == (not descriptors)


def has_group(raw: bytes) -> bool:
    """Whether a field begins or ends a group."""
    return mutation.split_fields(raw) is None


def descriptors_of(raw: bytes) -> list[bytes]:
    fields = mutation.split_fields(raw) or []
    return [field.value for field in fields if field.number == 1 and field.kind == 2]


def is_descriptor(raw: bytes) -> bool:
    try:
        flight_pb2.FlightDescriptor.FromString(raw)
    except DecodeError:
        return False
    return True
