"""The head of an OIP request: parameters, terms, inputs, outputs and errors."""

from __future__ import annotations

from typing import Any

import pytest

from iskander._generated import oip_pb2
from iskander.config.schema import LimitsConfig
from iskander.contract.column_types import ColumnType
from iskander.contract.processing.strings import body_to_strings
from iskander.contract.tensors import Contract, TensorSpec
from iskander.errors import ContractError, IskanderError, LimitExceeded, MalformedInput, Unsupported
from iskander.gateway.protocols.oip import typed as oip_typed
from iskander.gateway.protocols.oip.request import (
    ParsedRequest,
    is_for_thread,
    plain,
    read_head,
    tensors_of,
)
from iskander.gateway.protocols.oip.tensors import AT_ONCE, AT_ONCE_BYTES, raw_strings
from iskander.gateway.protocols.oip.terms import parse_terms
from iskander.gateway.protocols.oip.wire import scan
from iskander.gateway.protocols.tensors import Tensor
from iskander.gateway.protocols.terms import ClientTerms

COLUMNS = 8
X = {"name": "x", "datatype": "INT64", "shape": [2, 3]}
FLAG = {"name": "flag", "datatype": "BOOL", "shape": [2]}


def head_of(**values: Any) -> bytes:
    return oip_pb2.ModelInferRequest(
        **({"model_name": "m", "inputs": [X]} | values)
    ).SerializeToString()


def read(head: bytes) -> ParsedRequest:
    return read_head(head, COLUMNS)


def read_tensors(
    message: bytes, raw: list[memoryview], strings_max: int, *shape: int, **limits: int
) -> list[Tensor]:
    """Returns the tensors for a model with these inputs: by default numbers of the shape [3].

    The raw contents are not copied.
    """
    scanned = scan(message, LimitsConfig())
    scanned.raw = raw
    parsed = read(scanned.head)
    of_numbers, of_strings = ColumnType("int64", shape or (3,)), ColumnType("binary", ())
    contract = Contract(
        inputs=tuple(
            TensorSpec(name, name, of_strings, ())
            if datatype == "BYTES" and strings_max
            else TensorSpec(name, name, of_numbers, of_numbers.shape)
            for name, datatype, _ in parsed.inputs
        ),
        outputs=(),
    )
    return tensors_of(
        parsed, scanned, contract, LimitsConfig(**{"rows": strings_max or 9} | limits)
    )


def test_request_head_is_parsed() -> None:
    parsed = read(head_of(model_version="3", inputs=[X, FLAG], outputs=[{"name": "y"}]))
    assert (parsed.model, parsed.version, parsed.terms) == ("m", "3", None)
    assert parsed.inputs == [("x", "INT64", (2, 3)), ("flag", "BOOL", (2,))]
    assert parsed.outputs == ("y",) and not parsed.needs_final_flag


def test_missing_version_is_none() -> None:
    assert read(head_of()).version is None


def test_raw_contents_are_assigned_in_input_order() -> None:
    message = head_of(inputs=[X, FLAG])
    x, flag = memoryview(bytes(48)), memoryview(bytes(2))
    assert read_tensors(message, [x, flag], 0) == [
        Tensor("x", "INT64", (2, 3), x),
        Tensor("flag", "BOOL", (2,), flag),
    ]


def test_typed_contents_are_read_without_raw_contents() -> None:
    flag = FLAG | {"contents": {"bool_contents": [True, False]}}
    x, flag_tensor = read_tensors(head_of(inputs=[X, flag]), [], 0)
    assert bytes(x.data) == b"" and bytes(flag_tensor.data) == b"\x01\x00"


@pytest.mark.parametrize("raw", [1, 3])
def test_wrong_number_of_raw_contents_is_rejected(raw: int) -> None:
    message = head_of(inputs=[X, FLAG])
    with pytest.raises(MalformedInput, match=f"{raw} raw contents for 2 inputs"):
        read_tensors(message, [memoryview(b"")] * raw, 0)


def test_mixed_raw_and_typed_contents_are_rejected() -> None:
    inputs = [X, FLAG | {"contents": {"bool_contents": [True]}}]
    scanned = scan(head_of(inputs=inputs, raw_input_contents=[b"raw"]), LimitsConfig())
    with pytest.raises(MalformedInput, match="`flag` has typed contents beside raw ones"):
        read(scanned.head)


