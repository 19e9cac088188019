"""HTTP request and response bodies: JSON, binary tensors and errors."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from iskander.config.schema import LimitsConfig
from iskander.contract.column_types import ColumnType
from iskander.contract.processing.strings import body_to_strings, strings_to_body
from iskander.contract.tensors import Contract, TensorSpec
from iskander.errors import ContractError, IskanderError, LimitExceeded, MalformedInput, Unsupported
from iskander.gateway.protocols.oip.http.messages import (
    ParsedRequest,
    RequestedOutput,
    read_raw,
    read_request,
    select_outputs,
    write_answer,
)
from iskander.gateway.protocols.tensors import Tensor

LIMITS = LimitsConfig(columns=4)
X = {"name": "x", "datatype": "INT32", "shape": [2]}
JSON_X = X | {"data": [1, 2]}
BINARY_X = X | {"parameters": {"binary_data_size": 8}}
RAW_X = struct.pack("<2i", 1, 2)


def spec(name: str, dtype: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, name, ColumnType(dtype, shape), shape)


CONTRACT = Contract(
    inputs=(spec("x", "int32"),),
    outputs=(spec("y", "int32"), spec("z", "bool", 3), spec("h", "float16")),
)


def read(head: Any, binary: bytes | None = None, contract: Contract = CONTRACT) -> ParsedRequest:
    raw = head if isinstance(head, bytes) else json.dumps(head).encode()
    length = None if binary is None else len(raw)
    return read_request(memoryview(raw + (binary or b"")), length, contract, LIMITS)


def request(*inputs: Any, **rest: Any) -> dict[str, Any]:
    return {"inputs": list(inputs), **rest}


def test_json_request_is_read() -> None:
    parsed = read(request(JSON_X, id="a", parameters={"priority": 1}, more="ignored"))

    assert parsed.tensors == [Tensor("x", "INT32", (2,), memoryview(RAW_X))]
    assert (parsed.id, parsed.parameters, parsed.outputs) == ("a", {"priority": 1}, None)
    assert not parsed.is_binary


def test_binary_tensors_follow_the_json_in_input_order() -> None:
    second = {**BINARY_X, "name": "w"}

    three = Contract(inputs=tuple(spec(name, "int32") for name in "xvw"), outputs=())
    parsed = read(request(BINARY_X, {**JSON_X, "name": "v"}, second), RAW_X + RAW_X[::-1], three)

    assert [bytes(tensor.data) for tensor in parsed.tensors] == [RAW_X, RAW_X, RAW_X[::-1]]


def test_binary_tensor_is_not_copied() -> None:
    raw = json.dumps(request(BINARY_X)).encode()
    body = memoryview(raw + RAW_X)

    assert read_request(body, len(raw), CONTRACT, LIMITS).tensors[0].data.obj is body.obj


def test_output_form_is_set_by_the_output_or_the_request() -> None:
    outputs = [{"name": "y"}, {"name": "z", "parameters": {"binary_data": False}}]

    by_request = read(request(JSON_X, outputs=outputs, parameters={"binary_data_output": True}))
    by_output = read(request(JSON_X, outputs=[{"name": "y", "parameters": {"binary_data": True}}]))

    assert by_request.outputs == [RequestedOutput("y", True), RequestedOutput("z", False)]
    assert by_output.outputs == [RequestedOutput("y", True)]
    assert read(request(JSON_X, parameters={"binary_data_output": True})).is_binary


def test_null_equals_a_missing_field() -> None:
    """Some clients write null for unset fields."""
    unset = {"id": None, "outputs": None, "parameters": None}
    parsed = read(request(JSON_X | {"parameters": None}, **unset))
    assert parsed == read(request(JSON_X))

    unset = {"shared_memory_region": None, "classification": None, "binary_data": None}
    for parameters in (None, unset):
        parsed = read(request(JSON_X, outputs=[{"name": "y", "parameters": parameters}]))
        assert parsed.outputs == [RequestedOutput("y", False)]
    unset = {"binary_data_size": None, "shared_memory_region": None, "priority": None}
    parsed = read(request(JSON_X | {"parameters": unset}, parameters=unset))
    assert parsed == read(request(JSON_X))
    assert read(request(BINARY_X | {"data": None}), RAW_X) == read(request(BINARY_X), RAW_X)


MALFORMED: dict[str, tuple[Any, bytes | None, str]] = {
    "invalid JSON": (b"{]", None, "cannot be read"),
    "truncated": (json.dumps(request(JSON_X)).encode()[:-3], None, "truncated"),
    "a NaN": (b'{"inputs":[{"name":"x","data":[NaN]}]}', None, "NaN and Infinity are not JSON"),
    "invalid UTF-8": (b'{"inputs":[{"name":"\xff"}]}', None, "cannot be read"),
    "deep nesting": (b"[" * 100_000, None, "cannot be read|Expected"),
    "deep nesting in an unknown field": (b'{"a":' + b"[" * 100_000, None, "cannot be read"),
    "a list": ([], None, "Expected `object`"),
    "no inputs": ({}, None, "`inputs`"),
    "a number as id": (request(JSON_X, id=1), None, r"\$\.id"),
    "a negative size": (request(JSON_X | {"shape": [-1]}), None, "shape"),
    "a fraction in a shape": (request(JSON_X | {"shape": [2.5]}), None, "shape"),
    "a huge shape": (request(JSON_X | {"shape": [2**64]}), None, "shape"),
    "a shape of many axes": (request(JSON_X | {"shape": [1] * 1000}), None, "shape"),
    "null data": (request(X | {"data": None}), None, "needs `data` or `binary_data_size`"),
    "neither form": (request(X), None, "needs `data` or `binary_data_size`"),
    "both forms": (request(BINARY_X | JSON_X), RAW_X, "`data` and `binary_data_size`"),
    "too few bytes": (request(BINARY_X), RAW_X[:-1], "body ends after 7"),
    "no bytes": (request(BINARY_X), None, "body ends after 0"),
    "too many bytes": (request(BINARY_X), RAW_X + b"12", "2 bytes follow after"),
    "unused bytes": (request(JSON_X), RAW_X, "8 bytes follow after"),
    "a negative length": (
        request(X | {"parameters": {"binary_data_size": -1}}),
        RAW_X,
        "is not a number of bytes",
    ),
    "a huge length": (
        request(X | {"parameters": {"binary_data_size": 10**30}}),
        RAW_X,
        "is not a number of bytes",
    ),
    "a length as text": (
        request(X | {"parameters": {"binary_data_size": "8"}}),
        RAW_X,
        "is not a number of bytes",
    ),
    "a flag as text": (
        request(JSON_X, parameters={"binary_data_output": "yes"}),
        None,
        "true or false",
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_request_is_rejected_with_the_reason(name: str) -> None:
    head, binary, message = MALFORMED[name]
    with pytest.raises(MalformedInput, match=message):
        read(head, binary)


def test_too_many_tensors_are_rejected_before_they_are_read() -> None:
    with pytest.raises(LimitExceeded, match="5 inputs, limit 4 "):
        read(request(*[X] * 5))
    with pytest.raises(LimitExceeded, match="5 outputs, limit 4 "):
        read(request(JSON_X, outputs=[{"name": "y"}] * 5))


@pytest.mark.parametrize(
    "head",
    [
        request(X | {"parameters": {"shared_memory_region": "a"}}),
        request(JSON_X, outputs=[{"name": "y", "parameters": {"shared_memory_region": "a"}}]),
        request(JSON_X, outputs=[{"name": "y", "parameters": {"classification": 3}}]),
    ],
)
def test_unsupported_options_are_rejected(head: Any) -> None:
    with pytest.raises(Unsupported):
        read(head)


def test_raw_body_is_the_only_input_with_binary_results() -> None:
    parsed = read_raw(CONTRACT, memoryview(RAW_X))

    assert parsed.tensors == [Tensor("x", "INT32", (2,), memoryview(RAW_X))]
    assert parsed.is_binary


def test_raw_body_requires_one_input_and_whole_rows() -> None:
    pair = Contract(inputs=(spec("x", "int32", 2), spec("w", "int8")), outputs=CONTRACT.outputs)

    with pytest.raises(ContractError, match="2 inputs"):
        read_raw(pair, memoryview(RAW_X))
    flags = Contract(inputs=(spec("x", "bool", 16),), outputs=CONTRACT.outputs)
    assert read_raw(flags, memoryview(bytes(32))).tensors[0].shape == (2, 16)
    with pytest.raises(ContractError, match="4 bytes a row, got 7 bytes"):
        read_raw(CONTRACT, memoryview(RAW_X[:-1]))


def test_outputs_are_selected_in_requested_order() -> None:
    parsed = ParsedRequest([], outputs=[RequestedOutput("z", True), RequestedOutput("y", False)])

    assert select_outputs(CONTRACT, parsed, 10, 1000) == parsed.outputs
    everything = select_outputs(CONTRACT, ParsedRequest([], is_binary=True), 10, 1000)
    assert everything == [
        RequestedOutput("y", True),
        RequestedOutput("z", True),
        RequestedOutput("h", True),
    ]


@pytest.mark.parametrize(
    ("outputs", "kind", "message"),
    [
        (
            [RequestedOutput("q", True)],
            ContractError,
            "`q` is not an output of the model; it has y, z, h",
        ),
        ([RequestedOutput("y", True), RequestedOutput("y", False)], ContractError, "twice"),
        ([RequestedOutput("h", False)], ContractError, "`h` is FP16.*binary"),
        ([RequestedOutput("y", False)], LimitExceeded, "40 bytes, limit 39 .*binary"),
        (None, ContractError, "FP16"),
    ],
)
def test_invalid_outputs_are_rejected_before_the_run(
    outputs: list[RequestedOutput] | None, kind: type[IskanderError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        select_outputs(CONTRACT, ParsedRequest([], outputs=outputs), 10, 39)


def test_response_has_outputs_in_requested_form_and_order() -> None:
    results = [
        Tensor("y", "INT32", (2,), memoryview(RAW_X)),
        Tensor("z", "BOOL", (2, 3), memoryview(bytes([1, 0, 1, 0, 0, 1]))),
        Tensor("h", "FP16", (2,), memoryview(np.ones(2, np.float16).tobytes())),
    ]
    selected = [RequestedOutput("h", True), RequestedOutput("z", False), RequestedOutput("y", True)]

    parts, length = write_answer(("m", "3"), ParsedRequest([], id="a"), results, selected, 6)

    body = b"".join(parts)
    assert length is not None
    assert json.loads(body[:length]) == {
        "model_name": "m",
        "model_version": "3",
        "id": "a",
        "outputs": [
            {
                "name": "h",
                "datatype": "FP16",
                "shape": [2],
                "parameters": {"binary_data_size": 4},
            },
            {
                "name": "z",
                "datatype": "BOOL",
                "shape": [2, 3],
                "data": [True, False, True, False, False, True],
            },
            {
                "name": "y",
                "datatype": "INT32",
                "shape": [2],
                "parameters": {"binary_data_size": 8},
            },
        ],
    }
    assert body[length:] == np.ones(2, np.float16).tobytes() + RAW_X


def test_json_response_has_no_json_length() -> None:
    results = [Tensor("y", "INT32", (2,), memoryview(RAW_X))]

    parts, length = write_answer(
        ("m", "3"), ParsedRequest([]), results, [RequestedOutput("y", False)], 8
    )

    assert length is None
    assert "id" not in json.loads(b"".join(parts))


TEXTS = Contract(inputs=(spec("s", "utf8"),), outputs=(spec("t", "utf8"),))
RAW_TEXTS = b"\x02\0\0\0\xc3\xa4\0\0\0\0"


def test_strings_are_equal_in_both_forms() -> None:
    head = {"name": "s", "datatype": "BYTES", "shape": [2]}
    in_json = read(request(head | {"data": ["ä", ""]}), contract=TEXTS)
    size = {"parameters": {"binary_data_size": len(RAW_TEXTS)}}
    binary = read(request(head | size), RAW_TEXTS, TEXTS)

    assert in_json.tensors == binary.tensors
    results = [replace(in_json.tensors[0], name="t")]
    for is_binary, written in ((True, RAW_TEXTS), (False, '["ä",""]'.encode())):
        parts, _ = write_answer(
            ("m", "1"), ParsedRequest([]), results, [RequestedOutput("t", is_binary)], 100
        )
        assert written in b"".join(parts)


def test_long_strings_as_json_are_rejected_after_the_run() -> None:
    results = [Tensor("t", "BYTES", (1,), memoryview(strings_to_body([b"a" * 93])))]
    assert select_outputs(TEXTS, ParsedRequest([]), 1, 100)

    with pytest.raises(LimitExceeded, match=r"101 bytes.*binary"):
        write_answer(("m", "1"), ParsedRequest([]), results, [RequestedOutput("t", False)], 100)


def test_wrong_string_count_is_malformed() -> None:
    head = {"name": "s", "datatype": "BYTES", "shape": [3]}
    with pytest.raises(MalformedInput):
        read(request(head | {"parameters": {"binary_data_size": 10}}), RAW_TEXTS, TEXTS)


def test_strings_that_fit_no_input_are_not_converted() -> None:
    size = {"parameters": {"binary_data_size": 8}}
    head = {"name": "s", "datatype": "BYTES", "shape": [2]}

    (tensor,) = read(
        request(head | size), bytes(8), Contract(inputs=(spec("s", "int64"),), outputs=())
    ).tensors

    assert bytes(tensor.data) == bytes(8)


@pytest.mark.parametrize("names", [["other"], ["s", "other"], ["s", "s"]])
def test_elements_are_not_read_for_wrong_input_names(names: list[str]) -> None:
    """Each element is invalid and would be rejected."""
    size = {"parameters": {"binary_data_size": 3}}
    descriptions = [{"name": name, "datatype": "BYTES", "shape": [2]} for name in names]

    raw = read(request(*(each | size for each in descriptions)), bytes(3 * len(names)), TEXTS)
    in_json = read(request(*(each | {"data": [1]} for each in descriptions)), contract=TEXTS)

    assert [bytes(each.data) for each in raw.tensors + in_json.tensors] == [b""] * 2 * len(names)


def test_raw_body_is_one_string() -> None:
    (tensor,) = read_raw(TEXTS, memoryview(b"a b")).tensors

    assert (tensor.shape, body_to_strings(tensor.data, 1)) == ((1,), [b"a b"])
    with pytest.raises(ContractError):
        read_raw(Contract(inputs=(spec("s", "utf8", 2),), outputs=()), memoryview(b"a b"))
