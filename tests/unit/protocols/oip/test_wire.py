"""Requests taken apart without a copy, responses put together from parts; anything else refused."""

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
from iskander.protocols.oip.wire import HEAD_BYTES_MAX, Scanned, in_stream, raw_head, scan, with_id
from iskander.transport.http2.call import Message
from iskander.varint import encode_varint

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
def test_a_request_is_its_parts(request: oip_pb2.ModelInferRequest) -> None:
    scanned = scanned_of(request.SerializeToString())

    assert [bytes(each) for each in scanned.raw] == list(request.raw_input_contents)
    assert scanned.id.decode() == request.id
    head = oip_pb2.ModelInferRequest.FromString(scanned.head)
    del request.raw_input_contents[:]
    request.id = ""
    assert head == request


def test_tensors_are_where_they_came() -> None:
    """No copy: what changes in the message changes in them."""
    message = np.frombuffer(bytearray(RAW), np.uint8)
    (first, _) = scanned_of(message.data).raw
    at = RAW.index(bytes(range(256)))
    message[at] = 99
    assert first[0] == 99 and len(first) == 2560


def test_fields_come_in_any_order_and_the_last_id_counts() -> None:
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


def test_fields_that_are_not_known_are_left_where_they_are() -> None:
    """A number, four bytes and eight bytes under numbers that the protocol has not."""
    more = b"\x98\x06\x05" + b"\xa5\x06abcd" + b"\xa9\x06abcdefgh"
    scanned = scanned_of(more + RAW)
    assert scanned.head.startswith(more) and len(scanned.raw) == 2


def test_the_same_request_with_other_tensors_has_the_same_head() -> None:
    other = oip_pb2.ModelInferRequest.FromString(RAW)
    other.id = "request 8"
    other.raw_input_contents[0] = b"others"
    assert scanned_of(other.SerializeToString()).head == scanned_of(RAW).head


def test_as_many_fields_are_taken_as_a_request_with_so_many_columns_has() -> None:
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
def test_more_fields_are_refused_before_they_are_walked(field: bytes) -> None:
    with pytest.raises(LimitExceeded, match=r"request has over \d+ fields"):
        scanned_of(field * 50 + b"\x0b")  # What is behind them is no request, and is not looked at.


INPUT = oip_pb2.ModelInferRequest.InferInputTensor
PARAMETERS = {f"p{number}": {"string_param": "v" * 1000} for number in range(1100)}
LARGE_HEADS: dict[str, dict[str, Any]] = {
    "name": {"model_name": "m" * (HEAD_BYTES_MAX + 1)},
    "shape": {"inputs": [{"shape": [1 << 62] * 120_000}]},
    "input's parameters": {"inputs": [{"parameters": PARAMETERS}]},
    "beside contents": {
        "inputs": [{"contents": {"int_contents": [1] * 9}, "name": "x" * HEAD_BYTES_MAX}]
    },
    "contents beside raw ones": {
        "inputs": [{"contents": {"bytes_contents": [b"s" * HEAD_BYTES_MAX]}}],
        "raw_input_contents": [b"raw"],
    },
    "empty contents": {
        "inputs": [{"contents": {"bytes_contents": [b""]}, "shape": [1 << 62] * 120_000}]
    },
}


@pytest.mark.parametrize("what", LARGE_HEADS)
def test_a_head_is_large_by_typed_contents_only(what: str) -> None:
    raw = oip_pb2.ModelInferRequest(**LARGE_HEADS[what]).SerializeToString()
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
def test_typed_contents_are_taken_out(inputs: list[Any], request_id: str) -> None:
    request = oip_pb2.ModelInferRequest(model_name="m", id=request_id, inputs=inputs)
    scanned = scanned_of(request.SerializeToString())

    got = [contents_of(scanned.typed[number]) for number in sorted(scanned.typed)]
    assert got == [each.contents for each in inputs if each.HasField("contents")]
    assert all(inputs[number].HasField("contents") for number in scanned.typed)
    for each in inputs:
        each.ClearField("contents")
    bare = oip_pb2.ModelInferRequest(model_name="m", inputs=inputs)
    assert oip_pb2.ModelInferRequest.FromString(scanned.head) == bare


def contents_of(raw: memoryview) -> oip_pb2.InferTensorContents:
    return oip_pb2.InferTensorContents.FromString(bytes(raw))