WORDS = {"name": "words", "datatype": "BYTES", "shape": [1, 3]}
STRINGS = [b"one", b"", b"three"]


@pytest.mark.parametrize("is_raw", [False, True])
def test_strings_are_converted_only_within_the_limit(*, is_raw: bool) -> None:
    words = WORDS if is_raw else WORDS | {"contents": {"bytes_contents": STRINGS}}
    raw = [memoryview(raw_strings(STRINGS))] if is_raw else []
    message = head_of(inputs=[words])
    (converted,) = read_tensors(message, raw, 3)
    assert body_to_strings(converted.data, 3) == STRINGS
    (unconverted,) = read_tensors(message, raw, 2)
    assert unconverted.data is raw[0] if is_raw else not unconverted.data


def test_wrong_string_count_is_rejected() -> None:
    message = head_of(inputs=[WORDS | {"contents": {"bytes_contents": STRINGS * 2}}])
    with pytest.raises(MalformedInput, match="shape has 3 strings, got 6"):
        read_tensors(message, [], 10)


REGION = {"parameters": {"shared_memory_region": {"string_param": "r"}}}
REJECTED: dict[str, tuple[dict[str, Any], type[IskanderError]]] = {
    "shared memory": ({"inputs": [X | REGION]}, Unsupported),
    "results in shared memory": ({"outputs": [{"name": "y"} | REGION]}, Unsupported),
    "classification": (
        {"outputs": [{"name": "y", "parameters": {"classification": {"int64_param": 1}}}]},
        Unsupported,
    ),
    "duplicate output": ({"outputs": [{"name": "y"}, {"name": "y"}]}, ContractError),
    "a sequence": ({"parameters": {"sequence_id": {"int64_param": 7}}}, Unsupported),
    "a named sequence": ({"parameters": {"sequence_id": {"string_param": "s"}}}, Unsupported),
    "a sequence end": ({"parameters": {"sequence_end": {"bool_param": True}}}, Unsupported),
}


@pytest.mark.parametrize("name", REJECTED)
def test_unsupported_options_are_rejected(name: str) -> None:
    values, kind = REJECTED[name]
    with pytest.raises(kind):
        read(head_of(**values))


TOO_MANY: dict[str, dict[str, Any]] = {
    "inputs": {"inputs": [X] * 9},
    "outputs": {"outputs": [{"name": "y"}] * 9},
    "parameters": {"parameters": {f"p{number}": {"bool_param": True} for number in range(9)}},
    "axes": {"inputs": [X | {"shape": [1 << 62] * 18}]},
}


@pytest.mark.parametrize("case", TOO_MANY)
def test_more_items_than_the_limit_are_rejected(case: str) -> None:
    with pytest.raises(LimitExceeded, match=rf"has \d+ {case}, limit \d+"):
        read(head_of(**TOO_MANY[case]))


def test_items_at_the_limit_are_accepted() -> None:
    names = [f"y{number}" for number in range(COLUMNS)]
    parsed = read(
        head_of(
            inputs=[X | {"shape": [1] * 17}] * COLUMNS,
            outputs=[{"name": name} for name in names],
            parameters={name: {"bool_param": True} for name in names},
        )
    )
    assert len(parsed.inputs) == COLUMNS and parsed.outputs == tuple(names)


def typed(shape: list[int], count: int) -> dict[str, Any]:
    return X | {"datatype": "INT8", "shape": shape, "contents": {"int_contents": [1] * count}}


LARGE: dict[str, tuple[list[dict[str, Any]], type[IskanderError], str]] = {
    "rows": ([typed([10, 3], 30)], LimitExceeded, "10 rows, limit 9 "),
    "bytes": ([typed([9, 3], 27)] * 4, LimitExceeded, "108 bytes, limit 100 "),
    "with a negative shape": (
        [typed([-9, 30], 1), typed([9, 30], 270)],
        LimitExceeded,
        "270 bytes, limit 100 ",
    ),
    "elements": ([typed([2, 3], 7)], MalformedInput, "shape has 6 elements, got 7"),
    "negative rows": ([typed([-1, 3], 3)], MalformedInput, "-3 elements"),
    "scalar": ([typed([], 3)], MalformedInput, "shape has 1 elements, got 3"),
}


