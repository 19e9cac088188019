"""Request tensors against a contract: accepted inputs, errors, and result tensors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from iskander.config.schema import LimitsConfig
from iskander.contract.column_types import ColumnType
from iskander.contract.dtypes import DTYPES, Dtype
from iskander.contract.processing.strings import body_to_strings, strings_to_body
from iskander.contract.tensors import Contract, TensorSpec, body_layout
from iskander.errors import ContractError, IskanderError, LimitExceeded, MalformedInput
from iskander.gateway.protocols.tensors import (
    PROBLEMS_MAX,
    RequestTensors,
    Tensor,
    match_inputs,
    read_inputs,
    result_ranges,
    result_tensors,
)

LIMITS = LimitsConfig(rows=100, bytes=4096)
FIXED = [dtype for dtype in DTYPES if dtype.arrow_bits and dtype.oip not in ("BF16", "BYTES")]


def spec(name: str, dtype: str, *shape: int) -> TensorSpec:
    return TensorSpec(f"column_{name}", name, ColumnType(dtype, shape), shape)


CONTRACT = Contract(
    inputs=(spec("x", "float32", 2), spec("flag", "bool")),
    outputs=(spec("y", "bool", 3), spec("z", "int16")),
)


def tensor(name: str, datatype: str, values: Any) -> Tensor:
    return Tensor(name, datatype, values.shape, memoryview(values.tobytes()))


def x_of(rows: int) -> Tensor:
    return tensor("x", "FP32", np.arange(2 * rows, dtype=np.float32).reshape(rows, 2))


def flag_of(rows: int) -> Tensor:
    return tensor("flag", "BOOL", np.arange(rows) % 3 == 0)


@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9, 100])
def test_inputs_follow_the_contract_order_with_packed_booleans(rows: int) -> None:
    x, flag = x_of(rows), flag_of(rows)

    offered = read_inputs(CONTRACT, [flag, x], LIMITS)

    assert offered.rows == rows
    packed = np.packbits(np.arange(rows) % 3 == 0, bitorder="little").tobytes()
    assert [bytes(each) for each in offered.tensors] == [bytes(x.data), packed]


def test_non_boolean_tensors_are_not_copied() -> None:
    x = x_of(4)
    offered = read_inputs(CONTRACT, [x, flag_of(4)], LIMITS)
    assert offered.tensors[0] is x.data


PLAIN = Contract(inputs=(spec("x", "float32", 2), spec("n", "int64")), outputs=CONTRACT.outputs)


def n_of(rows: int) -> Tensor:
    return tensor("n", "INT64", np.arange(rows))


def test_request_of_equal_lengths_reuses_the_match() -> None:
    """The result is in the contract's order. Other lengths need `read_inputs`."""
    first = read_inputs(PLAIN, [n_of(4), x_of(4)], LIMITS)
    fit = match_inputs(PLAIN, [first.tensors[1], first.tensors[0]], first)
    assert fit is not None and fit.contract is PLAIN

    n, x = memoryview(b"n" * 32), memoryview(b"x" * 32)
    offered = fit.offered([n, x])

    assert offered is not None and (offered.rows, offered.bucket) == (4, 0)
    assert offered.tensors[0] is x and offered.tensors[1] is n
    for raw in ([n], [n, x, x], [n[:24], x], [n, x[:24]], []):
        assert fit.offered(raw) is None


def test_matched_request_keeps_the_bucket() -> None:
    first = read_inputs(PLAIN, [n_of(4), x_of(4)], LIMITS)
    raw = [first.tensors[1], first.tensors[0]]
    fit = match_inputs(PLAIN, raw, RequestTensors(4, first.tensors, 3))
    assert fit is not None
    offered = fit.offered(raw)
    assert offered is not None and offered.bucket == 3


