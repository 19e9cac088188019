"""Inferential's observations, with protobuf and byte slices as the references.

Layout of an input: length of the envelope (2 bytes), envelope, payload.
"""

from __future__ import annotations

import math
from random import Random
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from fuzz import mutation
from iskander._generated import inferential_wire_pb2 as wire
from iskander.config.schema import LimitsConfig
from iskander.contract.column_types import ColumnType
from iskander.contract.tensors import Contract, TensorSpec
from iskander.errors import ContractError, IskanderError, MalformedInput, Unsupported
from iskander.gateway.protocols import tensors as offered
from iskander.gateway.protocols.inferential.terms import read_terms
from iskander.gateway.protocols.inferential.wire import (
    Observation,
    ReplyAddress,
    read_observation,
    read_tensors,
    render_error,
)

ITERATIONS = 2500
WALL_NS = 1_700_000_000_000_000_000
LIMITS = LimitsConfig(rows=1000, bytes=1 << 20)
NUMBERS = tuple(range(1, 12))
SIZES = {1: 2, 2: 4, 3: 8, 4: 2, 5: 1, 6: 4, 7: 8, 8: 1}
CONTRACT = Contract(
    (
        TensorSpec("joint_positions", "joints", ColumnType("float32", (3,)), (3,)),
        TensorSpec("flags", "flags", ColumnType("bool", (2,)), (2,)),
    ),
    (TensorSpec("actions", "moves", ColumnType("float32", (3,)), (3,)),),
)


def seeds() -> list[bytes]:
    tensors = [
        {"key": "joints", "dtype": wire.FLOAT32, "shape": [3], "byte_length": 12},
        {"key": "flags", "dtype": wire.BOOL, "shape": [2], "byte_offset": 12, "byte_length": 2},
    ]
    for tensor in tensors:
        tensor["encoding"] = wire.RAW
    full = wire.Observation(
        client={"id": "robot-7"},
        timestamp_ns=WALL_NS,
        urgency=0.5,
        steps_remaining=3,
        priority=1,
        model_id="policy",
        tensors=tensors,
        metadata={"deadline_ms": "30", "newest_wins": "true", "other": "x"},
    )
    bare = wire.Observation(client={"id": "a"}, model_id="m")
    return [
        join(full.SerializeToString(), np.arange(3, dtype=np.float32).tobytes() + b"\1\0"),
        join(bare.SerializeToString(), b""),
    ]


def mutate(raw: bytes, other: bytes, random: Random) -> bytes:
    envelope, payload = split(raw)
    if not random.randrange(6):
        return join(envelope, mutation.flip(payload, other, random))
    return join(mutation.protobuf(envelope, split(other)[0], random, NUMBERS), payload)


def run(raw: bytes) -> None:
    envelope, payload = split(raw)
    try:
        expected = wire.Observation.FromString(envelope)
    except DecodeError:
        expected = None
    try:
        observation = read_observation([b"", envelope, payload])
    except MalformedInput:
        assert expected is None or not (expected.client.id and expected.model_id)
        return
    assert expected is not None and bytes(observation.payload) == payload
    check_terms(expected)
    check_tensors(expected, observation, payload)


def check_terms(expected: Any) -> None:
    try:
        terms = read_terms(expected, "me", newest_wins=False, wall_ns=WALL_NS)
    except MalformedInput:
        assert {"deadline_ms", "ttl_ms", "newest_wins"} & set(expected.metadata)
        return
    assert 0 <= terms.priority <= 9 and 0.0 <= terms.urgency <= 1.0
    assert math.isfinite(terms.age_ms) and terms.age_ms >= 0
    for name, actual in (("deadline_ms", terms.budget_ms), ("ttl_ms", terms.ttl_ms)):
        assert (actual is None) == (
            name not in expected.metadata or expected.metadata[name] == "null"
        )
        assert actual is None or 0 <= actual <= 86_400_000


def check_tensors(expected: Any, observation: Observation, payload: bytes) -> None:
    try:
        request = read_tensors(CONTRACT, observation)
    except IskanderError as error:
        assert is_expected_error(error, expected, payload), str(error)
        render_error(ReplyAddress("me", "model", "1"), error, WALL_NS)
        return
    assert len(request.tensors) == len(expected.tensors)
    for actual, tensor in zip(request.tensors, expected.tensors, strict=True):
        begin = tensor.byte_offset
        assert bytes(actual.data) == payload[begin : begin + tensor.byte_length]
        assert len(actual.data) == tensor.byte_length
        assert actual.shape in (tuple(tensor.shape), (1, *tensor.shape))
    try:
        request_inputs = offered.read_inputs(CONTRACT, request.tensors, LIMITS)
    except IskanderError:
        return
    assert (
        sum(map(len, request_inputs.tensors))
        == request_inputs.rows * 12 + (request_inputs.rows * 2 + 7) // 8
    )


def is_expected_error(error: IskanderError, expected: Any, payload: bytes) -> bool:
    tensors = expected.tensors
    if isinstance(error, Unsupported):
        return any(tensor.encoding not in (0, wire.RAW) for tensor in tensors)
    if isinstance(error, ContractError):
        return len(tensors) > 18 or any(tensor.dtype not in SIZES for tensor in tensors)
    return any(tensor.byte_offset + tensor.byte_length > len(payload) for tensor in tensors)


def join(envelope: bytes, payload: bytes) -> bytes:
    return (len(envelope) & 0xFFFF).to_bytes(2) + envelope + payload


def split(raw: bytes) -> tuple[bytes, bytes]:
    end = 2 + int.from_bytes(raw[:2])
    return raw[2:end], raw[end:]