@pytest.mark.parametrize("case", LARGE)
def test_typed_contents_are_limited_before_they_are_read(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, kind, text = LARGE[case]
    monkeypatch.setattr(oip_typed, "_varints", lambda *_: pytest.fail("the contents were read"))
    with pytest.raises(kind, match=text):
        read_tensors(head_of(inputs=inputs), [], 0, bytes=100)


def test_typed_contents_that_fit_no_input_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        oip_typed._Reader, "numbers", lambda *_: pytest.fail("the contents were read")
    )
    (unconverted,) = read_tensors(head_of(inputs=[typed([1, 90], 90)]), [], 0)
    assert unconverted.shape == (1, 90) and not unconverted.data


@pytest.mark.parametrize(
    ("datatype", "shape", "length", "is_slow"),
    [
        ("BYTES", [9], AT_ONCE_BYTES, False),
        ("BYTES", [9], AT_ONCE_BYTES + 1, True),
        ("BYTES", [AT_ONCE], 9, False),
        ("BYTES", [AT_ONCE + 1], 9, True),
        ("INT64", [AT_ONCE + 1], AT_ONCE_BYTES + 1, False),
    ],
)
def test_many_or_long_strings_are_read_in_a_thread(
    datatype: str, shape: list[int], length: int, *, is_slow: bool
) -> None:
    head = head_of(inputs=[{"name": "x", "datatype": datatype, "shape": shape}])
    scanned = scan(head, LimitsConfig())
    scanned.raw = [memoryview(bytes(length))]
    assert is_for_thread(read(head), scanned) is is_slow


def test_invalid_message_is_malformed() -> None:
    with pytest.raises(MalformedInput):
        read(b"\x0a\xff")


def test_parameters_of_every_kind_are_plain_values() -> None:
    message = oip_pb2.ModelInferRequest(
        parameters={
            "a": {"bool_param": False},
            "b": {"int64_param": -3},
            "c": {"string_param": "text"},
            "d": {"double_param": 0.5},
            "e": {"uint64_param": 1 << 63},
            "f": {},
        }
    )
    assert plain(message.parameters) == {
        "a": False, "b": -3, "c": "text", "d": 0.5, "e": 1 << 63, "f": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({}, None),
        ({"priority": 0, "timeout": 0}, None),
        ({"sequence_id": 0, "sequence_start": False}, None),
        ({"client": "x", "haste": 1, "binary_data_output": True}, None),
        ({"priority": 1}, ClientTerms(priority=0)),
        ({"priority": 2}, ClientTerms(priority=1)),
        ({"priority": 10}, ClientTerms(priority=9)),
        ({"priority": 1 << 63}, ClientTerms(priority=9)),
        ({"priority": 5, "iskander_priority": 0}, ClientTerms(priority=0)),
        ({"timeout": 86_400_000_000}, ClientTerms(deadline_ms=86_400_000.0)),
        ({"timeout": 1500}, ClientTerms(deadline_ms=1.5)),
        ({"timeout": 2000, "iskander_deadline_ms": 3}, ClientTerms(deadline_ms=2.0)),
        ({"timeout": 4000, "iskander_deadline_ms": 3}, ClientTerms(deadline_ms=3.0)),
        ({"iskander-deadline-ms": "20"}, ClientTerms(deadline_ms=20.0)),
        (
            {"iskander_client": "robot", "iskander_urgency": 1, "iskander_newest_wins": True},
            ClientTerms(client="robot", urgency=1.0, newest_wins=True),
        ),
    ],
)
def test_terms_are_read_from_parameters(
    parameters: dict[str, Any], expected: ClientTerms | None
) -> None:
    assert parse_terms(parameters) == expected


@pytest.mark.parametrize(
    "parameters",
    [
        {"priority": -1},
        {"priority": "high"},
        {"priority": True},
        {"priority": 1.0},
        {"timeout": -1},
        {"timeout": "soon"},
        {"timeout": None},
        {"iskander_deadline_ms": -1},
        {"iskander_priority": 10},
        {"iskander_haste": 1},
        {"iskander_": 1},
    ],
)
def test_invalid_terms_are_rejected(parameters: dict[str, Any]) -> None:
    with pytest.raises(MalformedInput):
        parse_terms(parameters)


def test_timeout_above_a_day_is_rejected_by_name() -> None:
    with pytest.raises(MalformedInput, match=r"`timeout`.*limit 86400000000 us") as caught:
        parse_terms({"timeout": 86_400_000_001})
    assert "deadline" not in caught.value.message
