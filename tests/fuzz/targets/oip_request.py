"""ModelInferRequest, with the protobuf runtime and NumPy as the references.

Requests that the runtime accepts may be rejected for limits and unsupported features; each
rejection is checked against the message. Deliberately stricter than the runtime: groups, which
proto3 does not have, and repeated contents of an input are rejected.
"""

from __future__ import annotations

from math import prod
from random import Random
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from fuzz import mutation
from iskander._generated import oip_pb2
from iskander.config.schema import LimitsConfig
from iskander.contract.column_types import ColumnType
from iskander.contract.dtypes import DTYPES
from iskander.contract.processing.strings import body_to_strings
from iskander.contract.tensors import Contract, TensorSpec
from iskander.errors import ContractError, IskanderError, LimitExceeded, MalformedInput, Unsupported
from iskander.gateway.protocols import tensors as offered
from iskander.gateway.protocols.oip.request import (
    ParsedRequest,
    is_for_thread,
    read_head,
    tensors_of,
)
from iskander.gateway.protocols.oip.typed import FIELDS
from iskander.gateway.protocols.oip.wire import Scanned, scan

ITERATIONS = 3000
LIMITS = LimitsConfig(columns=8, rows=1000, bytes=1 << 20)
AXES_MAX = 8
NUMBERS = (1, 2, 3, 4, 5, 6, 7, 8)
NAMES = {dtype.oip: dtype for dtype in DTYPES}
UNSUPPORTED = ("shared_memory_region", "classification", "sequence_id", "sequence_start")

Request = oip_pb2.ModelInferRequest


def seeds() -> list[bytes]:
    typed = {
        "BOOL": {"bool_contents": [True, False]},
        "INT8": {"int_contents": [-128, 127]},
        "INT64": {"int64_contents": [-1, 1 << 62]},
        "UINT8": {"uint_contents": [0, 255]},
        "UINT64": {"uint64_contents": [(1 << 64) - 1, 0]},
        "FP32": {"fp32_contents": [1.5, -2.0]},
        "FP64": {"fp64_contents": [1.5, float("inf")]},
        "BYTES": {"bytes_contents": [b"ab", b""]},
    }
    requests = [
        Request(
            model_name="model",
            id="7",
            inputs=[{"name": "x", "datatype": name, "shape": [2], "contents": contents}],
        )
        for name, contents in typed.items()
    ]
    raw = Request(
        model_name="model",
        model_version="3",
        id="request 7",
        inputs=[
            {"name": "x", "datatype": "FP32", "shape": [2, 3]},
            {"name": "words", "datatype": "BYTES", "shape": [2, 1]},
        ],
        outputs=[{"name": "y"}],
        raw_input_contents=[bytes(24), b"\x01\0\0\0a\x03\0\0\0bcd"],
    )
    raw.parameters["timeout"].int64_param = 20_000
    raw.parameters["iskander-priority"].string_param = "2"
    raw.parameters["triton_enable_empty_final_response"].bool_param = True
    return [b"", *(each.SerializeToString() for each in (*requests, raw))]


def mutate(raw: bytes, other: bytes, random: Random) -> bytes:
    return mutation.protobuf(raw, other, random, NUMBERS)


def run(raw: bytes) -> None:
    try:
        expected = Request.FromString(raw)
    except (DecodeError, UnicodeDecodeError):
        expected = None
    try:
        scanned = scan(raw, LIMITS)
        head = read_head(scanned.head, LIMITS.columns)
        assert expected is not None or has_invalid_typed_contents(raw, scanned), (
            "protobuf rejects it"
        )
        if expected is None:
            return
        check_head(expected, head, scanned)
        contract = contract_of(expected)
        is_for_thread(head, scanned)
        tensors = tensors_of(head, scanned, contract, LIMITS)
    except IskanderError as error:
        assert expected is None or is_expected_error(error, expected, raw), f"rejected: {error}"
        return
    assert len(tensors) == len(expected.inputs)
    for number, tensor in enumerate(tensors):
        check_tensor(tensor, number, expected)
    try:
        offered.read_inputs(contract, tensors, LIMITS)
    except IskanderError:
        return


def contract_of(message: Any) -> Contract:
    """The contract of a model that accepts these tensors, if one exists."""
    inputs = {
        each.name: TensorSpec(
            each.name,
            each.name,
            ColumnType(NAMES[each.datatype].arrow if each.datatype in NAMES else "float32"),
            tuple(max(axis, 0) for axis in each.shape[1:]),
        )
        for each in message.inputs
    }
    return Contract(tuple(inputs.values()), ())


def check_head(expected: Any, head: ParsedRequest, scanned: Scanned) -> None:
    assert head.model == expected.model_name
    assert head.version == (expected.model_version or None)
    assert scanned.id.decode() == expected.id
    assert [bytes(each) for each in scanned.raw] == list(expected.raw_input_contents)
    described = [(each.name, each.datatype, tuple(each.shape)) for each in expected.inputs]
    assert head.inputs == described
    assert head.outputs == tuple(each.name for each in expected.outputs)
    flag = expected.parameters.get("triton_enable_empty_final_response")
    assert head.needs_final_flag == bool(flag is not None and flag.bool_param)


