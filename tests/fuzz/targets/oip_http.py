"""Inference requests over HTTP, with `json`, `zlib` and NumPy as the references.

Layout of an input: coding (1 byte), length of the JSON (2 bytes; 0xFFFF for all of the body), body.
Python's `json` decodes the head of the body, and NumPy each tensor.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import zlib
from random import Random
from typing import Any

import numpy as np
from starlette.datastructures import Headers

from fuzz import mutation
from fuzz.serving import LOOP
from iskander.config.schema import LimitsConfig
from iskander.contract.column_types import ColumnType
from iskander.contract.processing.strings import body_to_strings
from iskander.contract.tensors import Contract, TensorSpec
from iskander.errors import ContractError, IskanderError, LimitExceeded, MalformedInput, Unsupported
from iskander.gateway.protocols import tensors as offered
from iskander.gateway.protocols.oip.http import json_bounds, json_values
from iskander.gateway.protocols.oip.http.body import BodyQuota, ReceivedBody, read_body
from iskander.gateway.protocols.oip.http.json_values import write_data
from iskander.gateway.protocols.oip.http.messages import ParsedRequest, read_raw, read_request
from iskander.gateway.transport.limits.receive_budget import ReceiveBudget

ITERATIONS = 2000
BODY_BYTES_MAX = 100_000
MESSAGE_S = 30.0
FREED_WITHIN_MS = 1000
LIMITS = LimitsConfig(rows=1000, bytes=1 << 20, columns=8)
CODINGS = ("identity", "gzip", "deflate", "br")
ALL = 0xFFFF
DTYPES = {
    "BOOL": "?", "INT8": "i1", "INT16": "<i2", "INT32": "<i4", "INT64": "<i8", "UINT8": "u1",
    "UINT16": "<u2", "UINT32": "<u4", "UINT64": "<u8", "FP32": "<f4", "FP64": "<f8",
}  # fmt: skip
NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
WORDS = [
    *DTYPES, "BYTES", "FP16", "[", "]", "{", "}", ",", ":", '"', "null", "true", "false", "NaN",
    '"NaN"', '"-Infinity"', "1e400", "-0", "1.0", "255", "256", "-129", "18446744073709551616", "0",
    "3.5", "1e39", "binary_data_size", "parameters", "inputs", "shape", "data", "\\u0000",
    "\\ud800", "[[]]", "[1,[2]]", '""', "9" * 400, "binary_data_output", "classification",
]  # fmt: skip


def _contract(datatype: str, shape: tuple[int, ...]) -> Contract:
    names = {"BYTES": "binary", "BOOL": "bool", "FP32": "float32", "FP64": "float64"}
    kind = ColumnType(names.get(datatype, datatype.lower()), shape)
    return Contract((TensorSpec("x", "x", kind, shape),), ())


def seeds() -> list[bytes]:
    data = {
        "FP32": [1, -2.5, "NaN"], "INT64": [1, -2, 1 << 62], "UINT8": [0, 255, 1.0],
        "BOOL": [True, False, True], "BYTES": ["a", "", "é"], "FP64": [[1.0], ["Infinity"], [0]],
        "INT8": [[-128], [127], [0]],
    }  # fmt: skip
    documents = [
        {"inputs": [{"name": "x", "datatype": name, "shape": [3, 1], "data": values}]}
        for name, values in data.items()
    ]
    documents += [
        {"inputs": [{"name": "x", "datatype": name, "shape": [1], "data": [value]}]}
        for name, value in (("INT8", 128), ("UINT8", 256), ("UINT64", 1 << 64), ("INT8", -129))
    ]
    documents[0] |= {"id": "7", "parameters": {"timeout": 5, "binary_data_output": True}}
    documents[1] |= {
        "outputs": [{"name": "y", "parameters": {"binary_data": False}}, {"name": "z"}]
    }
    plain = [b"\0\xff\xff" + json.dumps(each).encode() for each in documents]
    binary = {"name": "x", "datatype": "FP32", "shape": [2, 1]}
    head = json.dumps({"inputs": [{**binary, "parameters": {"binary_data_size": 8}}]}).encode()
    tail = np.arange(2, dtype=np.float32).tobytes()
    raw = head + tail
    size = len(head).to_bytes(2)
    return [
        *plain,
        b"\0" + size + raw,
        b"\1" + size + gzip.compress(raw, mtime=0),
        b"\2" + size + zlib.compress(raw),
        b"\1\xff\xff" + gzip.compress(bytes(200_000), mtime=0),
        b"\0\0\0" + tail,
    ]


def mutate(raw: bytes, other: bytes, random: Random) -> bytes:
    coding = raw[:1]
    if coding == b"\0" and random.randrange(4):
        text = raw[3:].decode("latin-1")
        at = random.randrange(len(text) + 1)
        end = min(at + random.choice((0, 0, 1, 2, 4, 8)), len(text))
        body = (text[:at] + random.choice(WORDS) + text[end:]).encode("latin-1")
        length = int.from_bytes(raw[1:3])
        if length not in (0, ALL):
            length = max(length + len(body) - len(raw) + 3, 0) & 0xFFFF
        return coding + length.to_bytes(2) + body
    if coding == b"\0" and not random.randrange(4):
        pack = random.choice((gzip.compress, zlib.compress))
        return bytes((1 if pack is gzip.compress else 2,)) + raw[1:3] + pack(raw[3:])
    return mutation.flip(raw, other, random)


def run(raw: bytes) -> None:
    coding = CODINGS[raw[0] % len(CODINGS)] if raw else "identity"
    json_bytes, sent = int.from_bytes(raw[1:3]), raw[3:]
    body = LOOP.run_until_complete(received(sent, coding, Random(zlib.crc32(raw))))
    expected = decompressed(sent, coding)
    assert body == expected, "different body"
    if body is None:
        return
    if json_bytes == 0:
        check_raw(body)
        return
    length = None if json_bytes == ALL else json_bytes
    document = reference(body if length is None else body[:length])
    check_request(body, length, document)


async def received(sent: bytes, coding: str, random: Random) -> bytes | None:
    """The body as the gateway reads it in pieces; None if it is rejected."""
    cuts = sorted(random.randint(0, len(sent)) for _ in range(random.choice((0, 1, 5))))
    pieces = [sent[a:b] for a, b in zip([0, *cuts], [*cuts, len(sent)], strict=True)]
    chunks = iter([*pieces[:-1], pieces[-1]])
    left = len(pieces)

    async def receive() -> dict[str, Any]:
        nonlocal left
        left -= 1
        await asyncio.sleep(0)
        return {"type": "http.request", "body": next(chunks), "more_body": left > 0}

    budget = ReceiveBudget(100 * BODY_BYTES_MAX)
    quota = BodyQuota(10 * BODY_BYTES_MAX, budget, MESSAGE_S, lambda reason: None)
    with ReceivedBody(quota) as held:
        try:
            headers = Headers({"content-encoding": coding})
            body = bytes(await read_body(receive, headers, BODY_BYTES_MAX, held))
        except (LimitExceeded, MalformedInput, Unsupported):
            body = None
        assert quota.held_bytes <= 2 * BODY_BYTES_MAX
    # A thread keeps a reference to its result until the next turn of the loop.
    for _ in range(FREED_WITHIN_MS):
        if not budget.used_bytes:
            break
        await asyncio.sleep(0.001)
    assert quota.held_bytes == budget.used_bytes == 0
    return body


def decompressed(sent: bytes, coding: str) -> bytes | None:
    if coding == "identity":
        return sent
    if coding == "br":
        return None
    decompressor = zlib.decompressobj(31 if coding == "gzip" else 15)
    try:
        body = decompressor.decompress(sent, BODY_BYTES_MAX + 1)
    except zlib.error:
        return None
    is_whole = decompressor.eof and not decompressor.unused_data and len(body) <= BODY_BYTES_MAX
    return body if is_whole else None


def reference(raw: bytes) -> Any:
    """A document decoded by `json`, which is more lenient; None if it is invalid.

    Unknown names may be invalid UTF-8.
    """
    try:
        return json.loads(raw.decode(errors="replace"), parse_constant=lambda name: math.nan)
    except (ValueError, RecursionError):
        return None


def check_raw(body: bytes) -> None:
    for contract in (_contract("FP32", (2,)), _contract("BYTES", ())):
        try:
            request = read_raw(contract, memoryview(body))
        except ContractError:
            assert contract.inputs[0].type.dtype.oip == "FP32" and len(body) % 8
            continue
        (tensor,) = request.tensors
        if tensor.datatype == "FP32":
            assert bytes(tensor.data) == body and tensor.shape == (len(body) // 8, 2)
        else:
            assert [bytes(each) for each in body_to_strings(tensor.data, 1)] == [body]


def check_request(body: bytes, length: int | None, document: Any) -> None:
    contract = contract_for(document)
    before = json_values.CHECKED_BYTES, json_bounds.PIECE_BYTES
    # Half of the inputs are short texts that are read as long ones.
    json_values.CHECKED_BYTES = (4096, 0)[zlib.crc32(body) & 1]
    json_bounds.PIECE_BYTES = 8
    try:
        request = read_request(memoryview(body), length, contract, LIMITS)
    except IskanderError as error:
        assert isinstance(error, ContractError | LimitExceeded | MalformedInput | Unsupported)
        assert not is_plain(document, length), f"rejected: {error}"
        return
    finally:  # Other tests of this process need the constants.
        json_values.CHECKED_BYTES, json_bounds.PIECE_BYTES = before
    assert isinstance(document, dict), "accepted, but json rejects it"
    inputs = document["inputs"]
    assert [(each["name"], each["datatype"], tuple(each["shape"])) for each in inputs] == [
        (tensor.name, tensor.datatype, tensor.shape) for tensor in request.tensors
    ]
    assert request.id == (document.get("id") or "")
    check_tensors(request, inputs, body, len(body) if length is None else length)
    try:
        offered.read_inputs(contract, request.tensors, LIMITS)
    except IskanderError:
        return


def contract_for(document: Any) -> Contract:
    """The contract of a model that accepts the first input."""
    try:
        first = document["inputs"][0]
        shape = tuple(max(int(each), 0) for each in first["shape"][1:])
        datatype = first["datatype"] if first["datatype"] in (*DTYPES, "BYTES") else "FP32"
        return _contract(datatype, shape)
    except (TypeError, LookupError, ValueError, AttributeError, OverflowError):
        return _contract("FP32", (1,))


def check_tensors(request: ParsedRequest, inputs: list[Any], body: bytes, at: int) -> None:
    is_named = [each["name"] for each in inputs] == ["x"]
    for each, tensor in zip(inputs, request.tensors, strict=True):
        size = (each.get("parameters") or {}).get("binary_data_size")
        raw = body[at : at + (size or 0)]
        at += len(raw)
        if not is_named:
            continue
        if size is not None:
            assert tensor.datatype == "BYTES" or bytes(tensor.data) == raw
            continue
        elements = flat(each["data"])
        assert len(elements) == math.prod(tensor.shape)
        if tensor.datatype == "BYTES":
            texts = [text.encode() for text in elements]
            assert [bytes(one) for one in body_to_strings(tensor.data, len(texts))] == texts
        else:
            with np.errstate(over="ignore"):
                expected = np.array(
                    [NOT_FINITE.get(x, x) if isinstance(x, str) else x for x in elements],
                    object if tensor.datatype.startswith(("I", "U")) else None,
                ).astype(DTYPES[tensor.datatype])
            actual = np.frombuffer(tensor.data, DTYPES[tensor.datatype])
            assert np.array_equal(actual, expected.reshape(-1), equal_nan=actual.dtype.kind == "f")
        assert len(json.loads(bytes(write_data(tensor)))) == len(elements)
    assert at == len(body)


def flat(data: Any) -> list[Any]:
    return [each for inner in data for each in flat(inner)] if isinstance(data, list) else [data]


def is_plain(document: Any, length: int | None) -> bool:
    """Whether a request must be accepted: one input of small integers."""
    if length is not None or not isinstance(document, dict) or set(document) != {"inputs"}:
        return False
    inputs = document["inputs"]
    if not (isinstance(inputs, list) and len(inputs) == 1 and isinstance(inputs[0], dict)):
        return False
    one = inputs[0]
    if set(one) != {"name", "datatype", "shape", "data"} or one["name"] != "x":
        return False
    shape, data = one["shape"], one["data"]
    return (
        one["datatype"] in ("INT8", "INT64")
        and isinstance(shape, list)
        and len(shape) <= 4
        and all(type(axis) is int and axis >= 0 for axis in shape)
        and isinstance(data, list)
        and all(type(each) is int and -128 <= each < 128 for each in data)
        and len(data) == math.prod(shape)
    )