def test_converted_tensors_are_not_matched_by_length() -> None:
    x, flag = x_of(4), flag_of(4)
    assert (
        match_inputs(CONTRACT, [x.data, flag.data], read_inputs(CONTRACT, [x, flag], LIMITS))
        is None
    )
    typed = read_inputs(PLAIN, [n_of(4), x_of(4)], LIMITS)
    assert match_inputs(PLAIN, [], typed) is None


REJECTED: dict[str, tuple[list[Tensor], type[IskanderError], str]] = {
    "no inputs": ([], ContractError, "`x` is missing"),
    "one missing": ([x_of(2)], ContractError, "`flag` is missing"),
    "extra input": (
        [x_of(2), flag_of(2), replace(x_of(2), name="w")],
        ContractError,
        "not a model input",
    ),
    "wrong name": (
        [x_of(2), replace(flag_of(2), name="flags")],
        ContractError,
        "`flag` is missing",
    ),
    "duplicate": ([x_of(2), x_of(2)], ContractError, "twice"),
    "datatype": ([replace(x_of(2), datatype="INT32"), flag_of(2)], ContractError, "wanted FP32"),
    "unknown datatype": (
        [replace(x_of(2), datatype="?" * 5000), flag_of(2)],
        ContractError,
        "wanted FP32",
    ),
    "rank": ([replace(x_of(2), shape=(4,)), flag_of(2)], ContractError, r"wanted FP32 \[4, 2\]"),
    "no shape": (
        [replace(x_of(2), shape=()), flag_of(2)],
        ContractError,
        r"\[rows, 2\], got FP32",
    ),
    "trailing shape": ([replace(x_of(2), shape=(2, 3)), flag_of(2)], ContractError, r"\[2, 3\]"),
    "negative trailing": ([replace(x_of(2), shape=(2, -2)), flag_of(2)], ContractError, "-2"),
    "different rows": ([x_of(2), flag_of(3)], ContractError, r"`flag`: wanted BOOL \[2\]"),
    "negative rows": (
        [replace(x_of(2), shape=(-2, 2)), flag_of(2)],
        MalformedInput,
        "rows, got",
    ),
    "too few bytes": ([replace(x_of(2), shape=(3, 2)), flag_of(3)], MalformedInput, "24 bytes"),
    "too many bytes": ([replace(x_of(2), shape=(1, 2)), flag_of(1)], MalformedInput, "8 bytes"),
    "boolean bits": (
        [x_of(9), replace(flag_of(9), data=memoryview(b"\x00\x01"))],
        MalformedInput,
        "9 bytes as BOOL, got 2",
    ),
    "rows": ([x_of(101), flag_of(101)], LimitExceeded, "101, limit 100 "),
    "huge row count": (
        [replace(x_of(1), shape=(1 << 62, 2)), flag_of(1)],
        LimitExceeded,
        "limit 100 ",
    ),
    "bytes": (
        [replace(x_of(2), data=memoryview(bytes(5000))), flag_of(2)],
        LimitExceeded,
        "limit 4096 ",
    ),
}


@pytest.mark.parametrize("name", REJECTED)
def test_inputs_that_violate_the_contract_are_rejected(name: str) -> None:
    tensors, error, message = REJECTED[name]
    with pytest.raises(error, match=message):
        read_inputs(CONTRACT, tensors, LIMITS)


class CountedName(str):
    """A name that counts its comparisons."""

    comparisons = 0

    def __eq__(self, other: object) -> bool:
        CountedName.comparisons += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


@pytest.mark.parametrize("name", ["t{0}", "t{0}" + "x" * 500, "t1"])
def test_many_wrong_names_are_compared_once_and_few_are_reported(name: str) -> None:
    CountedName.comparisons, count = 0, 1000
    tensors = [replace(x_of(1), name=CountedName(name.format(n))) for n in range(count)]

    with pytest.raises(ContractError, match=r"`x` is missing; .*`t1") as caught:
        read_inputs(CONTRACT, tensors, LIMITS)

    assert CountedName.comparisons < 10 * count
    assert caught.value.message.count(" is ") <= PROBLEMS_MAX


