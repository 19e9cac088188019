"""ModelInferRequest: the fields and tensors that protobuf's own runtime and NumPy make of it.

Requests that the runtime reads may be refused for limits and for what is not offered; each refusal
is held against the message. Stricter than the runtime, on purpose: groups, which proto3 does not
have, and an input with its contents twice are refused.
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
from iskander.contract.strings import body_to_strings
from iskander.contract.tensors import Contract, TensorSpec
from iskander.errors import ContractError, IskanderError, LimitExceeded, MalformedInput, Unsupported
from iskander.protocols import tensors as offered
from iskander.protocols.oip.request import ParsedRequest, is_for_thread, read_head, tensors_of
from iskander.protocols.oip.typed import FIELDS
from iskander.protocols.oip.wire import Scanned, scan

ITERATIONS = 3000
LIMITS = LimitsConfig(columns=8, rows=1000, bytes=1 << 20)
AXES_MAX = 8
NUMBERS = (1, 2, 3, 4, 5, 6, 7, 8)
NAMES = {dtype.oip: dtype for dtype in DTYPES}
UNOFFERED = ("shared_memory_region", "classification", "sequence_id", "sequence_start")

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
    made = [
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
    return [b"", *(each.SerializeToString() for each in (*made, raw))]


def mutate(raw: bytes, other: bytes, random: Random) -> bytes:
    return mutation.protobuf(raw, other, random, NUMBERS)


def run(raw: bytes) -> None:
    try:
        wanted = Request.FromString(raw)
    except (DecodeError, UnicodeDecodeError):
        wanted = None
    try:
        scanned = scan(raw, LIMITS)
        asked = read_head(scanned.head, LIMITS.columns)
        assert wanted is not None or is_stray(raw, scanned), "the runtime refuses it"
        if wanted is None:
            return
        check_head(wanted, asked, scanned)
        contract = contract_of(wanted)
        is_for_thread(asked, scanned)
        tensors = tensors_of(asked, scanned, contract, LIMITS)
    except IskanderError as error:
        assert wanted is None or is_refusable(error, wanted, raw), f"refused: {error}"
        return
    assert len(tensors) == len(wanted.inputs)
    for number, tensor in enumerate(tensors):
        check_tensor(tensor, number, wanted)
    try:
        offered.read_inputs(contract, tensors, LIMITS)
    except IskanderError:
        return


def contract_of(message: Any) -> Contract:
    """A model that takes these tensors, as far as there are such."""
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


def check_head(wanted: Any, asked: ParsedRequest, scanned: Scanned) -> None:
    assert asked.model == wanted.model_name
    assert asked.version == (wanted.model_version or None)
    assert scanned.id.decode() == wanted.id
    assert [bytes(each) for each in scanned.raw] == list(wanted.raw_input_contents)
    described = [(each.name, each.datatype, tuple(each.shape)) for each in wanted.inputs]
    assert asked.inputs == described
    assert asked.outputs == tuple(each.name for each in wanted.outputs)
    flag = wanted.parameters.get("triton_enable_empty_final_response")
    assert asked.needs_final_flag == bool(flag is not None and flag.bool_param)


def check_tensor(tensor: offered.Tensor, number: int, message: Any) -> None:
    """A tensor's elements, where it is one that some input could take."""
    given = message.inputs[number]
    assert (tensor.name, tensor.datatype, tensor.shape) == (
        given.name, given.datatype, tuple(given.shape),
    )  # fmt: skip
    elements = elements_of(given)
    if message.raw_input_contents:
        wanted = message.raw_input_contents[number]
        if given.datatype != "BYTES":
            assert bytes(tensor.data) in (wanted, b"")
        return
    if elements is None or not tensor.data:
        return
    if given.datatype == "BYTES":
        assert [bytes(each) for each in body_to_strings(tensor.data, len(elements))] == elements
    else:
        dtype = np.dtype(NAMES[given.datatype].numpy)
        got = np.frombuffer(tensor.data, dtype)
        assert got.tobytes() == np.array(elements, dtype).tobytes()


def elements_of(given: Any) -> list[Any] | None:
    """The elements that the runtime reads of an input's datatype."""
    if given.datatype not in FIELDS:
        return None
    number = FIELDS[given.datatype].number
    field = next(each for each in given.contents.DESCRIPTOR.fields if each.number == number)
    return list(getattr(given.contents, field.name))


def is_stray(raw: bytes, scanned: Scanned) -> bool:
    """Whether what the runtime refuses may be in typed contents that no one has looked into."""
    if not scanned.typed:
        return False
    return not all(map(is_contents, scanned.typed.values()))


def is_contents(raw: memoryview) -> bool:
    try:
        oip_pb2.InferTensorContents.FromString(bytes(raw))
    except DecodeError:
        return False
    return True


def is_refusable(error: IskanderError, message: Any, raw: bytes) -> bool:
    """Whether an error is true of a message that the runtime reads."""
    text = error.message
    if isinstance(error, Unsupported):
        return any(word in raw.decode("latin-1") for word in UNOFFERED)
    if isinstance(error, LimitExceeded):
        return is_over(message, raw)
    if isinstance(error, ContractError):
        names = [each.name for each in message.outputs]
        return len(set(names)) < len(names)
    assert isinstance(error, MalformedInput)
    if "is not a ModelInferRequest" in text or "contents are not a valid message" in text:
        return has_odd_field(raw)
    if "contents twice" in text:
        return raw.count(b"*") > 1
    if "beside raw ones" in text:
        return bool(message.raw_input_contents)
    if "need one each" in text:
        return len(message.inputs) != len(message.raw_input_contents)
    if "parameter" in text:
        return bool(message.parameters)
    return is_misfit(text, message)


def is_misfit(text: str, message: Any) -> bool:
    """Whether some input's elements are not what its datatype and shape say."""
    if "strings" in text and message.raw_input_contents:
        return True
    for each in message.inputs:
        elements = elements_of(each)
        if elements is None or len(elements) != prod(each.shape):
            return True
        others = len(each.contents.ListFields()) - bool(elements)
        if others or is_wide(each.datatype, elements):
            return True
    # As the runtime, a field is cut to its width, and not a number that is longer than any.
    return "a value is out of range" in text or "more fields than its shape" in text


def is_wide(datatype: str, elements: list[Any]) -> bool:
    dtype = np.dtype(NAMES[datatype].numpy) if datatype != "BYTES" else None
    if dtype is None or dtype.kind not in "iu":
        return False
    info = np.iinfo(dtype)
    return any(not info.min <= each <= info.max for each in elements)


def is_over(message: Any, raw: bytes) -> bool:
    """Whether something of a message is over a limit."""
    fields = mutation.split_fields(raw)
    if fields is None:
        return True  # It has groups, and may have too many fields before the first.
    inner = sum(
        len(mutation.split_fields(each.value) or [])
        for each in fields
        if each.number == 5 and each.kind == 2
    )
    if len(fields) > 4 * LIMITS.columns + 16 or inner > 4 * (4 * LIMITS.columns + 16):
        return True
    for what in (message.inputs, message.outputs, message.parameters):
        if len(what) > LIMITS.columns:
            return True
    total = 0
    for each in message.inputs:
        if len(each.shape) > AXES_MAX or (each.shape and each.shape[0] > LIMITS.rows):
            return True
        bits = NAMES[each.datatype].arrow_bits if each.datatype in NAMES else 8
        total += max(prod(each.shape), 0) * max(bits // 8, 1)
    return total > LIMITS.bytes


def has_odd_field(raw: bytes) -> bool:
    """Whether a message has groups, at any depth that is walked."""
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