def test_typed_contents_are_where_they_came() -> None:
    """No copy: what changes in the message changes in them."""
    contents = {"fp32_contents": [1.5] * 9}
    request = oip_pb2.ModelInferRequest(id="i", inputs=[{"name": "x", "contents": contents}] * 2)
    message = np.frombuffer(bytearray(request.SerializeToString()), np.uint8)
    typed = scanned_of(message.data).typed
    message[:] = 99
    assert [set(each) for each in typed.values()] == [{99}, {99}]


def test_contents_that_come_twice_are_refused() -> None:
    inner = INPUT(name="x", contents=TYPED).SerializeToString() * 2
    with pytest.raises(MalformedInput, match="its contents twice"):
        scanned_of(b"\x2a" + encode_varint(len(inner)) + inner)


def test_what_is_around_contents_is_left() -> None:
    pieces = [INPUT(name="x"), INPUT(contents=TYPED), INPUT(shape=[7])]
    inner = b"".join(piece.SerializeToString() for piece in pieces)
    scanned = scanned_of(b"\x2a" + encode_varint(len(inner)) + inner)
    assert contents_of(scanned.typed[0]) == oip_pb2.InferTensorContents(**TYPED)
    (bare,) = oip_pb2.ModelInferRequest.FromString(scanned.head).inputs
    assert bare == INPUT(name="x", shape=[7])


def test_typed_contents_come_before_and_behind_an_id() -> None:
    request = oip_pb2.ModelInferRequest(id="i", inputs=[{"name": "x", "contents": TYPED}])
    raw = request.SerializeToString()
    scanned = scanned_of(raw * 2)
    assert scanned.id == b"i" and len(scanned.typed) == 2
    assert scanned.head == oip_pb2.ModelInferRequest(inputs=[{"name": "x"}] * 2).SerializeToString()


def test_the_same_request_with_other_numbers_has_the_same_head() -> None:
    heads = {
        scanned_of(
            oip_pb2.ModelInferRequest(
                inputs=[{"name": "x", "contents": {"int64_contents": [1 << 30] * count}}]
            ).SerializeToString()
        ).head
        for count in (0, 1, 7, 1000)
    }
    assert len(heads) == 1


def test_beside_raw_contents_typed_ones_are_left_to_be_refused() -> None:
    request = oip_pb2.ModelInferRequest(
        inputs=[{"name": "x", "contents": TYPED}], raw_input_contents=[b"raw"]
    )
    scanned = scanned_of(request.SerializeToString())
    assert not scanned.typed
    assert oip_pb2.ModelInferRequest.FromString(scanned.head).inputs == request.inputs


def test_typed_contents_may_be_large() -> None:
    contents = {"bytes_contents": [b"s" * (HEAD_BYTES_MAX + 1)]}
    request = oip_pb2.ModelInferRequest(
        model_name="m", inputs=[{"name": "x", "contents": contents}] * 2
    )
    scanned = scanned_of(request.SerializeToString())
    assert len(scanned.head) < 20
    assert [len(each) for each in scanned.typed.values()] == [HEAD_BYTES_MAX + 5] * 2


@pytest.mark.parametrize("contents", [b"", b"\x2a\x00"])
def test_many_fields_of_inputs_are_refused(contents: bytes) -> None:
    inner = contents + b"\x08\x00" * 1000
    with pytest.raises(LimitExceeded, match=r"inputs have over \d+ fields"):
        scanned_of(b"\x2a" + encode_varint(len(inner)) + inner)


@pytest.mark.parametrize("end", [b"\x2a\x85", b"\x2b", b"\x2a\x02\x0b", b"\x2a\x02\x2a\x01"])
def test_inputs_that_are_broken_are_refused(end: bytes) -> None:
    with pytest.raises(MalformedInput):
        scanned_of(b"\x2a\x02\x2a\x00" + end)


def is_taken(raw: bytes) -> bool:
    """Whether a message is a request to us; if so it is the one that protobuf reads."""
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


def test_a_request_that_is_cut_short_is_taken_only_where_it_is_one() -> None:
    taken = [length for length in range(len(RAW)) if is_taken(RAW[:length])]
    assert taken == [length for length in range(len(RAW)) if is_request(RAW[:length])]
    assert 0 < len(taken) < 10


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
def test_any_bytes_are_the_request_that_protobuf_reads_or_none(raw: bytes) -> None:
    is_taken(raw)


@given(texts, st.lists(st.binary(max_size=300), max_size=4))
def test_a_response_is_put_together(request_id: str, tensors: list[bytes]) -> None:
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
def test_numbers_are_protobufs(value: int) -> None:
    message = oip_pb2.StatisticDuration(ns=value).SerializeToString()
    assert message == (b"\x10" + encode_varint(value) if value else b"")