def test_scalar_input_has_no_trailing_axis() -> None:
    """One scalar per row has the shape [rows]."""
    with pytest.raises(ContractError, match=r"wanted BOOL \[2\], got BOOL \[2, 1\]"):
        read_inputs(CONTRACT, [x_of(2), replace(flag_of(2), shape=(2, 1))], LIMITS)


@given(
    dtype=st.sampled_from(FIXED),
    rows=st.integers(0, 20),
    shape=st.lists(st.integers(1, 3), max_size=3),
    seed=st.integers(0, 1000),
)
def test_inputs_and_results_round_trip(
    dtype: Dtype, rows: int, shape: list[int], seed: int
) -> None:
    """The arena bytes of an input, read as a result, are the original tensor."""
    one = TensorSpec("t", "t", ColumnType(dtype.arrow, tuple(shape)), tuple(shape))
    contract = Contract(inputs=(one,), outputs=(one,))
    count = rows * math.prod(shape)
    if dtype.arrow_bits == 1:
        raw = (np.random.default_rng(seed).random(count) < 0.5).tobytes()
    else:
        raw = np.random.default_rng(seed).bytes(count * dtype.arrow_bits // 8)
    sent = Tensor("t", dtype.oip, (rows, *shape), memoryview(raw))

    (data,) = read_inputs(contract, [sent], LimitsConfig()).tensors
    offsets, length = body_layout(contract.outputs, rows)
    body = bytearray(length)
    body[offsets[0] : offsets[0] + len(data)] = data
    (actual,) = result_tensors(contract, rows, bytes(body))

    assert (actual.name, actual.datatype, actual.shape) == ("t", dtype.oip, (rows, *shape))
    assert bytes(actual.data) == raw


def test_results_follow_the_contract_order_and_offsets() -> None:
    rows = 5
    (first, second), length = body_layout(CONTRACT.outputs, rows)
    y = np.random.default_rng(1).random(rows * 3) < 0.5
    z = np.arange(rows, dtype=np.int16)
    body = bytearray(length)
    packed = np.packbits(y, bitorder="little").tobytes()
    body[first : first + len(packed)] = packed
    body[second : second + z.nbytes] = z.tobytes()

    results = result_tensors(CONTRACT, rows, body)

    assert [(each.name, each.datatype, each.shape) for each in results] == [
        ("y", "BOOL", (5, 3)),
        ("z", "INT16", (5,)),
    ]
    assert bytes(results[0].data) == y.tobytes() and bytes(results[1].data) == z.tobytes()


@given(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=4), st.integers(0, 9))
def test_result_ranges_match_the_result_tensors(dtypes: list[Dtype], rows: int) -> None:
    """None if a result is not a slice of the body, as with booleans and strings."""
    specs = [spec(f"t{index}", dtype.arrow, index + 1) for index, dtype in enumerate(dtypes)]
    contract = Contract(inputs=(), outputs=tuple(specs))
    ranges = result_ranges(contract, rows)
    if any(dtype.oip in ("BOOL", "BYTES") for dtype in dtypes):
        assert ranges is None
    else:
        body = np.random.default_rng(rows).bytes(body_layout(contract.outputs, rows)[1])
        assert ranges is not None
        assert [body[begin:end] for begin, end in ranges] == [
            bytes(each.data) for each in result_tensors(contract, rows, body)
        ]


def test_zero_rows_give_empty_tensors() -> None:
    assert [len(each.data) for each in result_tensors(CONTRACT, 0, b"")] == [0, 0]


# Strings in the layout of `strings_to_body`.

WORDS = Contract(
    inputs=(spec("a", "utf8", 2), spec("n", "int8"), spec("b", "binary")),
    outputs=(spec("c", "utf8"), spec("flag", "bool"), spec("d", "utf8", 2)),
)