def check_tensor(tensor: offered.Tensor, number: int, message: Any) -> None:
    """Checks a tensor's elements, if an input can accept it."""
    tensor_message = message.inputs[number]
    assert (tensor.name, tensor.datatype, tensor.shape) == (
        tensor_message.name, tensor_message.datatype, tuple(tensor_message.shape),
    )  # fmt: skip
    elements = elements_of(tensor_message)
    if message.raw_input_contents:
        expected = message.raw_input_contents[number]
        if tensor_message.datatype != "BYTES":
            assert bytes(tensor.data) in (expected, b"")
        return
    if elements is None or not tensor.data:
        return
    if tensor_message.datatype == "BYTES":
        assert [bytes(each) for each in body_to_strings(tensor.data, len(elements))] == elements
    else:
        dtype = np.dtype(NAMES[tensor_message.datatype].numpy)
        actual = np.frombuffer(tensor.data, dtype)
        assert actual.tobytes() == np.array(elements, dtype).tobytes()


def elements_of(tensor_message: Any) -> list[Any] | None:
    """The elements that the runtime reads of an input's datatype."""
    if tensor_message.datatype not in FIELDS:
        return None
    number = FIELDS[tensor_message.datatype].number
    field = next(
        each for each in tensor_message.contents.DESCRIPTOR.fields if each.number == number
    )
    return list(getattr(tensor_message.contents, field.name))


def has_invalid_typed_contents(raw: bytes, scanned: Scanned) -> bool:
    """Whether the runtime's error can be in typed contents, which are parsed later."""
    if not scanned.typed:
        return False
    return not all(map(is_contents, scanned.typed.values()))


def is_contents(raw: memoryview) -> bool:
    try:
        oip_pb2.InferTensorContents.FromString(bytes(raw))
    except DecodeError:
        return False
    return True


def is_expected_error(error: IskanderError, message: Any, raw: bytes) -> bool:
    """Whether an error is correct for a message that the runtime accepts."""
    text = error.message
    if isinstance(error, Unsupported):
        return any(word in raw.decode("latin-1") for word in UNSUPPORTED)
    if isinstance(error, LimitExceeded):
        return exceeds_limit(message, raw)
    if isinstance(error, ContractError):
        names = [each.name for each in message.outputs]
        return len(set(names)) < len(names)
    assert isinstance(error, MalformedInput)
    if "is not a ModelInferRequest" in text or "contents are not a valid message" in text:
        return has_group(raw)
    if "contents twice" in text:
        return has_contents_twice(raw)
    if "beside raw ones" in text:
        return bool(message.raw_input_contents)
    if "expected one each" in text:
        return len(message.inputs) != len(message.raw_input_contents)
    if "parameter" in text:
        return bool(message.parameters)
    return has_wrong_elements(text, message)


def has_contents_twice(raw: bytes) -> bool:
    """Whether an input has two fields of contents; both have the number 5."""
    inputs = [each.value for each in mutation.split_fields(raw) or [] if is_field_5(each)]
    return any(sum(map(is_field_5, mutation.split_fields(each) or [])) > 1 for each in inputs)


def is_field_5(field: mutation.Field) -> bool:
    return (field.number, field.kind) == (5, 2)


def has_wrong_elements(text: str, message: Any) -> bool:
    """Whether elements of an input do not match its datatype and shape."""
    if "strings" in text and message.raw_input_contents:
        return True
    for each in message.inputs:
        elements = elements_of(each)
        if elements is None or len(elements) != prod(each.shape):
            return True
        others = len(each.contents.ListFields()) - bool(elements)
        if others or is_out_of_range(each.datatype, elements):
            return True
    # The runtime truncates a field to its width; the gateway rejects longer numbers.
    return "a value is out of range" in text or "more fields than its shape" in text


def is_out_of_range(datatype: str, elements: list[Any]) -> bool:
    dtype = np.dtype(NAMES[datatype].numpy) if datatype != "BYTES" else None
    if dtype is None or dtype.kind not in "iu":
        return False
    info = np.iinfo(dtype)
    return any(not info.min <= each <= info.max for each in elements)


def exceeds_limit(message: Any, raw: bytes) -> bool:
    """Whether a message exceeds a limit."""
    fields = mutation.split_fields(raw)
    if fields is None:
        return True  # It has groups, perhaps after too many fields.
    inner = sum(
        len(mutation.split_fields(each.value) or [])
        for each in fields
        if each.number == 5 and each.kind == 2
    )
    if len(fields) > 4 * LIMITS.columns + 16 or inner > 4 * (4 * LIMITS.columns + 16):
        return True
    for repeated in (message.inputs, message.outputs, message.parameters):
        if len(repeated) > LIMITS.columns:
            return True
    total = 0
    for each in message.inputs:
        if len(each.shape) > AXES_MAX or (each.shape and each.shape[0] > LIMITS.rows):
            return True
        bits = NAMES[each.datatype].arrow_bits if each.datatype in NAMES else 8
        total += max(prod(each.shape), 0) * max(bits // 8, 1)
    return total > LIMITS.bytes


def has_group(raw: bytes) -> bool:
    """Whether a message has groups, at any parsed depth."""
    fields = mutation.split_fields(raw)
    if fields is None:
        return True
    for each in fields:
        if each.number != 5 or each.kind != 2:
            continue
        inner = mutation.split_fields(each.value)
        if inner is None:
            return True
        contents = (one.value for one in inner if one.number == 5 and one.kind == 2)
        if any(mutation.split_fields(one) is None for one in contents):
            return True
    return False
