"""Vocabulary lookup: line numbers, one-hot rows, and unknown values."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from iskander_worker.backends import Arrays, Run
from iskander_worker.batches.vocabulary import Vocabularies

from iskander.contract.compile import compile_contract
from iskander.contract.graph import Dimension, Graph, GraphTensor
from iskander.contract.manifest import Manifest
from iskander.errors import ContractError, ManifestError

LINES = ("red", "green", "")


def lookup(
    text: Any, lines: tuple[str, ...] = LINES, element: str = "int64",
    trailing: tuple[Dimension, ...] = (), **keys: Any,
) -> np.ndarray:  # fmt: skip
    """Returns the input of the graph for a tensor of text."""
    entry = {"tensor": "x", "column": "c", "vocabulary": "words.txt"} | keys
    output = {"tensor": "y", "column": "y", "type": "float32"}
    manifest = msgspec.convert({"format": 1, "inputs": [entry], "outputs": [output]}, Manifest)
    inputs = [GraphTensor("x", f"tensor({element})", ("rows", *trailing))]
    if keys.get("mask"):
        inputs.append(GraphTensor("m", "tensor(bool)", ("rows", *trailing)))
    graph = Graph(
        tuple(inputs),
        (GraphTensor("y", "tensor(float)", ("rows",)),),
    )
    contract = compile_contract(manifest, graph)
    assert contract.inputs[0].is_string
    received: dict[str, np.ndarray] = {}

    def compute(arrays: Arrays, _wanted: Any, _run: Run) -> Arrays:
        received.update(arrays)
        return {}

    lookups = Vocabularies(contract, graph, {"words.txt": lines})
    lookups.around(compute)({"x": np.array(text, object)}, ["y"], Run())
    return received["x"]


def test_values_become_line_numbers() -> None:
    result = lookup(["", "red", "green"])
    assert result.tolist() == [2, 0, 1] and result.dtype == np.int64
    assert lookup(["green"], element="int32").dtype == np.int32


def test_one_hot_rows_have_the_width_of_the_graph_input() -> None:
    result = lookup(["", "red"], trailing=(4,), element="float", one_hot=True)
    assert result.tolist() == [[0, 0, 1, 0], [1, 0, 0, 0]] and result.dtype == np.float32
    result = lookup(["no"], trailing=("n",), element="bool", one_hot=True, unknown=3)
    assert result.tolist() == [[False, False, False, True]]


def test_lists_of_values() -> None:
    result = lookup(
        [["red", ""], ["?", "green"]], type="list<utf8>", max_length=2, trailing=(2,), unknown=9
    )
    assert result.tolist() == [[0, 2], [9, 1]]


def test_unknown_value_is_a_contract_error() -> None:
    with pytest.raises(ContractError, match=r"`c` has `blue`.*`words.txt` \(1 of 2 values\)"):
        lookup(["red", "blue"])


LIST = {"type": "list<utf8>", "max_length": 3, "trailing": (3,)}
MASKED = {"nulls": "mask", "mask": "m"}


@pytest.mark.parametrize(
    ("message", "lines", "keys"),
    [
        ("has the padding ``", ("red",), LIST),
        ("has the padding `PAD`", LINES, LIST | {"padding": "PAD"}),
        ("has the padding ``", ("red",), LIST | {"fill": "red"}),
        ("has the fill ``", ("red",), MASKED),
        ("has the fill `none`", ("red",), MASKED | {"fill": "none"}),
        ("has the fill `none`", LINES, {"fill": "none"}),
        ("has the fill `none`", LINES, LIST | {"fill": "none"}),
    ],
)
def test_padding_and_fill_must_be_in_the_vocabulary(
    message: str, lines: Any, keys: dict[str, Any]
) -> None:
    """Otherwise requests fail for a value that the client did not send."""
    with pytest.raises(ManifestError, match=rf"{message}, which is not in.*no `unknown`"):
        lookup(["red"], lines, **keys)
    shape: Any = [["red"]] if "type" in keys else ["red"]
    for more, known in ((("PAD", "none", ""), {}), ((), {"unknown": 7})):
        result = lookup(shape, (*dict.fromkeys((*lines, *more)),), **keys, **known)
        assert result.reshape(-1).tolist() == [0]


@pytest.mark.parametrize(
    ("message", "lines", "keys"),
    [
        ("a line twice", ("a", "a"), {}),
        ("has 3 numbers, and the graph accepts 2", LINES,
         {"trailing": (2,), "element": "float", "one_hot": True}),
        ("has 9 numbers, and the graph accepts 4", LINES,
         {"trailing": (4,), "element": "float", "one_hot": True, "unknown": 8}),
        ("a vocabulary makes int32, int64", LINES, {"element": "float"}),
        ("expected a file beside the model", LINES, {"vocabulary": "../words.txt"}),
        ("looks up text", LINES, {"type": "float32"}),
    ],
)  # fmt: skip
def test_mismatched_vocabulary_is_rejected(message: str, lines: Any, keys: dict[str, Any]) -> None:
    with pytest.raises(ManifestError, match=message):
        lookup(["red"], lines, **keys)