def words(name: str, shape: tuple[int, ...], strings: list[bytes]) -> Tensor:
    return Tensor(name, "BYTES", shape, memoryview(strings_to_body(strings)))


def offered_words(rows: int, **changes: Tensor) -> list[Tensor]:
    tensors = {
        "a": words("a", (rows, 2), [b"%d" % index for index in range(2 * rows)]),
        "n": tensor("n", "INT8", np.arange(rows, dtype=np.int8)),
        "b": words("b", (rows,), ["é".encode() * index for index in range(rows)]),
    }
    return list((tensors | changes).values())


@pytest.mark.parametrize("rows", [0, 1, 12])
def test_strings_are_split_into_offsets_and_bytes(rows: int) -> None:
    """The string bytes of all inputs follow the fixed-width buffers of all inputs."""
    tensors = offered_words(rows)

    a, n, b, a_bytes, b_bytes = read_inputs(WORDS, tensors, LIMITS).tensors

    assert bytes(a) + bytes(a_bytes) == bytes(tensors[0].data)
    assert bytes(n) == bytes(tensors[1].data)
    assert bytes(b) + bytes(b_bytes) == bytes(tensors[2].data)
    assert (len(a), len(b)) == (4 * (2 * rows + 1), 4 * (rows + 1))


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        (words("b", (2,), [b"\xff", b""]), ContractError, "input `b`: Invalid UTF8"),
        (words("b", (2,), [b"x"]), MalformedInput, "`b`: the data are not the 2 strings"),
        (
            words("b", (2,), [b"x", b"y", b"z"]),
            MalformedInput,
            "`b`: the data are not the 2 strings",
        ),
        (
            words("b", (2, 1), [b"x", b"y"]),
            ContractError,
            r"wanted BYTES \[2\], got BYTES \[2, 1\]",
        ),
        (tensor("b", "UINT8", np.zeros(2, np.uint8)), ContractError, "wanted BYTES"),
        (Tensor("b", "BYTES", (2,), memoryview(b"")), MalformedInput, "too small"),
        (
            Tensor("b", "BYTES", (2,), memoryview(np.array([0, 2, 1], np.int32)).cast("B")),
            MalformedInput,
            "`b`: the data are not the 2 strings",
        ),
        (words("b", (2,), [b"x" * 500, b"y" * 501]), LimitExceeded, "string bytes, limit 1000"),
    ],
)
def test_invalid_strings_are_rejected(
    changed: Tensor, error: type[IskanderError], message: str
) -> None:
    limits = LimitsConfig(rows=100, bytes=4096, string_bytes=1000)

    with pytest.raises(error, match=message):
        read_inputs(WORDS, offered_words(2, b=changed), limits)


def test_string_bytes_at_the_limit_are_accepted() -> None:
    limits = LimitsConfig(rows=100, bytes=4096, string_bytes=1004)

    read_inputs(WORDS, offered_words(2, b=words("b", (2,), [b"x" * 500, b"y" * 500])), limits)


def test_string_results_are_contiguous() -> None:
    """The body has a boolean between two string columns, and unrelated bytes at its end."""
    c, d = strings_to_body([b"one", b""]), strings_to_body([b"p", b"qq", b"", "é".encode()])
    body = b"".join(
        each + bytes(-len(each) % 64) for each in (c[:12], b"\x02", d[:20], c[12:], d[20:])
    )

    first, flag, second = result_tensors(WORDS, 2, body + b"others")

    assert body_to_strings(first.data, 2) == [b"one", b""]
    assert bytes(flag.data) == b"\0\1"
    assert body_to_strings(second.data, 4) == [b"p", b"qq", b"", "é".encode()]
    assert (second.datatype, second.shape) == ("BYTES", (2, 2))


def test_zero_rows_give_no_strings() -> None:
    first, _, second = result_tensors(WORDS, 0, b"")

    assert body_to_strings(first.data, 0) == body_to_strings(second.data, 0) == []
