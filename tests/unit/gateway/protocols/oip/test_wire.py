"""Scanning of OIP requests without a copy, and assembly of responses from parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from iskander._generated import oip_pb2
from iskander.config.schema import LimitsConfig
from iskander.errors import LimitExceeded, MalformedInput
from iskander.foundation.varint import encode_varint
from iskander.gateway.protocols.oip.wire import (
    HEAD_BYTES_MAX,
    Scanned,
    in_stream,
    raw_head,
    scan,
    with_id,
)
from iskander.gateway.transport.http2.call import Message

REQUEST = oip_pb2.ModelInferRequest(
    model_name="model",
    model_version="3",
    id="request 7",
    inputs=[{"name": "x", "datatype": "FP32", "shape": [2, 300]}, {"name": "flag"}],
    outputs=[{"name": "y"}],
    raw_input_contents=[bytes(range(256)) * 10, b""],
)
REQUEST.parameters["timeout"].int64_param = -1
RAW = REQUEST.SerializeToString()

COLUMNS, ROWS = 8, 100


def scanned_of(message: Message) -> Scanned:
    return scan(message, LimitsConfig(columns=COLUMNS, rows=ROWS))


texts = st.text(max_size=300)
requests = st.builds(
    oip_pb2.ModelInferRequest,
    model_name=texts,
    id=texts,
    inputs=st.lists(st.builds(oip_pb2.ModelInferRequest.InferInputTensor, name=texts), max_size=3),
    raw_input_contents=st.lists(st.binary(max_size=300), max_size=4),
)


@given(requests)
def test_scan_splits_a_request_into_head_and_tensors(request: oip_pb2.ModelInferRequest) -> None:
    scanned = scanned_of(request.SerializeToString())

    assert [bytes(each) for each in scanned.raw] == list(request.raw_input_contents)
    assert scanned.id.decode() == request.id
    head = oip_pb2.ModelInferRequest.FromString(scanned.head)
    del request.raw_input_contents[:]
    request.id = ""
    assert head == request


def test_raw_tensors_are_views_of_the_message() -> None:
    message = np.frombuffer(bytearray(RAW), np.uint8)
    (first, _) = scanned_of(message.data).raw
    at = RAW.index(bytes(range(256)))
    message[at] = 99
    assert first[0] == 99 and len(first) == 2560


def test_fields_are_accepted_in_any_order_and_the_last_id_is_used() -> None:
    pieces = [
        oip_pb2.ModelInferRequest(raw_input_contents=[b"one"]),
        oip_pb2.ModelInferRequest(id="old"),
        oip_pb2.ModelInferRequest(model_name="model"),
        oip_pb2.ModelInferRequest(raw_input_contents=[b"two"], id="new"),
        oip_pb2.ModelInferRequest(model_version="2"),
    ]
    scanned = scanned_of(b"".join(piece.SerializeToString() for piece in pieces))
    assert [bytes(each) for each in scanned.raw] == [b"one", b"two"]
    assert scanned.id == b"new"
    head = oip_pb2.ModelInferRequest.FromString(scanned.head)
    assert (head.model_name, head.model_version) == ("model", "2")


def test_unknown_fields_stay_in_the_head() -> None:
    """A varint, a fixed32 and a fixed64 with unknown field numbers."""
    unknown = b"\x98\x06\x05" + b"\xa5\x06abcd" + b"\xa9\x06abcdefgh"
    scanned = scanned_of(unknown + RAW)
    assert scanned.head.startswith(unknown) and len(scanned.raw) == 2


def test_requests_with_other_tensors_have_equal_heads() -> None:
    other = oip_pb2.ModelInferRequest.FromString(RAW)
    other.id = "request 8"
    other.raw_input_contents[0] = b"others"
    assert scanned_of(other.SerializeToString()).head == scanned_of(RAW).head


def test_request_with_the_maximum_of_columns_is_accepted() -> None:
    whole = oip_pb2.ModelInferRequest(
        model_name="m",
        model_version="1",
        id="i",
        inputs=[{"name": "x"}] * COLUMNS,
        outputs=[{"name": "y"}] * COLUMNS,
        parameters={f"p{number}": {"bool_param": True} for number in range(COLUMNS)},
        raw_input_contents=[b"z"] * COLUMNS,
    )
    assert len(scanned_of(whole.SerializeToString()).raw) == COLUMNS


@pytest.mark.parametrize(
    "field",
    [b"\x3a\x00", b"\x1a\x00", b"\x2a\x00", b"\x32\x00", b"\x22\x00", b"\x98\x06\x05"],
    ids=["raw", "id", "input", "output", "parameter", "unknown"],
)
def test_too_many_fields_are_rejected_before_they_are_read(field: bytes) -> None:
    with pytest.raises(LimitExceeded, match=r"request has over \d+ fields"):
        scanned_of(field * 50 + b"\x0b")  # The invalid end is not read.


INPUT = oip_pb2.ModelInferRequest.InferInputTensor
PARAMETERS = {f"p{number}": {"string_param": "v" * 1000} for number in range(1100)}
LARGE_HEADS: dict[str, dict[str, Any]] = {
    "name": {"model_name": "m" * (HEAD_BYTES_MAX + 1)},
    "shape": {"inputs": [{"shape": [1 << 62] * 120_000}]},
    "input parameters": {"inputs": [{"parameters": PARAMETERS}]},
    "name with contents": {
        "inputs": [{"contents": {"int_contents": [1] * 9}, "name": "x" * HEAD_BYTES_MAX}]
    },
    "typed and raw contents": {
        "inputs": [{"contents": {"bytes_contents": [b"s" * HEAD_BYTES_MAX]}}],
        "raw_input_contents": [b"raw"],
    },
    "empty contents": {
        "inputs": [{"contents": {"bytes_contents": [b""]}, "shape": [1 << 62] * 120_000}]
    },
}


@pytest.mark.parametrize("case", LARGE_HEADS)
def test_head_without_typed_contents_is_limited(case: str) -> None:
    raw = oip_pb2.ModelInferRequest(**LARGE_HEADS[case]).SerializeToString()
    with pytest.raises(LimitExceeded):
        scanned_of(raw)


TYPED = {"int64_contents": [1, -1, 1 << 40], "bytes_contents": [b"s" * 300]}


@given(
    st.lists(
        st.builds(INPUT, name=texts, contents=st.none() | st.just(TYPED), shape=st.just([3, 1])),
        max_size=3,
    ),
    texts,
)
def test_typed_contents_are_removed_from_the_head(inputs: list[Any], request_id: str) -> None:
    request = oip_pb2.ModelInferRequest(model_name="m", id=request_id, inputs=inputs)
    scanned = scanned_of(request.SerializeToString())

    actual = [contents_of(scanned.typed[number]) for number in sorted(scanned.typed)]
    assert actual == [each.contents for each in inputs if each.HasField("contents")]
    assert all(inputs[number].HasField("contents") for number in scanned.typed)
    for each in inputs:
        each.ClearField("contents")
    bare = oip_pb2.ModelInferRequest(model_name="m", inputs=inputs)
    assert oip_pb2.ModelInferRequest.FromString(scanned.head) == bare


def contents_of(raw: memoryview) -> oip_pb2.InferTensorContents:
    return oip_pb2.InferTensorContents.FromString(bytes(raw))


def test_typed_contents_are_views_of_the_message() -> None:
    contents = {"fp32_contents": [1.5] * 9}
    request = oip_pb2.ModelInferRequest(id="i", inputs=[{"name": "x", "contents": contents}] * 2)
    message = np.frombuffer(bytearray(request.SerializeToString()), np.uint8)
    typed = scanned_of(message.data).typed
    message[:] = 99
    assert [set(each) for each in typed.values()] == [{99}, {99}]


def test_duplicate_contents_are_rejected() -> None:
    inner = INPUT(name="x", contents=TYPED).SerializeToString() * 2
    with pytest.raises(MalformedInput, match="its contents twice"):
        scanned_of(b"\x2a" + encode_varint(len(inner)) + inner)


def test_fields_around_typed_contents_stay_in_the_head() -> None:
    pieces = [INPUT(name="x"), INPUT(contents=TYPED), INPUT(shape=[7])]
    inner = b"".join(piece.SerializeToString() for piece in pieces)
    scanned = scanned_of(b"\x2a" + encode_varint(len(inner)) + inner)
    assert contents_of(scanned.typed[0]) == oip_pb2.InferTensorContents(**TYPED)
    (bare,) = oip_pb2.ModelInferRequest.FromString(scanned.head).inputs
    assert bare == INPUT(name="x", shape=[7])


def test_typed_contents_are_accepted_before_and_after_the_id() -> None:
    request = oip_pb2.ModelInferRequest(id="i", inputs=[{"name": "x", "contents": TYPED}])
    raw = request.SerializeToString()
    scanned = scanned_of(raw * 2)
    assert scanned.id == b"i" and len(scanned.typed) == 2
    assert scanned.head == oip_pb2.ModelInferRequest(inputs=[{"name": "x"}] * 2).SerializeToString()


def test_requests_with_other_typed_contents_have_equal_heads() -> None:
    heads = {
        scanned_of(
            oip_pb2.ModelInferRequest(
                inputs=[{"name": "x", "contents": {"int64_contents": [1 << 30] * count}}]
            ).SerializeToString()
        ).head
        for count in (0, 1, 7, 1000)
    }
    assert len(heads) == 1


def test_typed_contents_stay_in_the_head_together_with_raw_contents() -> None:
    request = oip_pb2.ModelInferRequest(
        inputs=[{"name": "x", "contents": TYPED}], raw_input_contents=[b"raw"]
    )
    scanned = scanned_of(request.SerializeToString())
    assert not scanned.typed
    assert oip_pb2.ModelInferRequest.FromString(scanned.head).inputs == request.inputs


def test_typed_contents_can_be_large() -> None:
    contents = {"bytes_contents": [b"s" * (HEAD_BYTES_MAX + 1)]}
    request = oip_pb2.ModelInferRequest(
        model_name="m", inputs=[{"name": "x", "contents": contents}] * 2
    )
    scanned = scanned_of(request.SerializeToString())
    assert len(scanned.head) < 20
    assert [len(each) for each in scanned.typed.values()] == [HEAD_BYTES_MAX + 5] * 2


@pytest.mark.parametrize("contents", [b"", b"\x2a\x00"])
def test_too_many_input_fields_are_rejected(contents: bytes) -> None:
    inner = contents + b"\x08\x00" * 1000
    with pytest.raises(LimitExceeded, match=r"inputs have over \d+ fields"):
        scanned_of(b"\x2a" + encode_varint(len(inner)) + inner)


@pytest.mark.parametrize("end", [b"\x2a\x85", b"\x2b", b"\x2a\x02\x0b", b"\x2a\x02\x2a\x01"])
def test_malformed_inputs_are_rejected(end: bytes) -> None:
    with pytest.raises(MalformedInput):
        scanned_of(b"\x2a\x02\x2a\x00" + end)


def is_accepted(raw: bytes) -> bool:
    """Returns whether a message is accepted; if so, it equals the request that protobuf reads."""
    try:
        scanned = scanned_of(raw)
        head = oip_pb2.ModelInferRequest.FromString(scanned.head)
        for number, contents in scanned.typed.items():
            head.inputs[number].contents.MergeFromString(bytes(contents))
    except (MalformedInput, LimitExceeded, DecodeError):
        return False
    head.id = scanned.id.decode()
    head.raw_input_contents.extend(map(bytes, scanned.raw))
    assert head == oip_pb2.ModelInferRequest.FromString(raw)
    return True


def is_request(raw: bytes) -> bool:
    try:
        oip_pb2.ModelInferRequest.FromString(raw)
    except DecodeError:
        return False
    return True


def test_truncated_request_is_accepted_only_if_it_is_valid() -> None:
    accepted = [length for length in range(len(RAW)) if is_accepted(RAW[:length])]
    assert accepted == [length for length in range(len(RAW)) if is_request(RAW[:length])]
    assert 0 < len(accepted) < 10


@given(st.binary(max_size=200))
@example(b"\x0b\x0c")
@example(b"\x3a" + b"\xff" * 9 + b"\x01")
@example(b"\x08" + b"\xff" * 10)
@example(b"\x1a\x02\xff\xfe")
@example(b"\x1a\x01\xff\x1a\x017")
@example(b"\x38\x05")
@example(b"\x02\x00")
@example(b"\x2a\x04\x2a\x02\x10\x05")
@example(b"\x2a\x04\x2a\x02\x12\x05")
@example(b"\x2a\x03\xaa\x00\x00")
@example(b"\x2a\x02\x28\x05")
@example(b"\x00\x00")
@example(b"\xaa\x80\x80\x80\x80\x00\x04\x2a\x02\x10\x05")
@example(b"\x82\x80\x80\x80\x10\x00")
def test_any_bytes_are_read_as_by_protobuf_or_rejected(raw: bytes) -> None:
    is_accepted(raw)


@given(texts, st.lists(st.binary(max_size=300), max_size=4))
def test_response_is_assembled(request_id: str, tensors: list[bytes]) -> None:
    head = oip_pb2.ModelInferResponse(model_name="m", outputs=[{"name": "y", "shape": [3]}])
    parts: list[Message] = [with_id(head.SerializeToString(), request_id.encode())]
    for tensor in tensors:
        parts += (raw_head(len(tensor)), tensor)

    whole = oip_pb2.ModelInferResponse.FromString(b"".join(parts))
    streamed = oip_pb2.ModelStreamInferResponse.FromString(b"".join(in_stream(parts)))

    head.id = request_id
    head.raw_output_contents.extend(tensors)
    assert whole == streamed.infer_response == head


@given(st.integers(0, (1 << 63) - 1))
def test_varints_equal_those_of_protobuf(value: int) -> None:
    message = oip_pb2.StatisticDuration(ns=value).SerializeToString()
    assert message == (b"\x10" + encode_varint(value) if value else b"")
