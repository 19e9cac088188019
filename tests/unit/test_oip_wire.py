"""Requests taken apart without a copy, responses put together from parts; anything else refused."""

from __future__ import annotations

import numpy as np
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from iskander._generated import oip_pb2
from iskander.errors import MalformedInput
from iskander.gateway.frontends.oip_wire import in_stream, response, scan
from iskander.wire.varint import varint

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
    scanned = scan(request.SerializeToString())

    assert [bytes(each) for each in scanned.raw] == list(request.raw_input_contents)
    assert scanned.id.decode() == request.id
    head = oip_pb2.ModelInferRequest.FromString(scanned.head)
    del request.raw_input_contents[:]
    request.id = ""
    assert head == request


def test_tensors_are_where_they_came() -> None:
    """No copy: what changes in the message changes in them."""
    message = np.frombuffer(bytearray(RAW), np.uint8)
    (first, _) = scan(message.data).raw
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
    scanned = scan(b"".join(piece.SerializeToString() for piece in pieces))
    assert [bytes(each) for each in scanned.raw] == [b"one", b"two"]
    assert scanned.id == b"new"
    head = oip_pb2.ModelInferRequest.FromString(scanned.head)
    assert (head.model_name, head.model_version) == ("model", "2")


def test_fields_that_are_not_known_are_left_where_they_are() -> None:
    """A number, four bytes and eight bytes under numbers that the protocol has not."""
    more = b"\x98\x06\x05" + b"\xa5\x06abcd" + b"\xa9\x06abcdefgh"
    scanned = scan(more + RAW)
    assert scanned.head.startswith(more) and len(scanned.raw) == 2


def test_the_same_request_with_other_tensors_has_the_same_head() -> None:
    other = oip_pb2.ModelInferRequest.FromString(RAW)
    other.id = "request 8"
    other.raw_input_contents[0] = b"others"
    assert scan(other.SerializeToString()).head == scan(RAW).head


def is_taken(raw: bytes) -> bool:
    """Whether a message is a request to us; if so it is the one that protobuf reads."""
    try:
        scanned = scan(raw)
        head = oip_pb2.ModelInferRequest.FromString(scanned.head)
    except (MalformedInput, DecodeError):
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
@example(b"\x38\x05")
@example(b"\x02\x00")
def test_any_bytes_are_the_request_that_protobuf_reads_or_none(raw: bytes) -> None:
    is_taken(raw)


@given(texts, st.lists(st.binary(max_size=300), max_size=4))
def test_a_response_is_put_together(request_id: str, tensors: list[bytes]) -> None:
    head = oip_pb2.ModelInferResponse(model_name="m", outputs=[{"name": "y", "shape": [3]}])
    parts = response(
        head.SerializeToString(), request_id.encode(), [memoryview(each) for each in tensors]
    )

    whole = oip_pb2.ModelInferResponse.FromString(b"".join(parts))
    streamed = oip_pb2.ModelStreamInferResponse.FromString(b"".join(in_stream(parts)))

    head.id = request_id
    head.raw_output_contents.extend(tensors)
    assert whole == streamed.infer_response == head


@given(st.integers(0, (1 << 63) - 1))
def test_numbers_are_protobufs(value: int) -> None:
    message = oip_pb2.StatisticDuration(ns=value).SerializeToString()
    assert message == (b"\x10" + varint(value) if value else b"")
