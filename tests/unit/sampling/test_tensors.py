"""Samples as record batches: inputs and results as the gateway and the workers lay them out."""

from __future__ import annotations

import struct

import numpy as np
import pyarrow as pa
import pytest
from support.lanes import lane_of

from iskander.config.models import ModelConfig
from iskander.contract.column_types import ColumnType
from iskander.contract.tensors import Contract, TensorSpec, body_layout
from iskander.gateway.observation.messages import Model, OutputPart
from iskander.sampling.tensors import DAMAGE_ERRORS, Tensors

CONTRACT = Contract(
    inputs=(
        TensorSpec("id", "id", ColumnType("int64"), ()),
        TensorSpec("flag", "flag", ColumnType("bool"), ()),
        TensorSpec("pixels", "pixels", ColumnType("float32", (2, 3)), (2, 3)),
        TensorSpec("name", "name", ColumnType("utf8"), ()),
    ),
    outputs=(
        TensorSpec("y", "y", ColumnType("float32", (2,)), (2,)),
        TensorSpec("small", "small", ColumnType("bfloat16"), ()),
        TensorSpec("label", "label", ColumnType("utf8"), (), string_bytes=16),
    ),
)


@pytest.fixture
def tensors() -> Tensors:
    settings = ModelConfig(name="m", path="p")
    return Tensors(Model(0, 0, "m", "1", CONTRACT, settings))


def input_message(rows: int) -> bytes:
    """A lease of the input arena, laid out by the gateway's own code."""
    lane = lane_of(contract=CONTRACT)
    names = [f"n{index}" for index in range(rows)]
    ends = np.cumsum([0, *map(len, names)]).astype(np.int32)
    buffers = [
        np.arange(rows, dtype=np.int64).tobytes(),
        np.packbits(np.arange(rows) % 2 == 0, bitorder="little").tobytes(),
        np.arange(rows * 6, dtype=np.float32).tobytes(),
        ends.tobytes(),
        "".join(names).encode(),
    ]
    layout = lane.layouts.for_strings(rows, [memoryview(each) for each in buffers])
    body = bytearray(layout.input_bytes - len(layout.header))
    for offset, buffer in zip(layout.offsets, buffers, strict=True):
        body[offset : offset + len(buffer)] = buffer
    return layout.header + bytes(body)


def output_body(first: int, rows: int) -> bytes:
    """Results of some rows, as a worker writes them."""
    offsets, _ = body_layout(CONTRACT.outputs, rows)
    labels = [f"l{first + index}".encode() for index in range(rows)]
    ends = np.cumsum([0, *map(len, labels)]).astype(np.int32)
    buffers = [
        np.arange(2 * first, 2 * (first + rows), dtype=np.float32).tobytes(),
        (np.arange(first, first + rows, dtype=np.float32).view(np.uint32) >> 16)
        .astype(np.uint16)
        .tobytes(),
        ends.tobytes(),
    ]
    start = (offsets[-1] + 4 * (rows + 1) + 63) & -64
    body = bytearray(start) + b"".join(labels)
    body += bytes(-len(body) % 64)
    for offset, buffer in zip(offsets, buffers, strict=True):
        body[offset : offset + len(buffer)] = buffer
    return bytes(body)


def test_inputs(tensors: Tensors) -> None:
    copy = tensors.copy_inputs(memoryview(input_message(3)))
    batch = tensors.read_inputs(copy)
    assert batch.num_rows == 3
    assert batch["id"].to_pylist() == [0, 1, 2]
    assert batch["flag"].to_pylist() == [True, False, True]
    assert batch["pixels"].to_pylist()[1] == [[6, 7, 8], [9, 10, 11]]
    assert batch["name"].to_pylist() == ["n0", "n1", "n2"]


@pytest.mark.parametrize("cut", [[5], [2, 3], [1, 1, 3]])
def test_results_of_one_or_more_batches(tensors: Tensors, cut: list[int]) -> None:
    first, parts, copies = 0, [], []
    for rows in cut:
        parts.append(OutputPart(1, 0, 0, first, rows))
        copies.append(tensors.copy_outputs(memoryview(output_body(first, rows))))
        first += rows
    batch = tensors.read_outputs(tuple(parts), copies)
    assert batch["y"].to_pylist() == [[2 * row, 2 * row + 1] for row in range(5)]
    assert batch["label"].to_pylist() == [f"l{row}" for row in range(5)]
    assert batch["small"].type.extension_name == "iskander.bfloat16"


def test_damaged_strings_are_an_error(tensors: Tensors) -> None:
    """A worker can write into its arena at any time."""
    body = bytearray(output_body(0, 2))
    offset = body_layout(CONTRACT.outputs, 2)[0][2]
    struct.pack_into("<i", body, offset + 4, 1_000_000)
    copy = tensors.copy_outputs(memoryview(bytes(body)))
    with pytest.raises(pa.ArrowInvalid):
        tensors.read_outputs((OutputPart(1, 0, 0, 0, 2),), [copy])
    struct.pack_into("<i", body, offset + 8, 1_000_000)
    copy = tensors.copy_outputs(memoryview(bytes(body)))
    with pytest.raises(AssertionError, match="strings beyond"):
        tensors.read_outputs((OutputPart(1, 0, 0, 0, 2),), [copy])


@pytest.mark.parametrize("message", [b"\xff\xff\xff\xff\0\0\0\0", b"", b"text" * 20])
def test_memory_without_a_message_is_an_error(tensors: Tensors, message: bytes) -> None:
    with pytest.raises(DAMAGE_ERRORS):
        tensors.read_inputs(tensors.copy_inputs(memoryview(message)))
